"""The user's callback: told of steps, evaluations and checkpoints, on rank 0 or on every rank.

``callback.name`` is called as ``callable(event, step, values, **callback.args)`` with plain values, after the
event.  What it returns is not used; :class:`StopTraining` raised in it ends the job as after its last step.
It draws its random numbers from the host's generators without changing those of the training, nor does it
change whether torch records gradients.
"""

import copy
import logging
from collections.abc import Mapping
from typing import Any

import torch
from ballast_policies.contract.job.output import CallbackConfig, CallbackError

from ballast_trainer.causes import describe
from ballast_trainer.distributed.activity import ACTIVITY, Limit
from ballast_trainer.errors import TrainerError
from ballast_trainer.models.registry import load_callable
from ballast_trainer.reporting.console import Reporter
from ballast_trainer.seeding import host_seeded

logger = logging.getLogger(__name__)

EVENTS = ("step", "evaluation", "checkpoint")
"""Events that it is told of."""

NO_REASON = "no reason given"

LONGEST_END_REASON = 1024
"""Characters of a reason that are kept: it is shown in the job's conditions."""


class CallbackFailed(TrainerError):  # noqa: N818
    """The user's callback raised."""

    shows_cause = True


class StopTraining(Exception):  # noqa: N818
    """Raised by a callback: the job has trained enough, for a ``reason`` as the user reads it."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)


class CallingReporter:
    """Reports by another reporter, then tells the user's callback.

    Attributes:
        asked_to_end: the callback's first reason to end the job; None: it has not asked.
    """

    def __init__(self, reporter: Reporter, config: CallbackConfig) -> None:
        """Load the callback. Raises ConfigurationError: there is no such callable."""
        self._reporter, self._config = reporter, config
        self.asked_to_end: str | None = None
        self._called = load_callable("callback.name", config.name)
        self._reported: set[str] = set()

    def step(self, **fields: Any) -> None:
        """A step is done."""
        self._reporter.step(**fields)
        self._call("step", fields)

    def event(self, name: str, **fields: Any) -> None:
        """Something happened."""
        self._reporter.event(name, **fields)
        if name in EVENTS:
            self._call(name, fields)

    def _call(self, event: str, fields: Mapping[str, Any]) -> None:
        step = fields["step"]
        values = {name: copy.deepcopy(value) for name, value in fields.items() if name != "step"}
        try:
            # Torch's mode is that of the thread, and would be the training's.
            mode = torch.set_grad_enabled(torch.is_grad_enabled())
            busy = ACTIVITY.doing("callback.name", self._config.name, limit=Limit.CALLBACK)
            with host_seeded(), mode, busy:
                self._called(event, step, values, **copy.deepcopy(dict(self._config.args)))
        except StopTraining as asked:
            if self.asked_to_end is None:
                self.asked_to_end = (str(asked) or NO_REASON)[:LONGEST_END_REASON]
        # SystemExit, too: a rank must not leave as if the job were done.
        except (Exception, SystemExit) as error:
            reason = f"({event}): {describe(error)}"
            text = f"callback.name: {self._config.name} raised after step {step} {reason}"
            if self._config.on_error is CallbackError.END:
                raise CallbackFailed(f"{text}. To fix: the callback, or callback.onError: report") from error
            if reason not in self._reported:
                self._reported.add(reason)
                logger.warning("%s; training continues, the same error is not reported again", text)
