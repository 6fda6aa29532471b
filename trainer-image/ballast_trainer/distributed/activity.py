"""The activity of this rank outside collectives: ranks that wait for it are told, and so is the user."""

import contextlib
import dataclasses
import enum
import functools
from collections.abc import Iterator

from ballast_policies.contract.job.job import JobConfig


class Limit(enum.StrEnum):
    """The field that limits how long other ranks wait for this one's work."""

    ANY = "training.commTimeoutSeconds"
    COMPILE = "training.compileTimeoutSeconds"
    CALLBACK = "callback.timeoutSeconds"
    EVALUATION = "evaluation.timeoutSeconds"

    @classmethod
    def seconds_of(cls, config: JobConfig) -> dict["Limit", float]:
        """Seconds by field, of those that the configuration has."""
        callback, evaluation, training = config.callback, config.evaluation, config.training
        own = {
            cls.COMPILE: training.compile_timeout_seconds,
            cls.CALLBACK: None if callback is None else callback.timeout_seconds,
            cls.EVALUATION: None if evaluation is None else evaluation.timeout_seconds,
        }
        given = {limit: seconds for limit, seconds in own.items() if seconds is not None}
        return {cls.ANY: training.comm_timeout_seconds} | given


Work = tuple[Limit, *tuple[object, ...]]
"""The limit, and words."""


@dataclasses.dataclass(slots=True)
class Activity:
    """Work of the main thread ``now``, a new tuple each time; None: it may wait for others.

    ``patient``: it waits for as long as they live, whatever they do.
    """

    now: Work | None = None
    patient: bool = False

    @contextlib.contextmanager
    def doing(self, *words: object, limit: Limit = Limit.ANY) -> Iterator[None]:
        """The work inside is this rank's own."""
        before, self.now = self.now, (limit, *words)
        try:
            yield
        finally:
            self.now = before

    @contextlib.contextmanager
    def waiting(self, *, patient: bool = False) -> Iterator[None]:
        """Inside, this rank waits for others in the midst of its work, which goes on anew then."""
        before, self.now, self.patient = self.now, None, patient
        try:
            yield
        finally:
            self.now, self.patient = before, False


ACTIVITY = Activity()
"""Activity of this process."""


@functools.cache
def tell_compilations() -> None:
    """Have each compilation by torch told as one, in the work that it is part of."""
    from torch._dynamo.callback import CallbackArgs, callback_handler

    outer: list[Work | None] = []

    def start(_: CallbackArgs) -> None:
        now = ACTIVITY.now
        outer.append(now)
        ACTIVITY.now = (Limit.COMPILE, "a compilation", *(() if now is None else ("in", *now[1:])))

    def end(_: CallbackArgs) -> None:
        ACTIVITY.now = outer.pop()

    callback_handler.register_start_callback(start)
    callback_handler.register_end_callback(end)
