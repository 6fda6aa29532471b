"""An action of a rank: a forward, a backward or a weight update, of one stage and microbatch.

The text form is torch's: ``2F0`` is the forward of microbatch 0 on stage 2.  ``U`` is ours, for
schedules without a flush: torch's runtime knows no updates inside a step.
"""

import dataclasses
import enum
import re
from typing import Self

_FORM = re.compile(r"(\d+)([FBIWU])(\d+)")


class ScheduleError(ValueError):
    """A schedule cannot be built, or would not run; the text names the action and the reason."""


class Kind(enum.StrEnum):
    """The kind of computation."""

    FORWARD = "F"
    BACKWARD = "B"
    """The whole backward: gradients of the inputs and of the weights."""
    BACKWARD_INPUT = "I"
    """Gradients of the inputs alone, which the stage before waits for."""
    BACKWARD_WEIGHT = "W"
    """Gradients of the weights alone, which no other rank waits for until the update."""
    UPDATE = "U"
    """The optimizer step of the stage; ``microbatch`` counts the updates, from 0."""


@dataclasses.dataclass(frozen=True, slots=True)
class Action:
    """``kind`` of ``microbatch`` on ``stage``."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of ``str``.

        Raises:
            ScheduleError: the text is not of the form ``2F0``.
        """
        match = _FORM.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(f"{text!r} is not an action: expected stage, one of F B I W U, microbatch")
        return cls(int(match[1]), Kind(match[2]), int(match[3]))
