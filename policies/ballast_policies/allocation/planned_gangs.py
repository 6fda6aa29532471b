"""A pipeline at any numbers of GPUs, of one type or several, each with the plan that suits it best.

Its shapes are numbers of GPUs of each type; a plan of one is its tensor and data degree, the size of a
microbatch, whether forwards are repeated, and the layers of each stage, the fastest GPUs first. The slowest
first are looked at with ``both_orders``: early stages keep the most microbatches, and slow GPUs have fewer
layers. A step takes what the closed form of :mod:`ballast_policies.planning.step_time` says of the cut that
would be launched (:func:`.best_cut`), with transfers and the exchange of gradients.

Of the thousands of plans few are cut. Let f(p, k) be the smallest largest load of the first k layers on p
ranks of speed 1, and g(q, k) that of the others on q ranks, tables of one dynamic program. With k layers on
the p ranks of the fastest type, of speed s, and the others on q ranks no faster than u, together of speed v,

    T >= (m - 1) max(f(p, k) / s, g(q, k) / u, (S_L - S_k) / v) + S_k / s + (S_L - S_k) / u

for the best k, times what any layer takes at this size of a microbatch at least of what it takes in the
profile. The other order is this one of the layers in reverse; of both, each term's least counts. So the best
answer to prices is found by cutting, in the order of what these bounds would gain, until the plan that comes
first is one that is cut.

This is of 1F1B. Under which other schedule a plan is faster is seen by playing it
(:meth:`PlannedGang.scheduled`).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from ballast_policies.allocation.gang_sizes import MOST_LISTED
from ballast_policies.allocation.problem import Configuration
from ballast_policies.contract.errors import ContractError, Problem
from ballast_policies.contract.limits import MOST_MICROBATCHES, MOST_REPLICAS
from ballast_policies.planning.launch import (
    UNLIMITED_BYTES,
    LaunchedPipeline,
    LaunchRanks,
    RankGpu,
    best_cut,
    cut_within_memory,
)
from ballast_policies.planning.memory.measured_layers import MeasuredLayers, PipelineForm
from ballast_policies.planning.memory.moments import schedule_of
from ballast_policies.planning.memory.need import bytes_of_cuts
from ballast_policies.planning.memory.stage_bytes import ROUNDING, stage_bytes
from ballast_policies.planning.partition import Partition, sums_of
from ballast_policies.planning.planners.best.placements import divisors
from ballast_policies.planning.planners.cost_model import RECOMPUTED, ZERO_HALVES, Degrees
from ballast_policies.planning.profile import (
    LayerProfile,
    ProfileFile,
    fullest_part,
    held_by_replica,
    recomputed_bytes,
    repeated_layers,
    routed_both_ways,
    zero_shares,
)
from ballast_policies.planning.schedules.costs import StageCosts
from ballast_policies.planning.schedules.registry import DEFAULT_SCHEDULE, SCHEDULES
from ballast_policies.planning.schedules.simulate import simulate
from ballast_policies.planning.step_time import predict_step_seconds

MOST_PLANS = 1_000_000
"""Shapes times plans of a job: 8 MB of bounds."""

STAGE_WORK = 8192
"""Cost of cutting a stage whatever the layers, as much as of 90."""

LEAST_SECONDS = 1e-9
"""Least seconds of a profile's longest layer: with less, steps per second would not be finite."""

LEAST_SPEED = 1e-6
"""Least relative speed of a GPU type."""

MOST_PLAYED = 2_500
"""Stages x microbatches up to which a schedule is played: all of them take one or two seconds at most."""

SCHEDULE_GAIN = 0.05
"""Part by which a step has to be shorter under another schedule than 1F1B, which has the fewest messages."""

REVERSED_GAIN = 0.01
"""The slowest GPUs first are looked at where they might win more than this."""

_Positive = Annotated[float, Field(gt=0)]
_Count = Annotated[int, Field(ge=1, le=100_000)]


class TensorProfile(ProfileFile):
    """Layers on one of ``tensor`` GPUs of speed 1 that share each of them, their all-reduces included."""

    def seconds(self, microbatch_size: float, *, recompute: int) -> np.ndarray:
        """(L,) forward and backward of each layer for a microbatch of another size."""
        scale = np.array([microbatch_size / self.microbatch_size])
        scaled = _scaled(self.profile(1), scale, recompute=recompute)
        found: np.ndarray = (scaled["forward_seconds"] + scaled["backward_seconds"])[0]
        return found

    def slowed(self, ratios: Sequence[float]) -> "TensorProfile":
        """The profile with each layer's seconds times its ratio, ``ratios`` of shape (L,).

        Raises:
            ContractError: a layer takes too long.
        """
        layers = []
        for layer, ratio in zip(self.each_layer(1), ratios, strict=True):
            forward, backward = layer.forward_seconds * ratio, layer.backward_seconds * ratio
            layers.append(
                layer.replace(
                    repeat=1,
                    forward_seconds=forward,
                    backward_seconds=backward,
                    overhead_seconds=min(layer.overhead_seconds * ratio, forward + backward),
                )
            )
        return self.replace(layers=tuple(layers))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShapePlan:
    """The plan of a shape.

    Attributes:
        seconds: of a step.
        layers, form: of what is cut.
        slow_first: the slowest GPUs have the first layers, else the fastest.
    """

    degrees: Degrees
    cut: Partition
    seconds: float
    layers: MeasuredLayers
    form: PipelineForm
    slow_first: bool = False

    @property
    def memory_bytes(self) -> tuple[float, ...]:
        """Bytes of its GPUs that each stage takes; where ranks have several stages, those of each rank."""
        by_rank = bytes_of_cuts(self.layers, self.form)
        if by_rank is not None:
            return by_rank(self.cut)
        taken: list[float] = stage_bytes(self.layers, self.form).of_cut(self.cut).tolist()
        return tuple(taken)


@dataclasses.dataclass(frozen=True, slots=True)
class LivePlans:
    """Plans that are asked for beside one of 1F1B, between which its ranks can change as they train.

    Attributes:
        degrees: of all of them, but for what they repeat.
        cut: of 1F1B with these degrees.
        gpus: (GPU type, number), in the order of the ranks.
        schedules: their names, each with a flush; each repeats as few forwards as fit.
        most: how many plans.
        recomputed: values of ``degrees.recompute`` that they may have as well, those that repeat least first.
    """

    degrees: Degrees
    cut: Partition
    gpus: Sequence[tuple[str, int]]
    schedules: Sequence[str]
    most: int
    recomputed: Sequence[int] = ()


@dataclasses.dataclass(kw_only=True, eq=False)
class PlannedGang:
    """A source of configurations for :func:`~ballast_policies.allocation.generated.allocate_generated`.

    Its shapes are computed when the cluster is known; plans that were cut are kept until it changes.

    Attributes:
        profiles: of the model, one for each tensor degree that it may have.
        speeds: GPU type -> speed relative to the profiles' GPU.
        batch_size: samples of a step.
        sizes: numbers of GPUs that it may have of a type.
        part_sizes: those where it has two types, three, ...; those that are missing: ``sizes``.
        most_types: GPU types that it may have at once.
        fewest_gpus, most_gpus: of all types together; None: any number.
        memory_bytes: GPU type -> bytes of a GPU; a type that is missing has no limit.
        bandwidth: bytes/s between GPUs; None: transfers are free.
        zero_stage: what replicas share, where there are some; as ``parallelism.zeroStage``.
        both_orders: of several types, the slowest may come first as well; takes up to twice as long.

    Raises:
        ContractError: a value is impossible.
    """

    profiles: Annotated[tuple[TensorProfile, ...], Field(min_length=1)]
    speeds: Annotated[Mapping[str, _Positive], Field(min_length=1)]
    batch_size: _Count
    sizes: Annotated[tuple[_Count, ...], Field(min_length=1)]
    part_sizes: tuple[Annotated[tuple[_Count, ...], Field(min_length=1)], ...] = ()
    most_types: _Count = 1
    fewest_gpus: _Count = 1
    most_gpus: _Count | None = None
    memory_bytes: Mapping[str, _Positive] = dataclasses.field(default_factory=dict)
    bandwidth: _Positive | None = None
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 0
    both_orders: bool = False

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ContractError(problems)
        # The order of the ranks.
        self._types = sorted(self.speeds, key=lambda t: -self.speeds[t])
        self._speeds = np.array([self.speeds[t] for t in self._types])
        self._memory = np.array([self.memory_bytes.get(t, math.inf) for t in self._types])
        pairs = zip(self._speeds.tolist(), self._memory.tolist(), strict=True)
        self._gpu_of = [RankGpu(speed=speed, memory=memory) for speed, memory in pairs]
        most = max(number * of[-1] for number, of in enumerate(self.sizes_by_types, start=1))
        self._together = self.fewest_gpus, min(most, self.most_gpus or most)
        self._most: tuple[int, ...] | None = None
        self._known: dict[tuple[int, int], ShapePlan | None] = {}
        # By shape: GPUs of each type; by plan, seconds of a step, at least; the best plan and its seconds.
        self._gpus = self._seconds = np.zeros((0, 0))
        self._best = self._least = np.zeros(0)

    def _problems(self) -> Iterator[Problem]:
        for number, profile in enumerate(self.profiles):
            if not profile.layers:
                yield Problem(f"profiles[{number}].layerSeconds", "a report's are of a step: give layers")
            elif max(one.forward_seconds + one.backward_seconds for one in profile.layers) < LEAST_SECONDS:
                reason = f"no layer takes {LEAST_SECONDS:g} s. To fix: measured seconds"
                yield Problem(f"profiles[{number}].layers", reason)
            elif self.zero_stage and any(one.held_bytes and not one.weight_bytes for one in profile.layers):
                reason = "a layer holds bytes, and weightBytes does not say how many replicas gather"
                yield Problem(f"profiles[{number}].layers", f"{reason}. To fix: weightBytes, or zeroStage 0")
        if len({profile.tensor for profile in self.profiles}) < len(self.profiles):
            yield Problem("profiles", "a tensor degree is there twice. To fix: give each once")
        if len({len(profile.each_layer(1)) for profile in self.profiles}) > 1:
            yield Problem("profiles", "their numbers of layers differ. To fix: give one model's")
        for gpu_type, speed in self.speeds.items():
            if speed < LEAST_SPEED:
                yield Problem(f"speeds.{gpu_type}", f"{speed:g} is below {LEAST_SPEED:g}. To fix: more")
        for gpu_type in self.memory_bytes:
            if gpu_type not in self.speeds:
                yield Problem(f"memory_bytes.{gpu_type}", "speeds does not have the type. To fix: add it")
        types = len(self.speeds)
        shapes = sum(math.comb(types, n) * len(of) ** n for n, of in enumerate(self.sizes_by_types, start=1))
        plans = len(divisors(self.batch_size)) ** 2 * len(self.profiles)
        if shapes * plans > MOST_PLANS:
            reason = f"{shapes:,} mixes of GPUs with about {plans:,} plans each are more than {MOST_PLANS:,}"
            yield Problem("sizes", f"{reason} together. To fix: fewer sizes, or a smaller most_types")

    @functools.cached_property
    def sizes_by_types(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of GPUs of each type, rising, where it has one, two, ..."""
        several = min(self.most_types, len(self.speeds)) - 1
        parts = (*self.part_sizes, *(self.sizes,) * several)[:several]
        return tuple(tuple(sorted(set(of))) for of in (self.sizes, *parts))

    @functools.cached_property
    def _plans(self) -> "_Plans":
        limited = bool(np.isfinite(self._memory).any())
        return _Plans(self, most=self._together[1], limited=limited)

    def best_answer(
        self, prices: Mapping[str, float], worth: float, most: Mapping[str, int]
    ) -> Configuration | None:
        """Best answer, as of :class:`~ballast_policies.allocation.generated.ConfigurationSource`."""
        self._look_at(most)
        if not len(self._gpus):
            return None
        cost = self._gpus @ [prices.get(t, 0.0) for t in self._types]
        while True:
            gain = np.where(self._least < math.inf, worth / self._least - cost, -math.inf)
            if gain[shape := int(gain.argmax())] == -math.inf:
                return None
            plan = self._known.get((shape, int(self._best[shape])))
            if plan is not None:
                return self._configuration(shape, plan)
            self._cut(shape, int(self._best[shape]))

    def listed(self, most: Mapping[str, int], work: float = math.inf) -> tuple[Configuration, ...] | None:
        """Configurations on clusters with ``most`` GPUs of each type, but those as fast with some GPUs idle.

        None: more than MOST_LISTED, or than ``work`` has been cut: stages times (the square of the layers +
        STAGE_WORK).
        """
        self._look_at(most)
        if len(self._gpus) > MOST_LISTED:
            return None
        shapes, left = self._of_use(work)
        plans = ((shape, self._known.get((shape, int(self._best[shape])))) for shape in shapes)
        return tuple(self._configuration(shape, plan) for shape, plan in plans if plan) if left >= 0 else None

    def sizes_of_use(self, most: Mapping[str, int], work: float = math.inf) -> tuple[int, ...]:
        """Numbers of GPUs of those that :meth:`listed` has; after ``work`` of those that it may have."""
        self._look_at(most)
        return tuple(sorted(set(self._gpus[self._of_use(work)[0]].sum(axis=1).astype(int).tolist())))

    def _of_use(self, work: float) -> tuple[list[int], float]:
        """Shapes that are faster than with some of the GPUs idle, and the work that is left, below 0: none.

        Plans after that are as fast as bounds have them.
        """
        found, half = np.zeros(len(self._gpus), dtype=bool), work / 2
        for shape in self._gpus.sum(axis=1).argsort(kind="stable").tolist():
            fewer = found & (self._gpus <= self._gpus[shape]).all(axis=1)
            limit = self._least[fewer].min(initial=math.inf)
            while self._least[shape] < limit:
                if work < 0 or self._known.get((shape, int(self._best[shape]))) is not None:
                    found[shape] = True
                    work -= self._repeat_less(shape, int(self._best[shape]), work, leaves=half)
                    break
                # The other order and fewer repeats have at most half of the work: they refuse no job.
                work -= self._cut(shape, int(self._best[shape]), both_orders=work >= half)
        return np.flatnonzero(found).tolist(), work

    def plan_of(self, configuration: Configuration) -> ShapePlan:
        """The plan of a configuration that was the last call's answer, or is on the last list."""
        shape = self._shape(configuration)
        found = self._known[shape, int(self._best[shape])]
        assert found is not None
        return found

    def plans_in_parts(self, configuration: Configuration, work: float) -> list[ShapePlan]:
        """Plans of one of a list for where its GPUs are in several pools, the fastest first.

        They have fewer GPUs for a stage than :meth:`plan_of`: for every number of GPUs of which all parts are
        multiples, the fastest plan is there, or among those after which ``work`` was cut, as of
        :meth:`listed`.
        """
        shape, groups = self._shape(configuration), self._plans.groups
        found = {int(self._best[shape])}
        for each in reversed(divisors(math.gcd(*configuration.gpus.values()))[:-1]):
            allowed = each % groups == 0
            while True:
                seconds = np.where(allowed, self._seconds[shape], math.inf)
                number = int(seconds.argmin())
                if work < 0 or seconds[number] == math.inf:
                    break
                if self._known.get((shape, number)) is not None:
                    work -= self._repeat_less(shape, number, work)
                    found.add(number)
                    break
                work -= self._cut(shape, number)
        plans = (self._known[shape, number] for number in found - {int(self._best[shape])})
        return sorted((plan for plan in plans if plan is not None), key=lambda plan: plan.seconds)

    def _shape(self, configuration: Configuration) -> int:
        gpus = [configuration.gpus.get(t, 0) for t in self._types]
        return int((self._gpus == gpus).all(axis=1).argmax())

    def _look_at(self, most: Mapping[str, int]) -> None:
        there = tuple(int(most.get(t, 0)) for t in self._types)
        if there != self._most:
            self._most, self._known = there, {}
            self._gpus = _shapes(self.sizes_by_types, self._together, there)
            self._seconds = self._plans.least_seconds(self._gpus, self._speeds, self._memory)
            self._best, self._least = (
                self._seconds.argmin(axis=1),
                self._seconds.min(axis=1, initial=math.inf),
            )

    def _cut(self, shape: int, number: int, *, both_orders: bool = True) -> int:
        """Know a plan of the shape; returns what that took, as of :meth:`PlannedGang.listed`."""
        ranks, work = self._ranks(shape, number)
        degrees = self._plans.degrees[number]
        plan, wins = self._plans.planned(degrees, ranks), self._seconds[shape, number] * (1 + REVERSED_GAIN)
        both_orders = both_orders and self.both_orders and ranks[0] is not ranks[-1]
        if both_orders and (plan is None or plan.seconds > wins):
            work *= 2
            other = self._plans.planned(degrees, ranks[::-1])
            if other is not None and (plan is None or other.seconds < plan.seconds):
                plan = dataclasses.replace(other, slow_first=True)
        self._known[shape, number] = plan
        if plan is None:
            self._seconds[shape, self._plans.as_large(number)] = math.inf
        else:
            self._seconds[shape, number] = plan.seconds
        self._best[shape], self._least[shape] = self._seconds[shape].argmin(), self._seconds[shape].min()
        return work

    def _repeat_less(self, shape: int, number: int, work: float, leaves: float = 0.0) -> int:
        """Let fewer layers of a plan that repeats all forwards do so, where that is faster; returns as _cut.

        Only of a plan that may be launched: prices find plans by bounds, which such ones could be below.
        Not where less than ``leaves`` would be left of ``work``.
        """
        plan = self._known.get((shape, number))
        ranks, each = self._ranks(shape, number)
        takes = each * len(RECOMPUTED[1:-1])
        if plan is None or plan.degrees.recompute != 1 or work - takes < leaves:
            return 0
        for every in RECOMPUTED[1:-1]:
            degrees = dataclasses.replace(plan.degrees, recompute=every)
            other = self._plans.planned(degrees, ranks[::-1] if plan.slow_first else ranks)
            if other is not None and other.seconds < plan.seconds:
                plan = dataclasses.replace(other, slow_first=plan.slow_first)
        self._known[shape, number], self._seconds[shape, number] = plan, plan.seconds
        self._best[shape], self._least[shape] = self._seconds[shape].argmin(), self._seconds[shape].min()
        return takes

    def plan_with(self, degrees: Degrees, gpu_type: str, gpus: int) -> ShapePlan | None:
        """The plan of GPUs of a type that has these degrees, though others may be faster; None: none fits."""
        stages, rest = divmod(gpus, degrees.tensor * degrees.data)
        if rest or not 1 <= stages <= min(degrees.microbatches, self._plans.layers):
            return None
        return self._plans.planned(degrees, [self._gpu_of[self._types.index(gpu_type)]] * stages)

    def scheduled(self, asked: LivePlans) -> list[ShapePlan]:
        """Plans that ranks can change between as they train: schedules, each with its best cut, and cuts.

        First the one to launch: 1F1B's, unless another takes SCHEDULE_GAIN less; then the others by seconds,
        which are as played; after all schedules, cuts that move one layer from the fastest, and the fastest
        with more forwards repeated. Empty: none fits, or is played.
        """
        group, ranks = asked.degrees.tensor * asked.degrees.data, list[RankGpu]()
        for gpu_type, count in asked.gpus:
            ranks += [self._gpu_of[self._types.index(gpu_type)]] * (count // group)
        return self._plans.scheduled(asked, ranks)

    def _ranks(self, shape: int, number: int) -> tuple[list[RankGpu], int]:
        """The GPUs of a plan's stages, the fastest first, and what cutting for them takes."""
        group = int(self._plans.groups[number])
        ranks = list[RankGpu]()
        for kind in np.flatnonzero(self._gpus[shape]).tolist():
            ranks += [self._gpu_of[kind]] * (int(self._gpus[shape, kind]) // group)
        return ranks, len(ranks) * (self._plans.layers**2 + STAGE_WORK)

    def _configuration(self, shape: int, plan: ShapePlan) -> Configuration:
        counts = zip(self._types, self._gpus[shape].tolist(), strict=True)
        chosen = dict([(t, int(n)) for t, n in counts if n][:: -1 if plan.slow_first else 1])
        return Configuration(
            name=" + ".join(f"{n} x {t}" for t, n in chosen.items()),
            gpus=chosen,
            throughput=1.0 / plan.seconds,
        )


class _Plans:
    """Degrees with which a step could be trained, and what is known of their seconds before a cut.

    Plans of the same tensor degree, microbatch size and recomputation have the same ``work`` a microbatch.
    """

    def __init__(self, gang: PlannedGang, *, most: int, limited: bool) -> None:
        self._bandwidth = math.inf if gang.bandwidth is None else gang.bandwidth
        self._zero_stage = gang.zero_stage
        forward, backward, step = ZERO_HALVES[gang.zero_stage]
        self._halves = forward + backward, step
        self.degrees: list[Degrees] = []
        self._work: list[int] = []
        self._profiles = {each.tensor: (each.profile(1), each.microbatch_size) for each in gang.profiles}
        every: list[dict[str, np.ndarray]] = []
        self._tables: dict[int, _Loads] = {}
        sizes, works = divisors(gang.batch_size), itertools.count()
        for profile in gang.profiles:
            layers, _ = self._profiles[profile.tensor]
            self._tables[profile.tensor] = _Loads(layers, most, both_orders=gang.both_orders)
            scales = np.array(sizes) / profile.microbatch_size
            for again in (0, 1)[: 1 + limited]:
                every.append(_scaled(layers, scales, recompute=again))
                for size, work in zip(sizes, works, strict=False):
                    for data in divisors(gang.batch_size // size):
                        microbatches = gang.batch_size // size // data
                        replicas = min(MOST_REPLICAS, max(1, most // profile.tensor))
                        if data <= replicas and microbatches * data <= MOST_MICROBATCHES:
                            self.degrees.append(Degrees(profile.tensor, data, size, microbatches, again))
                            self._work.append(work)
        self.layers: int = every[0]["held_bytes"].shape[1]
        self._form = np.array([(d.tensor, d.data, d.recompute) for d in self.degrees]).reshape(-1, 3)
        self._sizes = np.array([d.microbatch_size for d in self.degrees])
        self.groups = self._form[:, 0] * self._form[:, 1]
        # By work: the least ratio of a layer's seconds to the profile's; bytes that all layers keep.
        tables = [self._tables[profile.tensor] for profile in gang.profiles for _ in range(1 + limited)]
        ratios = [table.ratio(of) for table, of in zip(tables, every, strict=True)]
        self._ratio = np.concatenate(ratios).tolist()
        self._kept = np.concatenate([of["activation_bytes"].sum(axis=1) for of in every])
        # By work, [p - 1]: bytes that p stages hand on at least, there and back.
        outputs = np.sort(np.concatenate([of["output_bytes"][:, :-1] for of in every]), axis=1)
        self._sent = 2 * np.pad(np.cumsum(outputs, axis=1), ((0, 0), (1, 0)))
        self._measured: dict[tuple[int, int, int, int], MeasuredLayers] = {}

    def as_large(self, number: int) -> np.ndarray:
        """(plans,) whether a plan needs as much memory on each rank: it differs in larger microbatches alone.

        A stage has no more of them in flight than there are stages after it, of which each plan has enough.
        """
        alike = (self._form == self._form[number]).all(axis=1)
        return np.asarray(alike & (self._sizes >= self._sizes[number]))

    def least_seconds(self, gpus: np.ndarray, speeds: np.ndarray, memory: np.ndarray) -> np.ndarray:
        """Seconds of a step at least, shape (shapes, plans); infinite where the plan is none.

        Args:
            gpus: (shapes, k) of each type.
            speeds: (k,), falling.
            memory: (k,) bytes of a GPU.
        """
        first = (gpus > 0).argmax(axis=1)[:, None]
        rest = np.where(np.arange(gpus.shape[1]) == first, 0.0, gpus)
        fast = speeds[first]
        slow = np.where(rest.any(axis=1, keepdims=True), speeds[(rest > 0).argmax(axis=1)[:, None]], fast)
        others = np.where(speeds < slow, rest, 0.0)
        slowest = np.where(
            others.any(axis=1, keepdims=True), speeds[(others > 0).argmax(axis=1)[:, None]], slow
        )
        power, second = rest @ speeds[:, None], (rest - others).sum(axis=1, keepdims=True)
        has = np.where(gpus > 0, gpus * np.minimum(memory, UNLIMITED_BYTES), 0.0).sum(axis=1)
        least = np.full((len(gpus), len(self.degrees)), math.inf)
        alike: dict[tuple[int, int], list[int]] = {}
        for number, plan in enumerate(self.degrees):
            alike.setdefault((plan.tensor, plan.data), []).append(number)
        for (tensor, data), numbers in alike.items():
            group, table = tensor * data, self._tables[tensor]
            works = np.array([self._work[number] for number in numbers])
            counts = np.array([self.degrees[number].microbatches for number in numbers])
            stages = gpus.sum(axis=1) / group
            at = np.flatnonzero((gpus % group == 0).all(axis=1) & (stages <= min(table.layers, counts.max())))
            # (plans, shapes): a stage has a microbatch, and the layers are there together; of one microbatch,
            # gradients are not there before its backward.
            _, shares, _ = zero_shares(self._zero_stage, data)
            weights = table.weight_bytes.sum()
            held = self._held(tensor, data).sum()
            needed = held + np.maximum(0.0, self._kept[works] - np.where(counts == 1, weights / shares, 0.0))
            runs = needed[:, None] <= has[at] / group * ROUNDING
            runs &= stages[at] <= counts[:, None]
            at, runs = at[runs.any(axis=0)], runs[:, runs.any(axis=0)]
            p, q = stages[at].astype(np.intp), (rest[at].sum(axis=1) / group).astype(np.intp)
            load, total, largest = table.loads(p - q, q, fast[at], slow[at], power[at] / group)
            # What the third type needs longer for what the second has no time for, where the busiest stage
            # takes ``load``; a second more there saves ``saved`` of these, and costs m - 1.
            left = (table.seconds_after - load * (second[at] / group * slow[at])).clip(0.0)
            longer = np.where(np.isfinite(total), left, 0.0) * (1 / slowest[at] - 1 / slow[at])
            saved = (second[at] / group * (slow[at] / slowest[at] - 1))[:, 0]
            third_type = bool(saved.any())
            half = (1 - 1 / data) / self._bandwidth
            in_microbatch, in_step = self._halves
            gathered, exchange = in_microbatch * half * table.exchanged_bytes.sum(), in_step * half * largest
            exchanges = bool(exchange.any())
            for number, work, m, row in zip(numbers, works.tolist(), counts.tolist(), runs, strict=True):
                some = np.flatnonzero(row)
                busiest, all_stages = self._ratio[work] * load[some], self._ratio[work] * total[some]
                if gathered:
                    all_stages += gathered
                    mean = np.where(np.isfinite(all_stages), all_stages, 0.0) / p[some][:, None]
                    busiest = np.maximum(busiest, mean)
                elif third_type:
                    worth = np.where(saved[some] <= m - 1, self._ratio[work], 0.0)
                    all_stages += worth[:, None] * longer[some]
                seconds = (m - 1) * busiest + all_stages
                if exchanges:
                    seconds += exchange[some]
                sent = self._sent[work][p[some] - 1] / self._bandwidth
                least[at[some], number] = (seconds.min(axis=1, initial=math.inf) + sent) * (1 - 1e-12)
        return least

    def planned(self, plan: Degrees, ranks: Sequence[RankGpu]) -> ShapePlan | None:
        """The plan with its best cut over ``ranks``, one for each stage; None: none fits their memory."""
        layers, form = self._measured_layers(plan), self._form_of(plan, len(ranks))
        speeds = [rank.speed for rank in ranks]
        half = (1 - 1 / plan.data) / self._bandwidth * self._tables[plan.tensor].exchanged_bytes
        in_microbatch, in_step = self._halves
        sent = in_microbatch * half + sum(self._routed_seconds(plan))
        cut_by = layers
        if sent.any():
            # As if all GPUs were as slow as the slowest: on GPUs alike it is exact.
            gathered = min(speeds) * sent
            cut_by = dataclasses.replace(layers, seconds=tuple(np.add(layers.seconds, gathered).tolist()))
        cut = best_cut(LaunchedPipeline(layers=cut_by, count=len(layers.seconds), form=form), ranks)
        if cut is None:
            return None
        loads = cut.loads(layers.seconds, speeds) + cut.loads(sent.tolist())
        seconds = predict_step_seconds(
            loads * plan.microbatches,
            plan.microbatches,
            boundary_seconds=[2 * layers.output_bytes[end - 1] / self._bandwidth for end in cut.bounds[1:-1]],
            fixed_seconds=float(in_step * cut.loads(half.tolist()).max()),
        )
        return ShapePlan(degrees=plan, cut=cut, seconds=seconds, layers=layers, form=form)

    def _form_of(self, plan: Degrees, positions: int, schedule: str = DEFAULT_SCHEDULE) -> PipelineForm:
        _, gradient_shares, weight_shares = zero_shares(self._zero_stage, plan.data)
        return PipelineForm(
            schedule=schedule,
            positions=positions,
            microbatches=plan.microbatches,
            stages_per_rank=SCHEDULES[schedule].stages_on_a_rank(),
            averaged=plan.data > 1,
            gradient_shares=gradient_shares,
            weights_shared=weight_shares > 1,
        )

    def scheduled(self, asked: LivePlans, ranks: Sequence[RankGpu]) -> list[ShapePlan]:
        """Plans as of :meth:`PlannedGang.scheduled`, over ``ranks``."""
        plan, most = asked.degrees, asked.most
        forms = [dataclasses.replace(plan, recompute=again) for again in asked.recomputed] or [plan]

        def under(schedule: str) -> ShapePlan | None:
            each = (
                self._under(
                    schedule, form, ranks, asked.cut if (schedule, form) == (DEFAULT_SCHEDULE, plan) else None
                )
                for form in forms
            )
            return next((one for one in each if one is not None), None)

        found = sorted(
            (one for one in map(under, asked.schedules) if one is not None), key=lambda one: one.seconds
        )
        if not found:
            return []
        fastest, cuts = found[0], list[Partition]()
        for at, by in itertools.product(range(1, fastest.cut.ranks), (-1, 1)):
            bounds = list(fastest.cut.bounds)
            bounds[at] += by
            if bounds[at - 1] < bounds[at] < bounds[at + 1]:
                cuts.append(Partition(bounds=tuple(bounds)))
        cuts.sort(key=lambda other: float(other.loads(fastest.layers.seconds).max()))
        left, schedule = max(0, most - len(found)), fastest.form.schedule
        near = [self._under(schedule, fastest.degrees, ranks, of) for of in cuts[:left]]
        more = forms[forms.index(fastest.degrees) + 1 :][:left]
        near += [self._under(schedule, form, ranks, None) for form in more]
        first = next((one for one in found if one.form.schedule == DEFAULT_SCHEDULE), fastest)
        if fastest.seconds <= (1 - SCHEDULE_GAIN) * first.seconds:
            first = fastest
        others = sorted((one for one in near if one is not None), key=lambda one: one.seconds)
        return [first, *(one for one in found if one is not first), *others][:most]

    def _under(
        self, schedule: str, plan: Degrees, ranks: Sequence[RankGpu], cut: Partition | None
    ) -> ShapePlan | None:
        """The plan under a schedule, as played, with a cut, or with its best; None: it does not fit."""
        layers, form = self._measured_layers(plan), self._form_of(plan, len(ranks), schedule)
        stages = form.positions * form.stages_per_rank
        if len(ranks) == 1 or stages > self.layers or stages * plan.microbatches > MOST_PLAYED:
            return None
        if not SCHEDULES[schedule].suits(len(ranks), plan.microbatches):
            return None
        built = schedule_of(form)
        if built is None:
            return None
        placement = tuple(holders[0] for holders in built[0].stage_ranks)
        speeds, memory = [ranks[rank].speed for rank in placement], tuple(rank.memory for rank in ranks)
        if cut is None:
            known = LaunchRanks(placement=placement, memory=memory)
            cut, _ = cut_within_memory(layers.seconds, speeds, layers, form, known)
            if cut is None:
                return None
        profile, size = self._profiles[plan.tensor]
        scaled = _scaled(profile, np.array([plan.microbatch_size / size]), recompute=plan.recompute)
        half = (1 - 1 / plan.data) / self._bandwidth * self._tables[plan.tensor].exchanged_bytes
        exchanged = cut.loads(half.tolist())
        forward, backward, step = ZERO_HALVES[self._zero_stage]
        there, back = (cut.loads(of.tolist()) for of in self._routed_seconds(plan))
        costs = StageCosts(
            forward=tuple(cut.loads(scaled["forward_seconds"][0], speeds) + forward * exchanged + there),
            backward=tuple(cut.loads(scaled["backward_seconds"][0], speeds) + backward * exchanged + back),
            update=tuple(step * exchanged),
            transfer=tuple(layers.output_bytes[end - 1] / self._bandwidth for end in cut.bounds[1:-1]),
        )
        seconds = simulate(built[0], costs).makespan
        found = ShapePlan(degrees=plan, cut=cut, seconds=seconds, layers=layers, form=form)
        fits = (taken <= has * ROUNDING for taken, has in zip(found.memory_bytes, memory, strict=True))
        return found if all(fits) else None

    def _routed_seconds(self, plan: Degrees) -> tuple[np.ndarray, np.ndarray]:
        """(L,) of a microbatch, for tokens that leave a replica for experts: forward, backward."""
        profile, size = self._profiles[plan.tensor]
        each = plan.microbatch_size / size * (1 - 1 / plan.data) / self._bandwidth
        repeats = repeated_layers(self.layers, plan.recompute)
        forward, backward = routed_both_ways(profile.routed_bytes, repeats)
        return each * forward, each * backward

    def _held(self, tensor: int, data: int) -> np.ndarray:
        """(L,) bytes that each of ``data`` replicas holds."""
        table = self._tables[tensor]
        profile, _ = self._profiles[tensor]
        return held_by_replica(
            table.held_bytes,
            table.weight_bytes,
            *zero_shares(self._zero_stage, data),
            expert_bytes=profile.expert_bytes,
            expert_part=fullest_part(profile.experts, data),
        )

    def _measured_layers(self, plan: Degrees) -> MeasuredLayers:
        """Layers of a microbatch of a plan."""
        layers, profiled_size = self._profiles[plan.tensor]
        shares = self._zero_stage or any(layers.expert_bytes)
        key = plan.tensor, plan.microbatch_size, plan.recompute, plan.data if shares else 1
        if key not in self._measured:
            scale = np.array([plan.microbatch_size / profiled_size])
            scaled = _scaled(layers, scale, recompute=plan.recompute)
            values = {name: value[0] for name, value in scaled.items()}
            values["held_bytes"] = self._held(plan.tensor, plan.data)
            elsewhere = 1 - fullest_part(layers.experts, plan.data)
            values["weight_bytes"] = values["weight_bytes"] - elsewhere * np.array(layers.expert_bytes)
            sizes = {
                field.name: tuple(map(math.ceil, values[field.name].tolist()))
                for field in dataclasses.fields(MeasuredLayers)
                if field.name != "seconds"
            }
            seconds = values["forward_seconds"] + values["backward_seconds"]
            self._measured[key] = MeasuredLayers(seconds=tuple(seconds.tolist()), **sizes)
        return self._measured[key]


class _Loads:
    """The smallest largest loads on p ranks of speed 1, [p, k], of the layers before k, and of the others."""

    def __init__(self, layers: LayerProfile, most: int, *, both_orders: bool) -> None:
        self._seconds = np.add(layers.forward_seconds, layers.backward_seconds)
        self.layers, self._sums = len(self._seconds), sums_of(self._seconds)
        most = min(most, self.layers)
        self._front = _smallest_largest(self._seconds, most)
        self._back = _smallest_largest(self._seconds[::-1], most)[:, ::-1]
        self.held_bytes, self.weight_bytes = np.array(layers.held_bytes), np.array(layers.weight_bytes)
        # The gradients of experts are on one replica each.
        self.exchanged_bytes = self.weight_bytes - np.array(layers.expert_bytes)
        self._weights = sums_of(self.exchanged_bytes)
        largest = (_largest(self.exchanged_bytes, p) for p in range(1, self.layers + 1))
        self._largest_weights = np.array([0.0, *largest])
        self._both_orders = both_orders
        if both_orders:  # beside each other: of the layers in their order, and in the reverse one
            front, back = self._front, self._back
            self._front, self._back = np.hstack([front, back[:, ::-1]]), np.hstack([back, front[:, ::-1]])
            self._sums = np.hstack([self._sums, sums_of(self._seconds[::-1])])
            self._weights = np.hstack([self._weights, sums_of(self.exchanged_bytes[::-1])])
        self.seconds_after = self._least(self._sums[-1] - self._sums)

    def ratio(self, scaled: Mapping[str, np.ndarray]) -> np.ndarray:
        """Least ratio of any layer's time to its time in the profile, by row of :func:`_scaled`."""
        timed = self._seconds > 0
        here = scaled["forward_seconds"] + scaled["backward_seconds"]
        least: np.ndarray = (here[:, timed] / self._seconds[timed]).min(axis=1)
        return least

    def loads(
        self,
        fast_ranks: np.ndarray,
        slow_ranks: np.ndarray,
        fast: np.ndarray,
        slow: np.ndarray,
        power: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(largest load, sum of loads, bytes of the largest weights), at least, each of shape (n, L + 1).

        Args:
            fast_ranks: (n,) how many have the layers before each k.
            slow_ranks: (n,) how many have the others.
            fast: (n, 1) speed of those.
            slow: (n, 1) speed of the fastest of these.
            power: (n, 1) sum of the speeds of these.
        """
        largest = np.maximum(self._front[fast_ranks] / fast, self._back[slow_ranks] / slow)
        uneven = np.flatnonzero(power < slow_ranks[:, None] * slow * (1 - 1e-9))
        if len(uneven):
            evenly = (self._sums[-1] - self._sums) / power[uneven]
            largest[uneven] = np.maximum(largest[uneven], evenly)
        runs = np.isfinite(largest)
        total = np.where(runs, self._sums / fast + (self._sums[-1] - self._sums) / slow, math.inf)
        weights = np.maximum(
            self._weights / np.maximum(fast_ranks, 1)[:, None],
            (self._weights[-1] - self._weights) / np.maximum(slow_ranks, 1)[:, None],
        )
        weights = np.maximum(weights, self._largest_weights[fast_ranks + slow_ranks][:, None])
        return self._least(np.where(runs, largest, 0.0)), self._least(total), self._least(weights)

    def _least(self, values: np.ndarray) -> np.ndarray:
        """The values by k, the least of the orders."""
        if not self._both_orders:
            return values
        fast_first, slow_first = np.split(values, 2, axis=-1)
        least: np.ndarray = np.minimum(fast_first, slow_first)
        return least


def _largest(values: np.ndarray, ranks: int) -> float:
    """Lower bound of the most that one of the ranks has of some layers' values: it is one of L / p layers."""
    sums, run = sums_of(values), -(-len(values) // ranks)
    return max(float(sums[-1]) / ranks, float(values.max()), float((sums[run:] - sums[:-run]).min()))


def _smallest_largest(seconds: np.ndarray, most: int) -> np.ndarray:
    """[p, k]: the smallest largest load of the first k layers on p of up to ``most`` ranks."""
    S = sums_of(seconds)
    load = np.where(np.tri(len(S), k=-1, dtype=bool), S[:, None] - S, math.inf)  # [end, first]
    found = np.full((most + 1, len(S)), math.inf)
    found[0, 0] = 0.0
    for p in range(1, most + 1):
        found[p] = np.maximum(found[p - 1], load).min(axis=1)
    return found


def _scaled(layers: LayerProfile, scales: np.ndarray, *, recompute: int) -> dict[str, np.ndarray]:
    """Field -> (scales, L): layers of so many times as many samples.

    As :mod:`.cost_model` and :mod:`.plan_memory` count them.
    """
    value = {field.name: np.array(getattr(layers, field.name))[None] for field in dataclasses.fields(layers)}
    scale = scales[:, None]
    whole = value["forward_seconds"] + value["backward_seconds"]
    fixed = value["overhead_seconds"] / np.maximum(whole, np.finfo(float).tiny)
    for name in ("forward_seconds", "backward_seconds"):
        value[name] = value[name] * (scale * (1 - fixed) + fixed)
    for name in ("activation_bytes", "output_bytes", "repeated_bytes", "gradient_bytes"):
        value[name] = value[name] * scale
    again = repeated_layers(whole.shape[1], recompute)
    value["backward_seconds"] = value["backward_seconds"] + again * value["forward_seconds"]
    value["activation_bytes"], value["repeated_bytes"] = recomputed_bytes(
        value["activation_bytes"], value["repeated_bytes"], value["output_bytes"], recompute
    )
    shape = len(scales), whole.shape[1]
    # Of one size, as most are, nothing is to be broadcast, which takes longer than all else.
    return {n: each if each.shape == shape else np.broadcast_to(each, shape) for n, each in value.items()}


@functools.lru_cache(maxsize=64)
def _shapes(
    sizes: tuple[tuple[int, ...], ...], together: tuple[int, int], there: tuple[int, ...]
) -> np.ndarray:
    """(shapes, k) numbers of GPUs of one type, two, ..., each one of the ``sizes`` of so many, and there.

    ``together``: fewest and most of all types.
    """
    found = []
    for types, of_each in enumerate(sizes, start=1):
        for kinds in itertools.combinations(range(len(there)), types):
            each = [[size for size in of_each if size <= there[kind]] for kind in kinds]
            for gpus in itertools.product(*each):
                if not together[0] <= sum(gpus) <= together[1]:
                    continue
                row = [0] * len(there)
                for kind, size in zip(kinds, gpus, strict=True):
                    row[kind] = size
                found.append(row)
    return np.array(found, dtype=float).reshape(len(found), len(there))
