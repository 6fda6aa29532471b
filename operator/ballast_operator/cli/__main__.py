"""The ``ballast`` program, also as ``python -m ballast_operator.cli``."""

import sys


def main(prog_name: str | None = None) -> None:
    """Run it. Ctrl-C while it is imported ends it silently; later it is the program's own."""
    try:
        from ballast_operator.cli.main import main as program
    except KeyboardInterrupt:
        sys.exit(130)
    program(prog_name=prog_name)


if __name__ == "__main__":
    main(prog_name="ballast")
