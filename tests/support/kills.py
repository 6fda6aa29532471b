"""A callback that ends ranks of ``ballast-train run --ranks`` from inside, each once."""

import os
import signal
import threading
from pathlib import Path


def strike(event, step, values, folder, strikes):
    """Send this rank the signals that are due.

    Args:
        event, step, values: of the trainer.
        folder: an empty one, which the ranks share.
        strikes: each step, rank, milliseconds after that step, name of a signal.
    """
    for number, (at, rank, milliseconds, name) in enumerate(strikes):
        marker = Path(folder, f"strike-{number}")
        mine = event == "step" and step == at and os.environ.get("RANK") == str(rank)
        if mine and not marker.exists():
            marker.touch()
            send = threading.Timer(milliseconds / 1000, os.kill, (os.getpid(), signal.Signals[name]))
            send.daemon = True
            send.start()
            if not milliseconds:
                send.join()


def struck(config, folder, *strikes):
    """The configuration in which they are sent."""
    folder.mkdir()
    args = {"folder": os.fspath(folder), "strikes": [list(strike) for strike in strikes]}
    return {**config, "callback": {"name": "tests.support.kills:strike", "everyRank": True, "args": args}}
