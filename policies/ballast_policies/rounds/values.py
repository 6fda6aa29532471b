"""What a round is decided from, and the decision: frozen values for the operator and the simulator."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of a pool: ``gpus`` is how many are ours to hand out, taken ones included."""

    name: str
    pool: str
    gpu_type: str
    gpus: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gang:
    """A job that wants ``gpus`` GPUs of one pool at once; ``throughput``: GPU type -> steps/s, or 0."""

    job: str
    gpus: int
    throughput: Mapping[str, float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a gang runs: one node name for each rank, repeated where a node hosts several."""

    gpu_type: str
    pool: str
    nodes: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RoundState:
    """What has been handed out so far.

    Attributes:
        received: job -> GPU type -> seconds that the job ran there.
        promised: job -> GPU type -> seconds that it should have run there in the same time, as an
            :class:`Account` keeps them; None: the shares of now have held for as long as any job has run.
        running: job -> its placement now.
        running_since: job -> when it started there, on the clock of ``now``.
        moves: times at which running gangs were stopped or moved, for the limit of moves per hour.
    """

    received: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    promised: Mapping[str, Mapping[str, float]] | None = None
    running: Mapping[str, Placement] = dataclasses.field(default_factory=dict)
    running_since: Mapping[str, float] = dataclasses.field(default_factory=dict)
    moves: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RoundSettings:
    """How restless the rounds may be.

    Attributes:
        round_seconds: length of a round.
        min_run_seconds: a gang that has started is not stopped for others before it ran so long.
        max_moves_per_hour: at most so many running gangs are stopped or moved within an hour; None: no limit.
        keep_free: where a gang waits for others that must be left alone, what comes free is kept for it. Not
            needed within a round whose end lets all of them be stopped.
        within_round: only free GPUs are handed out; whoever runs holds its GPUs until the round's end.
    """

    round_seconds: float = 360.0
    min_run_seconds: float = 0.0
    max_moves_per_hour: int | None = None
    keep_free: bool = True
    within_round: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round's decision.

    Attributes:
        placements: job -> where it runs in this round; a job that is missing does not run.
        extended: jobs whose lease goes on: same pool, same nodes.
        started: jobs that did not run and now do.
        moved: jobs that run elsewhere from now on.
        stopped: jobs that ran and now do not.
        waiting: jobs that neither ran nor run.
        reasons: job -> why, in words with numbers.
    """

    placements: Mapping[str, Placement]
    extended: tuple[str, ...]
    started: tuple[str, ...]
    moved: tuple[str, ...]
    stopped: tuple[str, ...]
    waiting: tuple[str, ...]
    reasons: Mapping[str, str]
