"""The ``ballast-train`` program, also as ``python -m ballast_trainer``."""

import sys


def main() -> None:
    """Run it. Ctrl-C while it is imported ends it silently; later it is the program's own."""
    try:
        from ballast_trainer.cli.main import main as program
    except KeyboardInterrupt:
        sys.exit(130)
    program()


if __name__ == "__main__":
    main()
