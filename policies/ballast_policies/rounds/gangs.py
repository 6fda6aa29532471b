"""Gangs as a round sees them: sizes that they may have, and how fast they are where they may run."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from ballast_policies.planning.launch import LaunchedPipeline, RankGpu, step_seconds
from ballast_policies.planning.memory.stage_bytes import ROUNDING
from ballast_policies.rounds.values import Colocation, Placement, PoolPart, stays
from ballast_policies.throughput.estimator import FIRST_GUESS, PairSpeeds
from ballast_policies.throughput.speeds import SpeedKey

PAUSE_SECONDS = 1.0
"""Pause of a change of size, before one was measured."""

RESTART_SECONDS = 30.0
"""Seconds from a gang's stop to its first step elsewhere, before a start of it was seen."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ElasticGang:
    """A gang that may have one of several sizes.

    Attributes:
        speeds: GPU type -> number of GPUs -> steps/s, for the sizes that the gang may have, fewest first.
        together: ranks that stay or leave together: whole positions of the pipeline, in whole pods; by a
            restart it may have others.
        per_pod: GPUs of each pod, which are on one node; ``together`` is a multiple.
        may_shrink: it runs and can give GPUs back now; of a gang that does not run it is not read.
        may_grow: it can take more GPUs now.
        may_move: it may be stopped and started in another pool now.
        pause_seconds: how long training stands still when the gang shrinks or grows.
        restart_seconds: from its stop to its first step elsewhere.
        live: another size costs ``pause_seconds``; False: a restart, but those of ``live_sizes``.
        wanted: size that the policy has chosen, which comes before what others might grow to; None: none.
    """

    speeds: Mapping[str, Mapping[int, float]]
    together: int = 1
    per_pod: int = 1
    may_shrink: bool = True
    may_grow: bool = True
    may_move: bool = True
    pause_seconds: float = PAUSE_SECONDS
    restart_seconds: float = RESTART_SECONDS
    live: bool = True
    live_sizes: tuple[int, ...] = ()
    wanted: int | None = None

    def restarts_for(self, gpus: int) -> bool:
        """True if it is launched again for size ``gpus``."""
        return not self.live and gpus not in self.live_sizes

    def change_seconds(self, gpus: int) -> float:
        """Seconds that training stands still for a change to ``gpus``."""
        return self.restart_seconds if self.restarts_for(gpus) else self.pause_seconds

    def becomes(self, held: Placement, wanted: Placement) -> bool:
        """True if it gets there without a restart: it shrinks, grows, or is left as it is."""
        return not self.restarts_for(len(wanted.nodes)) and stays(held, wanted, self.together)

    def without_restart(self, held: int) -> "ElasticGang":
        """The gang as it may not be launched again: it has ``held`` GPUs, and the sizes that cost a pause."""
        kept = {held, *self.live_sizes}
        speeds = {
            gpu_type: {size: speed for size, speed in by_size.items() if size in kept}
            for gpu_type, by_size in self.speeds.items()
            if kept & by_size.keys()
        }
        may_change = bool(self.live_sizes and speeds)
        return dataclasses.replace(
            self,
            speeds=speeds or self.speeds,
            may_shrink=self.may_shrink and may_change,
            may_grow=self.may_grow and may_change,
        )

    @property
    def least(self) -> int:
        """The smallest size."""
        return min(min(by_size) for by_size in self.speeds.values())

    @property
    def most(self) -> int:
        """The largest size."""
        return max(max(by_size) for by_size in self.speeds.values())

    def speed(self, gpu_type: str, gpus: int) -> float:
        """Steps/s; of a size that is not listed, that of the next smaller one; 0 below the least."""
        by_size = self.speeds.get(gpu_type, {})
        known = by_size.get(gpus)
        if known is not None:
            return known
        return next((by_size[size] for size in sorted(by_size, reverse=True) if size <= gpus), 0.0)

    def partition_speed(self, gpu_type: str, gpus: float) -> float:
        """Steps/s on a part of ``gpus`` GPUs, shared in time between the two sizes around it."""
        by_size = sorted(self.speeds.get(gpu_type, {}).items())
        if not by_size:
            return 0.0
        least, slowest = by_size[0]
        if gpus <= least:
            return slowest * gpus / least
        for (low, slow), (high, fast) in itertools.pairwise(by_size):
            if gpus < high:
                return slow + (fast - slow) * (gpus - low) / (high - low)
        return by_size[-1][1]


def speed_key(parts: Iterable[PoolPart]) -> SpeedKey:
    """The GPU types of a gang in several pools with their counts, whatever pools these are."""
    return SpeedKey.of_types((part.gpu_type, part.gpus) for part in parts)


TypesByRank = tuple[tuple[str, int], ...]
"""GPU types in the order of a gang's ranks, and GPUs of each."""


def types_by_rank(parts: Iterable[PoolPart]) -> TypesByRank:
    """GPU types of a gang in several pools, of which neighbours may have the same type."""
    of_types = itertools.groupby(parts, key=lambda part: part.gpu_type)
    return tuple((gpu_type, sum(part.gpus for part in of_type)) for gpu_type, of_type in of_types)


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedSpeed:
    """Prediction of a plan for some GPUs.

    Attributes:
        steps_per_second: predicted.
        memory: bytes of the fullest GPU of each type.
        together: GPUs of each stage, which are in one pool.
    """

    steps_per_second: float
    memory: tuple[float, ...]
    together: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MixedGang:
    """A gang that may run in several pools at once.

    Attributes:
        pipeline: what its stages are cut from.
        sizes: numbers of GPUs that it may have, fewest first.
        speeds: GPU type -> steps/s of ``base`` GPUs of it, of the types that it may use.
        base: number of GPUs.
        fits_one_pool: whether some pool has the GPUs and the memory for its least size.
        mixtures: divisions of its least size over the pools of an empty cluster.
        measured: (:func:`speed_key`) -> steps/s in several pools, as it has reported itself.
        memory: pool -> bytes of each GPU, where that is known.
        barred: groups of nodes (``Node.group``) on which it must not be started in several pools.
        per_pod: GPUs of each pod, which are on one node.
        planned: GPUs that it may have, the fastest first, and the plans for them, of which the first counts
            whose stages are in one pool each; none: its stages are planned alone. Empty: any.
        known_over_planned: GPU type -> its estimated speed over the planned one, where it is estimated; of
            several types the least counts.
        min_gain: part by which several pools must be faster than one.
        may_move: it runs, and may be stopped and started elsewhere now.
        may_shrink, may_grow: it runs in several pools, and may give GPUs back, or take more, live.
        pause_seconds: how long training stands still for that.
        restart_seconds: from its stop to its first step elsewhere.
    """

    pipeline: LaunchedPipeline
    sizes: tuple[int, ...]
    speeds: Mapping[str, float]
    base: int
    fits_one_pool: bool = True
    mixtures: tuple[tuple[PoolPart, ...], ...] = ()
    measured: Mapping[SpeedKey, float] = dataclasses.field(default_factory=dict)
    memory: Mapping[str, float] = dataclasses.field(default_factory=dict)
    barred: frozenset[str] = frozenset()
    per_pod: int = 1
    planned: Mapping[TypesByRank, tuple[PlannedSpeed, ...]] = dataclasses.field(default_factory=dict)
    known_over_planned: Mapping[str, float] = dataclasses.field(default_factory=dict)
    min_gain: float = 0.05
    may_move: bool = False
    may_shrink: bool = False
    may_grow: bool = False
    pause_seconds: float = PAUSE_SECONDS
    restart_seconds: float = RESTART_SECONDS

    @property
    def together(self) -> int:
        """GPUs that are in one pool: whole positions of the pipeline, in whole pods."""
        return math.lcm(self.pipeline.ranks_per_position, self.per_pod)

    @property
    def plans_degrees(self) -> bool:
        """True if each of the GPUs that it may have has a plan of its own, with a speed."""
        return bool(next(iter(self.planned.values()), ()))

    def sizes_in_one_pool(self, gpu_type: str) -> list[int]:
        """Sizes that it may have there, fewest first."""
        if not self.planned:
            return list(self.sizes)
        alone = (gpus[0] for gpus in self.planned if len(gpus) == 1)
        return sorted(count for kind, count in alone if kind == gpu_type)

    @property
    def smallest(self) -> "MixedGang":
        """The gang, with its least size alone."""
        return dataclasses.replace(self, sizes=self.sizes[:1])

    def relative(self, gpu_type: str) -> float:
        """Speed of a GPU relative to the fastest type's; 0: it may not use the type."""
        fastest = max(self.speeds.values(), default=0.0)
        return self.speeds.get(gpu_type, 0.0) / fastest if fastest > 0 else 0.0

    def speed(self, parts: Sequence[PoolPart]) -> float:
        """Steps/s of the gang in ``parts``, in this order: as measured, else as predicted; 0: it cannot.

        The prediction is the plan's, or scales the speed of ``base`` GPUs of the fastest type by the steps
        that the pipeline's model gives both, each with its best stages.
        """
        here = self._seconds(parts)
        if len(parts) > 1 and (known := self.measured.get(speed_key(parts))) is not None:
            return known if here is not None else 0.0
        if self.plans_degrees:
            return 0.0 if here is None else 1 / here
        at_base = step_seconds(self.pipeline, (RankGpu(speed=1.0),) * self._positions(self.base))
        if here is None or at_base is None or here <= 0:
            return 0.0
        return max(self.speeds.values()) * at_base / here

    def planned_at_most(self, parts: Sequence[PoolPart]) -> float:
        """Steps/s on the GPUs of ``parts`` at most, however they are divided, by plans and reports."""
        scale = max(self.known_over_planned.values(), default=1.0)
        planned = self.planned[types_by_rank(parts)][0].steps_per_second * max(1.0, scale)
        return max(planned, *self.measured.values(), 0.0)

    def speed_at(self, placement: Placement) -> float:
        """Speed as of :meth:`speed`, where it is placed."""
        return self.speed(placement.by_pool)

    def smaller(self, at: Placement) -> list[Placement]:
        """Placements that it may shrink to where it is, by its first ranks, smallest first."""
        sizes = self.sizes if self.may_shrink and at.parts and not self.planned else ()
        fewer = [at.first(size) for size in sizes if size < len(at.nodes)]
        return [to for to in fewer if self._whole_positions(to) and self.speed_at(to) > 0]

    def where_it_runs(self, held: Placement) -> ElasticGang:
        """Its live sizes: its first ranks, what it holds, and more in the pool of its last ranks.

        Their speeds are those predicted, so that they compare.
        """
        alike = dataclasses.replace(self, measured={})
        speeds = {len(to.nodes): alike.speed_at(to) for to in (*self.smaller(held), held)}
        if self.may_grow and not self.planned and speeds[len(held.nodes)] > 0:
            more = ((size, size - len(held.nodes)) for size in self.sizes if size > len(held.nodes))
            speeds |= {
                size: alike.speed_at(held.and_more(held.nodes[-1:] * gpus))
                for size, gpus in more
                if gpus % self.together == 0
            }
        return ElasticGang(
            speeds={held.gpu_type: speeds},
            together=self.together,
            per_pod=self.per_pod,
            may_grow=self.may_grow,
            may_move=False,
            pause_seconds=self.pause_seconds,
            restart_seconds=self.restart_seconds,
        )

    def becomes(self, was: Placement, now: Placement) -> bool:
        """True if it gets from its several pools to ``now`` without a restart."""
        fewer, more = len(now.nodes) < len(was.nodes), len(now.nodes) > len(was.nodes)
        if not was.parts or not ((fewer and self.may_shrink) or (more and self.may_grow)):
            return False
        pools = [part.pool for part in was.by_pool]
        if more and [part.pool for part in now.by_pool] != pools:
            return False
        return stays(was, now, self.together)

    def _whole_positions(self, at: Placement) -> bool:
        return all(part.gpus % self.together == 0 for part in at.by_pool)

    def has_memory(self, pool: str, needed: float) -> bool:
        """True if each GPU of the pool has these bytes, as far as that is known."""
        return needed <= self.memory.get(pool, math.inf) * ROUNDING

    def _seconds(self, parts: Sequence[PoolPart]) -> float | None:
        if self.plans_degrees:
            gpus = types_by_rank(parts)
            plans = (
                p for p in self.planned.get(gpus, ()) if not any(part.gpus % p.together for part in parts)
            )
            if (plan := next(plans, None)) is None:
                return None
            needed = {gpu_type: taken for (gpu_type, _), taken in zip(gpus, plan.memory, strict=True)}
            if not all(self.has_memory(part.pool, needed[part.gpu_type]) for part in parts):
                return None
            known = (self.known_over_planned[t] for t in needed if t in self.known_over_planned)
            return 1 / (plan.steps_per_second * min(known, default=1.0))
        ranks: list[RankGpu] = []
        for part in parts:
            relative = self.relative(part.gpu_type)
            if relative <= 0:
                return None
            has = self.memory.get(part.pool, math.inf)
            ranks += [RankGpu(speed=relative, memory=has)] * self._positions(part.gpus)
        return step_seconds(self.pipeline, tuple(ranks))

    def _positions(self, gpus: int) -> int:
        return gpus // self.pipeline.ranks_per_position


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpreadGang:
    """A running gang on another number of nodes than its speed on each GPU type is of.

    Attributes:
        fewest: nodes of its pool that would hold it.
        speed: steps/s where it is.
        packed_speed: steps/s on the fewest nodes of its pool.
        restart_seconds: from its stop to its first step elsewhere.
        may_move: it may be stopped and started elsewhere now.
    """

    at: Placement
    fewest: int
    speed: float
    packed_speed: float
    restart_seconds: float = RESTART_SECONDS
    may_move: bool = True

    def speed_at(self, placement: Placement) -> float:
        """Steps/s where it is, or on the fewest nodes of its pool; 0: not known here."""
        if placement == self.at:
            return self.speed
        alike = placement.pool == self.at.pool and len(placement.nodes) == len(self.at.nodes)
        return self.packed_speed if alike and len(set(placement.nodes)) <= self.fewest else 0.0

    def speed_after_restart(self, stay_seconds: float) -> float:
        """Mean steps/s over its stay, where it restarts on the fewest nodes."""
        return self.packed_speed * max(0.0, 1.0 - self.restart_seconds / max(stay_seconds, 1e-9))


def speeds_where_it_is(
    at: Placement,
    packed: Mapping[int, float],
    room: float,
    fewest: Callable[[int], int | None],
    speed_on: Callable[[int, int, float], float],
) -> dict[int, float]:
    """GPUs -> steps/s of a running elastic gang, if it shrinks and grows from where it is.

    It shrinks to the nodes of its first ranks, and grows on its own nodes if these have room, else on more.

    Args:
        at: where it is.
        packed: GPUs -> steps/s on as few nodes as possible.
        room: GPUs that its own nodes have for it.
        fewest: GPUs -> nodes that hold them; None: not known.
        speed_on: of a number of GPUs, of nodes, and the speed on the fewest: steps/s there.
    """
    here, losses, spread = dict(packed), dict[int, float](), []
    gpus, own = len(at.nodes), len(set(at.nodes))
    for size, rate in packed.items():
        nodes = len(set(at.nodes[:size])) if size < gpus else own + (size > room)
        needs = fewest(size)
        if needs is not None and nodes > needs and rate > 0:
            spread.append(size)
            known = speed_on(size, nodes, rate)
            if known != rate:
                losses[size] = known / rate
    for size in spread if losses else ():
        # What another size loses on more nodes is the best guess for one that has not run there.
        here[size] *= losses[min(losses, key=lambda other: (abs(other - size), other))]
    return here


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SharingJob:
    """A job of exactly one GPU that may share it.

    Attributes:
        kind: equal for jobs that run alike.
        memory: bytes that it needs.
        known_alone: GPU types on which its speed alone is known: by it a pair is judged.
    """

    kind: str
    memory: float
    known_alone: frozenset[str] = frozenset()


LEAST_PAIR_GAIN = 0.05
"""Two jobs begin to share where their speeds over those alone are 1 and this much more together. They
continue while they are at least 1."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SharedGpus:
    """GPUs that two jobs may share, and these jobs.

    Attributes:
        jobs: name -> job that may share.
        memory: node -> bytes of its one GPU, for nodes that offer it to two pods.
        unable: running jobs that cannot use the type of their GPUs any more.
    """

    jobs: Mapping[str, SharingJob] = dataclasses.field(default_factory=dict)
    memory: Mapping[str, float] = dataclasses.field(default_factory=dict)
    speeds: PairSpeeds = dataclasses.field(default_factory=PairSpeeds)
    unable: frozenset[str] = frozenset()

    def fit(self, one: str, other: str, node: str) -> bool:
        """True if both may share, and the node's GPU has memory for the two."""
        first, second = self.jobs.get(one), self.jobs.get(other)
        if first is None or second is None or node not in self.memory:
            return False
        return first.memory + second.memory <= self.memory[node]

    def may_begin(self, one: str, other: str, at: Placement) -> bool:
        """True if the two fit, what each does alone is known, and together they do enough more."""
        if not self.fit(one, other, at.nodes[0]):
            return False
        known = self.jobs[one].known_alone & self.jobs[other].known_alone
        return at.gpu_type in known and self.pair_speed(one, other, at.gpu_type) >= 1 + LEAST_PAIR_GAIN

    def why_apart(self, one: str, other: str, at: Placement) -> str:
        """Reason that ``one`` may not stay beside ``other``; empty: it may."""
        if not self.fit(one, other, at.nodes[0]):
            return f"{other} has its GPU, and the two may not share it"
        together = self.pair_speed(one, other, at.gpu_type)
        did = f"{other} has its GPU, and the two did {together:.2f} there of what one does alone"
        return did if together < 1 else ""

    def colocation(self, job: str, partner: str, gpu_type: str) -> Colocation:
        """``job`` beside ``partner``; both may share."""
        kinds = self.jobs[job].kind, self.jobs[partner].kind
        known = self.speeds.relative(*kinds, gpu_type)
        return Colocation(partner=partner, speed=known.value, measured=known.measured)

    def pair_speed(self, one: str, other: str, gpu_type: str) -> float:
        """The sum of both speeds over those alone: 1 is what they do by turns."""
        return self.colocation(one, other, gpu_type).speed + self.colocation(other, one, gpu_type).speed

    def colocated_speeds(self, running: Mapping[str, Placement]) -> dict[str, float]:
        """Job of ``running`` that shares its GPU -> its speed over that alone."""
        on_node: dict[str, list[str]] = {}
        for name, at in running.items() if self.memory else ():
            on_node.setdefault(self.on(at), []).append(name)
        return {
            name: self.colocation(name, other, running[name].gpu_type).speed
            if self.jobs.keys() >= {name, other}
            else FIRST_GUESS
            for node, names in on_node.items()
            if node
            for name, other in itertools.permutations(names, 2)
        }

    def first_jobs(self, placements: Mapping[str, Placement]) -> dict[str, str]:
        """Node whose GPU may be shared -> the job of ``placements`` that has it."""
        if not self.memory:
            return {}
        return {node: name for name, at in placements.items() if (node := self.on(at))}

    def on(self, placement: Placement | None) -> str:
        """The node of a job that is alone in its gang on a GPU that may be shared; empty: it is not."""
        if placement is None or len(placement.nodes) != 1 or placement.nodes[0] not in self.memory:
            return ""
        return placement.nodes[0]
