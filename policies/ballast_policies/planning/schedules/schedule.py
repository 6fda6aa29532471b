"""A schedule as a value: for every rank, the order of its actions in one step.

An action is a forward, a backward or a weight update, of one stage and microbatch.  Its text form is torch's:
``2F0`` is the forward of microbatch 0 on stage 2.  ``U`` is ours, for schedules without a flush: torch's
runtime knows no updates inside a step.

Nothing here runs or times anything: see ``validate``, ``simulate`` and the exporters.
"""

import dataclasses
import enum
import re
from collections.abc import Sequence
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
        """The inverse of ``str``. Raises ScheduleError: the text is not of the form ``2F0``."""
        match = _FORM.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(f"{text!r} is not an action: expected stage, one of F B I W U, microbatch")
        return cls(int(match[1]), Kind(match[2]), int(match[3]))


class WeightRule(enum.StrEnum):
    """The version of a stage's weights that a microbatch uses; see ``weights``."""

    FLUSH = "flush"
    """One version: the update comes after all microbatches, as in the single process."""
    STASH = "stash"
    """The latest at the forward; the same, stashed, at the backward (PipeDream)."""
    VERTICAL_SYNC = "verticalSync"
    """The version that was the latest at the input stage, on every stage (PipeDream, optional)."""
    DOUBLE_BUFFERED = "doubleBuffered"
    """One update behind, at most two versions (PipeDream-2BW)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The order of actions on each rank.

    Attributes:
        name: for messages and pictures.
        microbatches: how many, over all replicas.
        stage_ranks: by stage, the ranks that hold it. With several, microbatch k goes to
            ``stage_ranks[stage][k % replicas]``, forward and backward (round-robin, 1F1B-RR).
        actions: by rank, in order.
        weights: the version of the weights that a microbatch uses.
        update_every: microbatches per weight update; ``microbatches`` where there is a flush.
    """

    name: str
    microbatches: int
    stage_ranks: tuple[tuple[int, ...], ...]
    actions: tuple[tuple[Action, ...], ...]
    weights: WeightRule = WeightRule.FLUSH
    update_every: int

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.stage_ranks)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.actions)

    def rank_of(self, stage: int, microbatch: int) -> int:
        """The rank that handles ``microbatch`` on ``stage``, forward and backward."""
        replicas = self.stage_ranks[stage]
        return replicas[microbatch % len(replicas)]

    def split_backwards(self) -> frozenset[tuple[int, int]]:
        """(stage, microbatch) whose backward is two actions, for inputs and for weights."""
        return frozenset(
            (a.stage, a.microbatch) for row in self.actions for a in row if a.kind is Kind.BACKWARD_INPUT
        )


def loop_ranks(ranks: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """Stage s on rank s mod p: each rank holds ``chunks`` stages, p apart."""
    return tuple((stage % ranks,) for stage in range(ranks * chunks))


def loop_schedule(
    name: str, ranks: int, chunks: int, microbatches: int, rows: Sequence[Sequence[Action]]
) -> Schedule:
    """A schedule with one update, at its end; stages as :func:`loop_ranks` has them, actions by rank."""
    return Schedule(
        name=name,
        microbatches=microbatches,
        stage_ranks=loop_ranks(ranks, chunks),
        actions=tuple(tuple(row) for row in rows),
        update_every=microbatches,
    )


def v_ranks(ranks: int) -> tuple[tuple[int, ...], ...]:
    """Two stages a rank, down and up again: the first and the last stage share rank 0."""
    return tuple((rank,) for rank in (*range(ranks), *reversed(range(ranks))))


def check_counts(**counts: int) -> None:
    """Refuse counts below 1. Raises ScheduleError: naming the first such count."""
    for name, count in counts.items():
        if count < 1:
            raise ScheduleError(f"{name} is {count}: a schedule needs at least 1")
