"""A callback for Lightning: progress, checkpoints that are whole, and one more before the job is stopped.

ballast = BallastCallback(every=500)
trainer = Trainer(..., callbacks=[ballast])
trainer.fit(model, data, ckpt_path=ballast.newest_checkpoint())
"""

import os
from typing import Any

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback

from ballast_client.job import Job


class BallastCallback(Callback):  # type: ignore[misc, unused-ignore]  # where it has no types
    """Saves every ``every`` steps (None: only when asked to) in ``spec.checkpoint.path``."""

    def __init__(self, job: Job | None = None, *, every: int | None = None) -> None:
        self.job = job if job is not None else Job()
        self._every = every
        self._checkpoints = self.job.checkpoints
        self._step = 0

    def newest_checkpoint(self) -> str | None:
        """Path of the newest checkpoint, for ``ckpt_path`` of ``Trainer.fit``."""
        newest = self._checkpoints.newest()
        return os.fspath(newest[1]) if newest is not None else None

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Training begins, or resumes."""
        self._step = trainer.global_step
        self.job.resumed(self._step)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        """A batch is done; several may make one optimizer step."""
        step = trainer.global_step
        if step == self._step:
            return
        self._step = step
        last = self.job.step(step)
        if last or (self._every is not None and step % self._every == 0):
            self._save(trainer, step)
        if last and step != trainer.max_steps:
            self.job.leave(step)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """All steps are done."""
        self.job.finish(self._step)

    def _save(self, trainer: Any, step: int) -> None:
        """Every rank takes part; rank 0 gives the file its name when it is whole."""
        if self.job.rank == 0:
            self._checkpoints.save(step, lambda path: trainer.save_checkpoint(path, weights_only=False))
        else:
            trainer.save_checkpoint(self._checkpoints.unfinished(step), weights_only=False)
        self.job.saved(step)
