"""A callback for Hugging Face's ``Trainer``: progress, and a checkpoint before the job is stopped.

    trainer = Trainer(..., callbacks=[BallastCallback()])
    trainer.train(resume_from_checkpoint=newest_checkpoint(arguments.output_dir))

Put ``output_dir`` on the volume of ``spec.checkpoint.path``.
"""

import os
import re
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ballast_client.job import Job


class BallastCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]  # where it has no types
    """Saves and leaves when the job is asked to; ``job``: one that exists already."""

    def __init__(self, job: Job | None = None) -> None:
        self.job = job if job is not None else Job()

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Training begins, or resumes."""
        self.job.resumed(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """An optimizer step is done."""
        if self.job.step(state.global_step):
            control.should_save = True
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        """The loss, as often as it is logged."""
        loss = (logs or {}).get("loss")
        if isinstance(loss, int | float):
            self.job.report(loss=loss)

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """A checkpoint is complete."""
        self.job.saved(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """All steps are done, or the last one of this launch."""
        if self.job.leaving and state.global_step < state.max_steps:
            self.job.leave(state.global_step)
        self.job.finish(state.global_step)


def newest_checkpoint(output_dir: "os.PathLike[str] | str") -> str | None:
    """The newest complete checkpoint of a ``Trainer``, or None: for ``resume_from_checkpoint``."""
    folder = Path(output_dir)
    if not folder.is_dir():
        return None
    steps = {
        int(match[1]): path
        for path in folder.iterdir()
        if (match := re.fullmatch(r"checkpoint-([0-9]+)", path.name))
        and (path / "trainer_state.json").is_file()
    }
    return os.fspath(steps[max(steps)]) if steps else None
