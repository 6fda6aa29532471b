"""The ``ballast`` program, also as ``python -m ballast_operator.cli``."""

import os
import signal
import sys


def main(prog_name: str | None = None) -> None:
    """Run it. Ctrl-C while it is imported ends it silently; later it is the program's own.

    SIGTERM, or the end of its terminal, ends it once it has removed what it keeps for its run alone.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores one
            signal.signal(number, _end)
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed: nothing is read there, and no other file takes its number
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "r+"))
    try:
        from ballast_operator.cli.main import main as program
    except KeyboardInterrupt:
        sys.exit(130)
    program(prog_name=prog_name)


def _end(number: int, _: object) -> None:
    for again in (signal.SIGTERM, signal.SIGHUP):  # of a terminal's end both may come
        signal.signal(again, signal.SIG_IGN)
    sys.exit(128 + number)


if __name__ == "__main__":
    main(prog_name="ballast")
