"""The end of a job: after its last step, or earlier where its callback asks for it."""

import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ballast_policies.contract import ExitReason
from ballast_policies.contract.decode import decode_text

from ballast_trainer.checkpoints.folder import write_durably
from ballast_trainer.evaluation.evaluator import Evaluator
from ballast_trainer.loop.rank_zero import RankZeroReporter, SessionOutcome
from ballast_trainer.loop.saving import Saver, export_at_end
from ballast_trainer.loop.state import TrainingState
from ballast_trainer.reporting.callback import EndRequest

logger = logging.getLogger(__name__)

EARLY_END = "ended-early.json"
"""File beside the checkpoints: the job has ended at this step, although its configuration has more."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EarlyEnd:
    """An early end as it is noted, so that a launch that follows does not train on.

    Attributes:
        step: of the last checkpoint.
        reason: the callback's.
        callback: its name.
        args: its arguments. With other ones, or without a callback, the job trains on.
    """

    step: int
    reason: str
    callback: str
    args: Mapping[str, Any]


class JobEnd:
    """Whether the job ends before its last step, and what is done at the end.

    Attributes:
        early: why the callback ends the job early, the same on every rank; None: it does not.
    """

    def __init__(
        self,
        training: TrainingState,
        saver: Saver,
        evaluator: Evaluator,
        rank_zero: RankZeroReporter,
        request: EndRequest,
    ) -> None:
        """Prepare; ``request`` is where this rank's callback asks for the end."""
        self._training, self._saver, self._evaluator = training, saver, evaluator
        self._rank_zero, self._request = rank_zero, request
        self.early: str | None = None

    @property
    def reached(self) -> bool:
        """No step is left to train."""
        return self.early is not None or self._training.step >= self._training.config.total_steps

    @property
    def requested(self) -> bool:
        """This rank's callback has asked for the end."""
        return self._request.reason is not None

    def agree(self) -> bool:
        """Whether a rank's callback has asked for the end; collective, in jobs with a callback."""
        training = self._training
        if training.config.callback is None or self.reached:
            return self.early is not None
        if training.world.sum([float(self.requested)])[0] > 0:
            reasons = training.world.gather(self._request.reason)
            self.early = next(reason for reason in reasons if reason is not None)
        return self.early is not None

    def resume(self) -> None:
        """Take over the early end that an earlier launch has noted at the step loaded; collective."""
        training = self._training
        if training.config.callback is not None:
            self.early = training.world.from_rank_0(self._noted() if training.world.rank == 0 else None)

    def finish(self) -> SessionOutcome:
        """Save, evaluate and export the trained model; collective.

        Raises:
            CheckpointError: the state cannot be saved, or the model cannot be exported.
        """
        training, rank_zero = self._training, self._rank_zero
        step, total = training.step, training.config.total_steps
        if step > (rank_zero.progress.resumed_from_step or 0):
            rank_zero.print_figures(at_end=True)
        self._saver.save_last()
        if self.early is not None:
            self._note(self.early)
        if (
            self._evaluator.evaluated_step != step
            and self._evaluator.evaluate(follow_plans=False) is not None
        ):
            return rank_zero.ended(ExitReason.STOPPED, "told to stop in the last evaluation")
        export_at_end(training, rank_zero.event)
        message = f"all {total} steps are done"
        if self.early is not None:
            message = f"ended by its callback after step {step} of {total}: {self.early}"
            rank_zero.event("endedEarly", reason=self.early)
        if rank_zero.channel_thread is not None:
            rank_zero.channel_thread.close(finished_step=step, end_reason=self.early)
        return rank_zero.ended(ExitReason.FINISHED, message)

    def _file(self) -> Path | None:
        folder = self._training.config.checkpoint.path
        return Path(folder) / EARLY_END if folder is not None else None

    def _note(self, reason: str) -> None:
        """Note the early end beside its checkpoint; a failure costs a later launch some steps."""
        path, callback = self._file(), self._training.config.callback
        if self._training.world.rank != 0 or path is None or callback is None:
            return
        end = EarlyEnd(
            step=self._training.step, reason=reason, callback=callback.name, args=dict(callback.args)
        )
        try:
            write_durably(path, json.dumps(dataclasses.asdict(end)))
        except OSError as error:
            logger.warning("the early end is not noted: %s; a launch that follows trains on", error)

    def _noted(self) -> str | None:
        """The reason of an early end at this step by this callback."""
        path, callback = self._file(), self._training.config.callback
        if path is None or callback is None:
            return None
        try:
            end = decode_text(EarlyEnd, path.read_text(), unknown="ignore", spelling=str)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.warning("%s cannot be read: %s; training continues", path, error)
            return None
        same = (end.step, end.callback, dict(end.args)) == (
            self._training.step,
            callback.name,
            dict(callback.args),
        )
        return end.reason if same else None
