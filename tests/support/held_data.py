"""Text whose batches of some steps wait for the test, so that training lasts until the test has acted."""

import time
from pathlib import Path

from ballast_trainer.data.corpus import text_batch
from ballast_trainer.data.sources import batches_from
from ballast_trainer.models.registry import load_callable

EVALUATED = {
    "everySteps": 1,
    "batches": 1,
    "data": {"name": "tests.support.held_data:text", "args": {"context": 16}},
}
"""An evaluation after each step, on data that never waits."""


class Gates:
    """Steps that do not begin until :meth:`open` is called for them, in their order.

    Args:
        folder: an empty one, shared with the ranks.
        steps: whose batches wait.
    """

    def __init__(self, folder: Path, *steps: int) -> None:
        folder.mkdir()
        self._folder = folder
        self._closed = list(steps)

    def hold(self, config: dict) -> dict:
        """The configuration with data that waits; batches are those of the corpus."""
        context = config["model"]["args"]["context"]
        args = {"folder": str(self._folder), "steps": list(self._closed), "context": context}
        return {**config, "data": {"name": "tests.support.held_data:batches", "args": args}}

    def hold_own(self, config: dict) -> dict:
        """The configuration with its own data, which waits."""
        args = {"folder": str(self._folder), "steps": list(self._closed), **config["data"]}
        return {**config, "data": {"name": "tests.support.held_data:own_batches", "args": args}}

    def open(self) -> None:
        """Let the next step that waits begin; without one, nothing happens."""
        if self._closed:
            (self._folder / str(self._closed.pop(0))).touch()

    def waiting(self) -> bool:
        """Whether a rank waits for the next closed step: the one before it, with its evaluation, is over."""
        return bool(self._closed) and (self._folder / f"waiting-{self._closed[0]}").exists()


def batches(folder, steps, context):
    def batch(seed, step, size):
        wait(folder, steps, step)
        return text_batch(seed, step, size, context)

    # Layers move while the next batch is held.
    batch.one_shape = True
    return batch


def own_batches(folder, steps, name, args):
    own = batches_from(load_callable("data.name", name)(**args))

    def batch(seed, step, size):
        wait(folder, steps, step)
        return own(seed, step, size)

    # Layers move while the next batch is held.
    batch.one_shape = True
    return batch


def wait(folder, steps, step):
    if step in steps:
        Path(folder, f"waiting-{step}").touch()
    while step in steps and not Path(folder, str(step)).exists():
        time.sleep(0.01)


def text(context):
    """Batches of the corpus that never wait."""
    return lambda seed, step, size: text_batch(seed, step, size, context)
