"""The ``ballast-train`` program, also as ``python -m ballast_trainer``."""

import os
import sys


def main() -> None:
    """Run it. Ctrl-C while it is imported ends it silently; later it is the program's own."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed: nothing is read there, and no other file takes its number
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "r+"))
    try:
        from ballast_trainer.cli.main import main as program
    except KeyboardInterrupt:
        sys.exit(130)
    program()


if __name__ == "__main__":
    main()
