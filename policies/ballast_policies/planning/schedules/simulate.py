"""Simulator of a schedule: begin and end of each action of each rank.

Each rank does its actions in order, one at a time.  An action starts when its rank is free and its
inputs have arrived: a forward, the forward of the stage before; a backward, its own forward and the
backward of the stage after; an update, the gradients of all the microbatches it covers, on every
replica.  A sender keeps computing while it sends; the receiver waits (AMP, supplement 6.1).
With the order of every rank fixed, times are a longest path, so one pass in any feasible order
gives them exactly; no progress means a deadlock.
"""

import dataclasses

from ballast_policies.planning.schedules.costs import StageCosts
from ballast_policies.planning.schedules.schedule import Action, Kind, Schedule, ScheduleError


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """``action`` kept ``rank`` busy from ``start`` to ``end`` (seconds from the step's begin)."""

    rank: int
    action: Action
    start: float
    end: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A schedule in time.

    Attributes:
        schedule: the one that was simulated.
        spans: by rank, then time.
        makespan: seconds until the last rank is done.
        busy: by rank, seconds of computing.
        sent: transfers by (from rank, to rank).
    """

    schedule: Schedule
    spans: tuple[Span, ...]
    makespan: float
    busy: tuple[float, ...]
    sent: dict[tuple[int, int], int]

    @property
    def idle_fraction(self) -> float:
        """Idle share of all ranks' time until the makespan, 0 to 1."""
        whole = self.makespan * len(self.busy)
        return 1.0 - sum(self.busy) / whole if whole > 0 else 0.0


def simulate(schedule: Schedule, costs: StageCosts) -> Trace:
    """Times of all actions.

    A schedule with a flush ends, on each rank, with the update of its stages where ``costs.update``
    is given.

    Raises:
        ScheduleError: ``costs`` are of another number of stages or ranks, or the schedule deadlocks
            (the text names the action that each rank waits for).
    """
    if costs.stages != schedule.stages:
        raise ScheduleError(f"costs of {costs.stages} stages do not fit a schedule of {schedule.stages}")
    if costs.speeds and len(costs.speeds) != schedule.ranks:
        raise ScheduleError(f"{len(costs.speeds)} speeds do not fit a schedule of {schedule.ranks} ranks")
    player = _Player(schedule, costs)
    player.play()
    spans = tuple(span for row in player.spans for span in row)
    return Trace(
        schedule=schedule,
        spans=spans,
        makespan=max((span.end for span in spans), default=0.0),
        busy=tuple(sum(span.end - span.start for span in row) for row in player.spans),
        sent=player.sent,
    )


class _Player:
    """The state of one simulation: progress of each rank, and times at which results are done or arrive."""

    def __init__(self, schedule: Schedule, costs: StageCosts) -> None:
        self.schedule, self.costs = schedule, costs
        self.rows = [self._with_final_updates(rank) for rank in range(schedule.ranks)]
        self.spans: list[list[Span]] = [[] for _ in self.rows]
        self.sent: dict[tuple[int, int], int] = {}
        self.link_free: dict[tuple[int, int], float] = {}
        self.finished: dict[Action, float] = {}
        self.arrival: dict[Action, float] = {}
        self.split = schedule.split_backwards()

    def play(self) -> None:
        progress = True
        while progress:
            progress = False
            for rank, row in enumerate(self.rows):
                done = self.spans[rank]
                while len(done) < len(row) and (ready := self._ready(row[len(done)])) is not None:
                    self._run(rank, row[len(done)], ready)
                    progress = True
        stuck = {
            rank: row[len(self.spans[rank])]
            for rank, row in enumerate(self.rows)
            if len(self.spans[rank]) < len(row)
        }
        if stuck:
            waits = ", ".join(f"rank {rank} before {action}" for rank, action in stuck.items())
            raise ScheduleError(f"deadlock: {waits} wait for one another")

    def _run(self, rank: int, action: Action, ready: float) -> None:
        row = self.spans[rank]
        start = max(ready, row[-1].end if row else 0.0)
        end = start + self.costs.seconds(action.kind, action.stage, rank)
        row.append(Span(rank, action, start, end))
        self.finished[action] = end
        self._send(rank, action, end)

    def _send(self, rank: int, action: Action, end: float) -> None:
        stage, kind, microbatch = action.stage, action.kind, action.microbatch
        if kind is Kind.FORWARD and stage + 1 < self.schedule.stages:
            target, boundary = stage + 1, stage
        elif kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and stage > 0:
            target, boundary = stage - 1, stage - 1
        else:
            return
        to_rank = self.schedule.rank_of(target, microbatch)
        if to_rank == rank:
            self.arrival[action] = end
            return
        link = (rank, to_rank)
        self.sent[link] = self.sent.get(link, 0) + 1
        begin = max(end, self.link_free.get(link, 0.0)) if self.costs.serial_links else end
        self.arrival[action] = self.link_free[link] = begin + self.costs.transfer_seconds(boundary)

    def _ready(self, action: Action) -> float | None:
        """Time at which the inputs of ``action`` are there; None: not known yet."""
        moments = [0.0]
        for needed, arrives in self._needs(action):
            moment = (self.arrival if arrives else self.finished).get(needed)
            if moment is None:
                return None
            moments.append(moment)
        return max(moments)

    def _needs(self, action: Action) -> list[tuple[Action, bool]]:
        """(action, True: its result must arrive here; False: it must be finished)."""
        stage, k = action.stage, action.microbatch
        if action.kind is Kind.FORWARD:
            return [(Action(stage - 1, Kind.FORWARD, k), True)] if stage else []
        if action.kind is Kind.BACKWARD_WEIGHT:
            return [(Action(stage, Kind.BACKWARD_INPUT, k), False)]
        if action.kind is Kind.UPDATE:
            kinds = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
            return [
                (Action(stage, kinds[(stage, covered) in self.split], covered), False)
                for covered in self._covered(stage, k)
            ]
        needs = [(Action(stage, Kind.FORWARD, k), False)]
        if stage + 1 < self.schedule.stages:
            kind = Kind.BACKWARD_INPUT if (stage + 1, k) in self.split else Kind.BACKWARD
            needs.append((Action(stage + 1, kind, k), True))
        return needs

    def _covered(self, stage: int, update: int) -> range:
        """Microbatches whose gradients are in the stage's ``update``-th update."""
        every = self.schedule.update_every * len(self.schedule.stage_ranks[stage])
        return range(update * every, min((update + 1) * every, self.schedule.microbatches))

    def _with_final_updates(self, rank: int) -> tuple[Action, ...]:
        row = self.schedule.actions[rank]
        has_backward = any(a.kind is not Kind.FORWARD for a in row)
        if not self.costs.update or not has_backward or any(a.kind is Kind.UPDATE for a in row):
            return row
        own = [stage for stage, holders in enumerate(self.schedule.stage_ranks) if rank in holders]
        return row + tuple(Action(stage, Kind.UPDATE, 0) for stage in own)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BubbleSplit:
    """Idle fractions of all ranks' time; ``inherent + dynamic == idle``.

    Attributes:
        idle: of the schedule with its own costs.
        inherent: of the same schedule with the same work spread evenly over the stages.
        dynamic: the rest, which balancing can win back. A little below 0 where a pipeline of few
            microbatches, or one with slow transfers, fills faster with uneven stages than with even ones.
    """

    idle: float
    inherent: float
    dynamic: float


def split_bubble(schedule: Schedule, costs: StageCosts) -> BubbleSplit:
    """Idle time with these costs, and with the same total work on even stages at even speeds."""
    idle = simulate(schedule, costs).idle_fraction
    inherent = simulate(schedule, _evened(schedule, costs)).idle_fraction
    return BubbleSplit(idle=idle, inherent=inherent, dynamic=idle - inherent)


def _evened(schedule: Schedule, costs: StageCosts) -> StageCosts:
    """The same seconds in total, the same on every stage of every rank."""

    def mean(values: tuple[float, ...]) -> tuple[float, ...]:
        if not values:
            return ()
        slowed = [
            value * sum(1 / (costs.speeds[rank] if costs.speeds else 1.0) for rank in holders) / len(holders)
            for value, holders in zip(values, schedule.stage_ranks, strict=True)
        ]
        return (sum(slowed) / len(slowed),) * len(slowed)

    return dataclasses.replace(
        costs,
        forward=mean(costs.forward),
        backward=mean(costs.backward),
        backward_input=mean(costs.backward_input),
        update=mean(costs.update),
        speeds=(),
    )
