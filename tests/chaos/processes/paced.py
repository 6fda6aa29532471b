"""In the trainer's pods: data that comes at a pace, and a diary of the steps that were begun."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def note(folder: Path, step: int) -> None:
    """One line: this process is about to do the step after ``step`` steps."""
    file = folder / f"{os.environ['BALLAST_POD_NAME']}.{os.getpid()}.jsonl"
    with file.open("a") as diary:
        diary.write(json.dumps({"step": step, "time": time.time()}) + "\n")


def batches(folder: str, seconds: float, context: int) -> Callable[[int, int, int], Any]:
    """Batches of a text, one in ``seconds``."""
    from ballast_trainer.data.corpus import text_batch

    def batch(seed: int, step: int, size: int) -> Any:
        note(Path(folder), step)
        time.sleep(seconds)
        return text_batch(seed, step, size, context)

    return batch


def script(folder: Path, seconds: float) -> None:
    """A user's script with the client library: nothing is learnt, the step is in the checkpoint's name."""
    import ballast_client

    job = ballast_client.Job(hang_seconds=10)
    for step in job.steps(load=lambda path: path.read_text(), save=lambda path: path.write_text("weights")):
        note(folder, step)
        time.sleep(seconds)


if __name__ == "__main__":
    import sys

    script(Path(sys.argv[1]), float(sys.argv[2]))
