"""Callbacks that end ranks of ``ballast-train run --ranks`` and of pods from inside, each once."""

import ctypes
import mmap
import os
import signal
import threading
from pathlib import Path

import torch
import torch.distributed as dist

_LARGE = 2**18
"""Bytes; pieces of a message that travel as a whole have an eighth of it."""


def strike(event, step, values, folder, strikes):
    """Send this rank the signals that are due.

    Args:
        event, step, values: of the trainer.
        folder: an empty one, which the ranks share.
        strikes: each step, rank, milliseconds after that step, name of a signal.
    """
    for number, (at, rank, milliseconds, name) in enumerate(strikes):
        marker = Path(folder, f"strike-{number}")
        mine = event == "step" and step == at and _rank() == rank
        if mine and not marker.exists():
            marker.touch()
            send = threading.Timer(milliseconds / 1000, os.kill, (os.getpid(), signal.Signals[name]))
            send.daemon = True
            send.start()
            if not milliseconds:
                send.join()


def _rank():
    """As launched; of a pod's ranks by the number of its first."""
    first = os.environ.get("FIRST_RANK")
    return int(os.environ["RANK"]) if first is None else int(first) + int(os.environ["LOCAL_RANK"])


def struck(config, folder, *strikes):
    """The configuration in which they are sent."""
    folder.mkdir()
    args = {"folder": os.fspath(folder), "strikes": [list(strike) for strike in strikes]}
    return {**config, "callback": {"name": "tests.support.kills:strike", "everyRank": True, "args": args}}


def break_off(event, step, values, at, rank, copying):
    """After step ``at`` this rank sends a half of its next large message, or copy, and is killed."""
    if event == "step" and step == at and os.environ.get("RANK") == str(rank):
        send = dist.isend

        def send_half(tensor, *args, **kwargs):
            # The network takes smaller pieces as a whole.
            copies = threading.current_thread().name == "memory-copy"
            if tensor.nbytes < _LARGE or copies != copying:
                return send(tensor, *args, **kwargs)
            # Where gloo waits for memory that it can read, in place of raising.
            killed = threading.Timer(5, os.kill, (os.getpid(), signal.SIGKILL))
            killed.daemon = True
            killed.start()
            try:
                send(_unreadable_half(tensor), *args, **kwargs).wait()
            finally:
                os.kill(os.getpid(), signal.SIGKILL)

        dist.isend = send_half


def _unreadable_half(tensor):
    """The same bytes, the second half of which cannot be read."""
    size, page = tensor.nbytes, mmap.PAGESIZE
    edge = -(-(size // 2) // page) * page
    memory = torch.frombuffer(mmap.mmap(-1, edge + size), dtype=torch.uint8)
    copy = memory[edge - size // 2 :][:size]
    copy.copy_(tensor.contiguous().view(torch.uint8).flatten())
    assert (
        ctypes.CDLL(None).mprotect(ctypes.c_void_p(memory.data_ptr() + edge), ctypes.c_size_t(size), 0) == 0
    )
    return copy
