"""The end of a job: after its last step, or earlier where its callback asks for it."""

import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ballast_policies.contract.decode import decode_text

from ballast_trainer.checkpoints.folder import write_durably
from ballast_trainer.loop.state import ModelState, RunState
from ballast_trainer.reporting.callback import CallingReporter

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
    """End of the job before its last step, ``early``: the callback's reason on every rank; None: no end."""

    def __init__(self, model: ModelState, run: RunState, callback: CallingReporter | None) -> None:
        """Prepare; ``callback``: this rank's, which may ask for the end; None: it has none."""
        self._model, self._run, self._callback = model, run, callback
        self.early: str | None = None

    @property
    def reached(self) -> bool:
        """No step is left to train."""
        return self.early is not None or self._run.step >= self._model.config.total_steps

    @property
    def requested(self) -> bool:
        """This rank's callback has asked for the end."""
        return self._reason is not None

    @property
    def _reason(self) -> str | None:
        return None if self._callback is None else self._callback.asked_to_end

    def agree(self) -> bool:
        """True if a rank's callback has asked for the end; collective, in jobs with a callback."""
        model = self._model
        if model.config.callback is None or self.reached:
            return self.early is not None
        if model.world.sum([float(self.requested)])[0] > 0:
            reasons = model.world.gather(self._reason)
            self.early = next(reason for reason in reasons if reason is not None)
        return self.early is not None

    def resume(self) -> None:
        """Take over the early end that an earlier launch has noted at the step loaded; collective."""
        model = self._model
        if model.config.callback is not None:
            self.early = model.world.from_rank_0(self._noted() if model.world.rank == 0 else None)

    def _file(self) -> Path | None:
        folder = self._model.config.checkpoint.path
        return Path(folder) / EARLY_END if folder is not None else None

    def note(self) -> None:
        """Note an early end beside its checkpoint; a failure costs a later launch some steps."""
        path = self._file()
        if self._model.world.rank != 0 or path is None or self.early is None:
            return
        try:
            write_durably(path, json.dumps(dataclasses.asdict(self._end(self.early))))
        except OSError as error:
            logger.warning("the early end is not noted: %s; a launch that follows trains on", error)

    def _noted(self) -> str | None:
        """The reason of an early end at this step by this callback."""
        path = self._file()
        if path is None:
            return None
        try:
            end = decode_text(EarlyEnd, path.read_text(), unknown="ignore", spelling=str)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.warning("%s cannot be read: %s; training continues", path, error)
            return None
        return end.reason if end == self._end(end.reason) else None

    def _end(self, reason: str) -> EarlyEnd:
        """End after this step, as this job's callback would ask for it."""
        callback = self._model.config.callback
        assert callback is not None, "no other asks for it"
        return EarlyEnd(step=self._run.step, reason=reason, callback=callback.name, args=dict(callback.args))
