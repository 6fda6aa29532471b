"""The clock of simulations: jobs arrive, the cluster changes, rounds end, jobs train and end.

At each of these moments a function decides which jobs run where, as the operator's does; the clock carries
the decision out and lets time pass until the next.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from ballast_policies.rounds.memory import resize_cooldown_seconds
from ballast_policies.rounds.values import Placement, Round

LEAST_STEP = 1e-6
"""Seconds; nearer moments are one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SimulationProgress:
    """Progress of a simulation.

    Attributes:
        seconds: of the simulated clock.
        done: measured jobs that are done.
        total: measured jobs in all.
        present: jobs that have arrived and are not done, measured or not.
        waiting: those of them that hold no GPU; without rounds, those that have not run yet.
    """

    seconds: float
    done: int
    total: int
    present: int
    waiting: int


OnProgress = Callable[[SimulationProgress], None]
"""Called at each iteration of the simulation loop."""


class SimulationError(RuntimeError):
    """A decision that gives out GPUs which are not there, or lets all jobs wait for good."""


@dataclasses.dataclass(slots=True, kw_only=True)
class ActiveJob:
    """A job that has arrived and not ended; seconds, on the clock.

    Attributes:
        name: of the job.
        remaining: steps left.
        speed_at: steps/s on a placement, alone there; 0: not known.
        restart_seconds: from a start, or a move, to the first step.
        others_leave: added to it at the next one, while other gangs save and leave its GPUs.
        pause_seconds: how long training stands still when a gang changes its size live.
        growth_seconds: from the decision that a gang grows until it pauses for its new ranks; it trains
            meanwhile.
        ending: for how long it holds its GPUs after its last step.
        placement: whose GPUs it holds; None: it waits.
        trains_on: fewer GPUs than it holds while new pods start, else its placement.
        since: when it was started there.
        trains_from: when it does its first step there.
        waits: until it trains, or trains again.
        joins: until it has its new ranks.
        settled: when it may grow again.
        beside_speed: where it shares its GPU, its speed over that alone.
        starts: how often it was started or moved.
        gpu_seconds: of the GPUs that it held.
    """

    name: str
    remaining: float
    speed_at: Callable[[Placement], float]
    restart_seconds: float
    pause_seconds: float
    growth_seconds: float = 0.0
    others_leave: float = 0.0
    ending: float = 0.0
    placement: Placement | None = None
    trains_on: Placement | None = None
    since: float = 0.0
    trains_from: float = 0.0
    waits: float = 0.0
    joins: float = 0.0
    settled: float = 0.0
    beside_speed: float = 1.0
    starts: int = 0
    gpu_seconds: float = 0.0

    @property
    def speed(self) -> float:
        """Steps/s on the GPUs that it trains on."""
        return 0.0 if self.trains_on is None else self.speed_at(self.trains_on) * self.beside_speed

    @property
    def trains(self) -> bool:
        """True if it may be asked to change its size: nothing is under way."""
        return self.placement is not None and self.waits == self.joins == 0 and self.remaining > 0

    def changes_in(self, now: float) -> float:
        """Seconds until it trains, trains on more GPUs, or may grow again; infinite: nothing is under way."""
        if self.placement is None:
            return math.inf
        return self.waits or self.joins or (self.settled - now if self.settled > now else math.inf)

    def ends_in(self) -> float:
        """Seconds until its GPUs are free, if nothing changes before."""
        if self.remaining <= 0 and self.ending <= 0:
            return 0.0
        speed = self.speed
        return self.waits + max(0.0, self.remaining) / speed + self.ending if speed > 0 else math.inf

    def advance(self, seconds: float) -> float:
        """Let time pass, at most until the next change that it told; the seconds that it trained."""
        if self.placement is None:
            return 0.0
        self.gpu_seconds += seconds * len(self.placement.nodes)
        waited = min(seconds, self.waits)
        self.waits = _left(self.waits - waited)
        trained = self.train(seconds - waited)
        if self.remaining <= 0:
            self.ending -= seconds - waited - trained
        if self.joins > 0:
            self.joins = _left(self.joins - seconds)
            if self.joins == 0.0:
                self.trains_on, self.waits = self.placement, self.pause_seconds
        return trained

    def leave(self) -> None:
        """Hold no GPUs."""
        self.placement = self.trains_on = None
        self.waits = self.joins = 0.0

    def train(self, seconds: float) -> float:
        """Do the steps of ``seconds``; the part of them that it trained."""
        speed = self.speed
        if speed <= 0:
            return 0.0
        needs = max(0.0, self.remaining) / speed
        self.remaining = 0.0 if needs <= seconds else self.remaining - seconds * speed
        return min(seconds, needs)

    def follow(self, decided: Round, now: float) -> None:
        """Start, move, stop or change the size as decided."""
        beside = decided.colocations.get(self.name)
        self.beside_speed = 1.0 if beside is None else beside.speed
        before, after = self.placement, decided.placements.get(self.name)
        if after == before:
            return
        self.placement = after
        if after is None:
            self.leave()
        elif before is None or self.name not in decided.resized:
            self.trains_on, self.joins, self.since = after, 0.0, now
            self.waits = self.restart_seconds + self.others_leave
            self.trains_from = now + self.waits
            self.starts += 1
        else:
            if len(after.nodes) > len(before.nodes) and self.growth_seconds > 0:
                self.joins = self.growth_seconds
            else:
                self.trains_on, self.waits = after, self.waits + self.pause_seconds
            self.settled = now + self.joins + resize_cooldown_seconds(self.pause_seconds)


Active = TypeVar("Active", bound=ActiveJob)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A decision.

    Attributes:
        round: which jobs run where from now on.
        until: when the round ends, on the clock: it is decided again then at the latest.
    """

    round: Round
    until: float


Decide = Callable[[Mapping[str, Active], float], Answer]
"""Function from the jobs that are there, by name in order of arrival, and the time to a decision."""


Event = tuple[float, Callable[[], None]]
"""Moment, and what happens to the cluster then: a node goes or comes, a price changes."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Clock(Generic[Active]):
    """A simulation.

    Attributes:
        arrivals: (seconds, job) in order of arrival; a job that an event has taken away may come again.
        decide: asked at each moment at which jobs are there.
        passed: told of each stretch of time, its begin and end, before jobs end.
        ended: told of a job that has ended, and when; it may set ``over``.
        events: of the cluster, in order of time.
        total: number of jobs, for ``progress``.
        progress: called after each moment.
        now: seconds.
        present: jobs that have arrived and not ended, by name.
        decisions: number of times that it was decided.
        over: nothing more is played.
    """

    arrivals: Iterable[tuple[float, Active]]
    decide: Decide[Active]
    ended: Callable[[Active, float], None]
    passed: Callable[[float, float], None] | None = None
    events: Sequence[Event] = ()
    total: int = 0
    progress: OnProgress | None = None
    now: float = 0.0
    present: dict[str, Active] = dataclasses.field(default_factory=dict)
    decisions: int = 0
    over: bool = False

    def run(self, until: float = math.inf) -> None:
        """Play all moments until no job is left, none comes, or the time is over.

        Raises:
            SimulationError: all jobs wait for good.
        """
        coming, events = _Queue(iter(self.arrivals)), _Queue(iter(self.events))
        round_ends, done = math.inf, 0
        while not self.over and (self.present or coming.at < math.inf) and self.now < until - LEAST_STEP:
            for happens in events.due(self.now):
                happens()
            # One that comes again, and had its steps done before, stays away.
            self.present.update((job.name, job) for job in coming.due(self.now) if job.remaining > 0)
            ending = self.now >= round_ends - LEAST_STEP
            if self.present:
                round_ends = self._ask()
            ends = {name: self.now + job.ends_in() for name, job in self.present.items()}
            changes = (self.now + job.changes_in(self.now) for job in self.present.values())
            next_change = min([coming.at, events.at, *ends.values(), *changes])
            if ending and math.isinf(next_change) and math.isinf(until):
                raise SimulationError(f"at {self.now:g} s all of {len(ends)} jobs wait, and none arrives")
            later = min(until, next_change, round_ends if self.present else math.inf)
            if later <= self.now < min(ends.values(), default=later):
                later = self.now + LEAST_STEP  # a clock of large numbers may not tell the two apart
            for job in self.present.values():
                job.advance(later - self.now)
            if self.passed is not None:
                self.passed(self.now, later)
            self.now = later
            for name in [name for name, end in ends.items() if end <= self.now + LEAST_STEP]:
                self.ended(self.present.pop(name), self.now)
                done += 1
            if self.progress is not None:
                waiting = sum(job.placement is None for job in self.present.values())
                self.progress(
                    SimulationProgress(
                        seconds=self.now,
                        done=done,
                        total=self.total,
                        present=len(self.present),
                        waiting=waiting,
                    )
                )

    def _ask(self) -> float:
        answer = self.decide(self.present, self.now)
        self.decisions += 1
        for job in self.present.values():
            job.follow(answer.round, self.now)
        return answer.until


Item = TypeVar("Item")


class _Queue(Generic[Item]):
    """Items that come at their times; ``at``: that of the next, infinite: none comes."""

    def __init__(self, items: Iterator[tuple[float, Item]]) -> None:
        self._items = items
        self._next: Item | None = None
        self._take()

    def _take(self) -> None:
        self.at, self._next = next(self._items, (math.inf, None))

    def due(self, now: float) -> Iterator[Item]:
        while self.at <= now + LEAST_STEP and self._next is not None:
            item = self._next
            self._take()
            yield item


def _left(seconds: float) -> float:
    return seconds if seconds > LEAST_STEP else 0.0
