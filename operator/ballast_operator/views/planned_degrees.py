"""The degrees of a job with ``planner`` on the GPUs that it may have: what the planner answers."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from ballast_policies.allocation.planned_gangs import (
    MOST_PLANS,
    LivePlans,
    PlannedGang,
    ShapePlan,
    TensorProfile,
)
from ballast_policies.contract.errors import ContractError, Problem
from ballast_policies.contract.job.pipeline import PlanConfig
from ballast_policies.planning.partition import Partition
from ballast_policies.planning.planners.best.placements import divisors
from ballast_policies.planning.planners.cost_model import Degrees
from ballast_policies.planning.schedules.registry import DEFAULT_SCHEDULE
from ballast_policies.rounds.gangs import TypesByRank
from ballast_policies.scheduling.gang_spec import MOST_SIZES, thinned

from ballast_operator.api.job_allocation import LaunchDegrees
from ballast_operator.api.training_job import PlannerConfig
from ballast_operator.api.training_job_status import MOST_RATIO, MeasuredOnType

MOST_LOOKED_AT = 2_000
"""GPU types x sizes of which those are chosen where they are left out; of more, some in between are not."""

MOST_TYPES = 3
"""GPU types that a gang may have at once."""

MOST_MIXES = 256
"""GPUs of two types that a job is planned for, and of three; of more, some in between are left out."""

MOST_SLOWER = 0.05
"""Part by which a step may be longer where a gang has another size without a restart, by its degrees."""

MOST_PLANNED = 500_000
"""GPU types x sizes x profiles x the square of the layers of a job that is planned: a second of CPU."""

MOST_CUT = 200_000_000
"""Work of cutting such a job's plans, as :meth:`PlannedGang.listed` counts it: up to four more seconds."""

MEASURED_CHANGE = 0.15
"""Part by which a layer's seconds differ from those that a plan is made from, of its own or the mean layer's,
whichever are more, where a plan is asked for anew: two runs of one step were up to 14 % apart
(lab/docs/sailor.md)."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedLaunch:
    """Division of the work of a launch on some GPUs; ``memory``: bytes of the fullest GPU of each type."""

    degrees: LaunchDegrees
    memory: tuple[float, ...]

    @classmethod
    def of(cls, degrees: LaunchDegrees) -> "PlannedLaunch":
        """Launch on GPUs of one type."""
        return cls(degrees=degrees, memory=(degrees.memory_bytes,))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DegreesQuestion:
    """Input of the planning of a job's degrees.

    Attributes:
        batch_size: samples of a step.
        fewest, most: GPUs that it may have, in pods of ``per_pod``.
        mixes: also of several types at once.
        zero_stage: what replicas share.
        measured: of the layers, against what ``planner`` states, the newest last.
    """

    planner: PlannerConfig
    batch_size: int
    fewest: int
    most: int
    per_pod: int
    mixes: bool
    zero_stage: int = 0
    measured: tuple[MeasuredOnType, ...] = ()

    @functools.cached_property
    def layers(self) -> int:
        """Layers of the model, as its first profile has them."""
        return sum(layer.repeat for layer in self.planner.profiles[0].layers)

    @functools.cached_property
    def stated(self) -> Mapping[int, TensorProfile]:
        """Tensor degree -> the layers as the planner states them."""
        return {
            each.tensor: TensorProfile(
                tensor=each.tensor, microbatch_size=each.microbatch_size, layers=each.layers
            )
            for each in self.planner.profiles
        }

    @functools.cached_property
    def slower_types(self) -> Mapping[str, float]:
        """GPU type that was measured -> seconds of a step there over those of :meth:`ratios`."""
        last = {one.gpu_type: one for one in self.measured}
        found = {}
        for gpu_type, one in last.items():
            stated = self.stated[one.tensor].seconds(1, recompute=0)
            here, by_tensor = stated @ one.ratios, stated @ self.ratios(one.tensor)
            found[gpu_type] = float(here / by_tensor) if here > 0 and by_tensor > 0 else 1.0
        return found

    def ratios(self, tensor: int) -> tuple[float, ...]:
        """Seconds of each layer at a tensor degree over those stated: as measured last, at best with that.

        They are of the layers, and count for GPU types that were not measured as well.
        """
        known = [one for one in self.measured if one.tensor == tensor] or self.measured
        return known[-1].ratios if known else (1.0,) * self.layers

    @functools.cached_property
    def _most_shapes(self) -> int:
        """Number of GPUs for which it may be planned. Raises ContractError: for too few."""
        profiles, types = self.planner.profiles, len(self.planner.gpus)
        layers = max(sum(layer.repeat for layer in profile.layers) for profile in profiles)
        most, least = MOST_PLANNED // (len(profiles) * layers**2), 2 * types * self._numbers_of_types
        if most < least:
            what = f"profiles: {len(profiles)} and gpus: {types}"
            reason = f"{layers} layers are too many for {what}{' with mixedPools' if self.mixes else ''}"
            raise ContractError(Problem("planner", f"{reason}. To fix: fewer of them, or state the degrees"))
        return max(least, min(most, self._most_listed))

    @property
    def _most_listed(self) -> int:
        """Number of GPUs for which it may have all degrees tried."""
        return MOST_PLANS // (len(divisors(self.batch_size)) ** 2 * len(self.planner.profiles))

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of GPUs of one type alone. Raises ContractError: there are too many layers for them."""
        most = min(self._most_shapes // (len(self.planner.gpus) * self._numbers_of_types), MOST_SIZES)
        whole = range(self.fewest, self.most + 1, self.per_pod)
        if len(whole) <= most:
            return tuple(whole)
        return tuple(thinned(self._of_use(whole) or whole, most))

    def _of_use(self, sizes: Sequence[int], *, limited: bool = True) -> tuple[int, ...]:
        """Sizes at which a step is shorter than at all smaller ones; unless ``limited``, in any memory."""
        looked_at = thinned(
            sizes, max(MOST_SIZES, min(self._most_listed, MOST_LOOKED_AT) // len(self.planner.gpus))
        )
        gang = self.gang(tuple(looked_at), limited=limited)
        return gang.sizes_of_use(dict.fromkeys(gang.speeds, self.most), MOST_CUT / 4)

    @functools.cached_property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        """GPUs of each of two types, and of three; more types than fit: none. Raises as :meth:`sizes`."""
        found = list[tuple[int, ...]]()
        for types in range(2, 1 + self._numbers_of_types):
            choices = math.comb(len(self.planner.gpus), types)
            most = min(self._most_shapes // self._numbers_of_types, MOST_MIXES) / choices
            most_listed = self._most_listed / self._numbers_of_types / choices
            if types > 2 and 2**types > min(most, most_listed):
                break
            whole = range(self.per_pod, self.most + 1 - (types - 1) * self.per_pod, self.per_pod)
            sizes, each = tuple(whole), min(len(whole), MOST_SIZES)
            if each**types > most_listed or self._mixes(thinned(sizes, each), types) > most:
                sizes = self._of_use(sizes, limited=False) or sizes
            while each > 2 and (each**types > most_listed or self._mixes(thinned(sizes, each), types) > most):
                each -= 1
            if whole:
                found.append(tuple(thinned(sizes, max(2, each))))
        return tuple(found)

    @property
    def _numbers_of_types(self) -> int:
        return min(MOST_TYPES, len(self.planner.gpus)) if self.mixes else 1

    def _mixes(self, sizes: Sequence[int], types: int) -> int:
        """Number of combinations of these sizes with no more GPUs than it may have."""
        together = functools.reduce(np.add.outer, [np.array(sizes)] * types)
        return int(((together >= self.fewest) & (together <= self.most)).sum())

    def news(
        self, types: Sequence[str], degrees: LaunchDegrees, seconds: Sequence[float]
    ) -> Mapping[str, tuple[float, ...]]:
        """GPU type -> of each layer, seconds over those stated; empty: they are no news, or no measurement.

        Of several types, each one's layers together are what tells the types apart, and what they differ in
        beside that counts for all types.

        ``types``: where each layer was measured. ``seconds``: of each layer, forward and backward, of a
        rank's step.
        """
        speeds = {gpu.gpu_type: gpu.speed for gpu in self.planner.gpus}
        profile, own_types = self.stated.get(degrees.tensor), dict.fromkeys(types)
        if profile is None or not len(types) == len(seconds) == self.layers or not any(seconds):
            return {}
        if not own_types.keys() <= speeds.keys():
            return {}
        microbatch_size = self.batch_size / degrees.microbatches
        stated = profile.seconds(microbatch_size, recompute=degrees.repeated) / [speeds[t] for t in types]
        took = np.divide(seconds, max(1, degrees.microbatches // degrees.data))
        ratios = np.divide(took, stated, out=np.ones_like(took), where=stated > 0)
        known = stated * self.ratios(degrees.tensor)
        slower = {t: self.slower_types.get(t, 1.0) for t in own_types}
        used = known * [slower[t] for t in types]
        news = abs(took - used) > MEASURED_CHANGE * np.maximum(used, used.mean())
        if not news[stated > 0].any():
            return {}
        for of_type in own_types:
            of = np.array(types) == of_type
            if took[of].sum() > 0 and known[of].sum() > 0:
                slower[of_type] = float(took[of].sum() / known[of].sum())
        alike = ratios / [slower[t] for t in types]
        found = {t: alike * slower[t] for t in own_types}
        if max(each.max() for each in found.values()) > MOST_RATIO:
            return {}
        return {t: tuple(float(f"{ratio:.3g}") for ratio in each) for t, each in found.items()}

    def gang(
        self, sizes: tuple[int, ...], parts: tuple[tuple[int, ...], ...] = (), *, limited: bool = True
    ) -> PlannedGang:
        """Its plans on numbers of GPUs of one type, and on ``parts`` of two types, of three.

        Unless ``limited``, whatever the memory.

        Raises:
            ContractError: nothing can be planned.
        """
        planner = self.planner
        try:
            return PlannedGang(
                profiles=self.profiles,
                speeds=self.speeds,
                batch_size=self.batch_size,
                sizes=sizes,
                part_sizes=parts,
                most_types=1 + len(parts),
                fewest_gpus=self.fewest if parts else sizes[0],
                most_gpus=self.most,
                memory_bytes={gpu.gpu_type: gpu.memory_bytes for gpu in planner.gpus if limited},
                bandwidth=planner.bandwidth,
                zero_stage=self.zero_stage,
                both_orders=True,
            )
        except ContractError as error:
            reason = "; ".join(problem.reason.partition(". To fix")[0] for problem in error.problems)
            fix = "profiles of one model; other minStages, maxStages or globalBatchSize"
            raise ContractError(Problem("planner", f"{reason}. To fix: {fix}")) from None

    def plans_with(
        self, gpu_type: str, degrees: LaunchDegrees, best: Mapping[int, LaunchDegrees]
    ) -> dict[int, LaunchDegrees]:
        """GPUs -> the plan for a gang with these degrees that keeps them, where it is nearly the ``best``."""
        if degrees.tensor not in self.stated or gpu_type not in self.speeds:
            return {}
        per_replica, rest = divmod(degrees.microbatches, degrees.data)
        size, left = divmod(self.batch_size, degrees.microbatches)
        if rest or left or not best or degrees.schedule != DEFAULT_SCHEDULE:
            return {}
        kept = Degrees(degrees.tensor, degrees.data, size, per_replica, degrees.repeated)
        gang, found = self.gang(tuple(best)), {}
        for gpus, fastest in best.items():
            plan = gang.plan_with(kept, gpu_type, gpus)
            if plan is not None and plan.seconds <= fastest.step_seconds * (1 + MOST_SLOWER):
                found[gpus] = _launch(((gpu_type, gpus),), plan, fastest.measured_on).degrees
        return found

    @functools.cached_property
    def profiles(self) -> tuple[TensorProfile, ...]:
        """The layers as stated, or slowed to what was measured.

        Raises:
            ContractError: a layer takes too long.
        """
        stated = self.stated.values()
        return tuple(each.slowed(self.ratios(each.tensor)) if self.measured else each for each in stated)

    @functools.cached_property
    def speeds(self) -> Mapping[str, float]:
        """GPU type -> its speed, relative to what the profiles are of."""
        return {
            gpu.gpu_type: gpu.speed / self.slower_types.get(gpu.gpu_type, 1.0) for gpu in self.planner.gpus
        }


@functools.lru_cache(maxsize=256)
def planned_degrees(question: DegreesQuestion) -> Mapping[TypesByRank, tuple[PlannedLaunch, ...]]:
    """GPUs -> how a launch there divides the work, the fastest first.

    Those without a plan are left out, and those whose best plan is no faster than one of some of them.

    The first is for GPUs of each type in one pool; of one type alone, those after it have fewer GPUs for each
    stage, for several pools.

    Kept for the next edit of the job, and for others that differ elsewhere: it may take seconds.

    Raises:
        ContractError: nothing can be planned.
    """
    sizes, gang = question.sizes, question.gang(question.sizes, question.parts)
    listed = gang.listed(dict.fromkeys(gang.speeds, question.most), MOST_CUT)
    if not listed:
        of = f"its GPUs, {sizes[0]} to {sizes[-1]} of a type. To fix:"
        reason = f"no plan fits the memory of {of} GPUs with more memory, or other minStages and maxStages"
        if listed is None:
            reason = f"too many plans to try for {of} other minStages and maxStages"
        raise ContractError(Problem("planner", reason))
    in_parts = [one for one in listed if question.mixes and len(one.gpus) == 1]
    measured_on = tuple(dict.fromkeys(one.gpu_type for one in question.measured))
    found = {}
    for one in listed:
        more = gang.plans_in_parts(one, MOST_CUT / 4 / len(in_parts)) if one in in_parts else ()
        gpus = tuple(one.gpus.items())
        found[gpus] = tuple(_launch(gpus, plan, measured_on) for plan in (gang.plan_of(one), *more))
    return found


@functools.lru_cache(maxsize=256)
def candidates(
    question: DegreesQuestion,
    gpus: TypesByRank,
    planned: LaunchDegrees,
    schedules: tuple[str, ...],
    most: int,
    memory: float,
    recomputed: tuple[int, ...] = (),
) -> tuple[LaunchDegrees, ...]:
    """Plans with the degrees of ``planned``, of 1F1B, as :meth:`PlannedGang.scheduled` has them.

    They repeat as many forwards as ``planned``, or as ``recomputed`` says; their microbatches are its own, of
    which others would sum gradients in another order. ``memory``: bytes of each GPU where they are, which may
    be less than the planner states.
    """
    of_replica = planned.microbatches // planned.data
    size = question.batch_size // planned.microbatches
    degrees = Degrees(planned.tensor, planned.data, size, of_replica, planned.repeated)
    cut = PlanConfig(layers=planned.layers)
    gang = question.gang((sum(count for _, count in gpus),))
    limits = {name: min(memory, gang.memory_bytes.get(name, math.inf)) for name in gang.speeds}
    gang = dataclasses.replace(
        gang, memory_bytes={name: has for name, has in limits.items() if has < math.inf}
    )
    asked = LivePlans(degrees, Partition(bounds=cut.bounds), gpus, schedules, most, recomputed)
    return tuple(
        planned.replace(
            schedule=one.form.schedule,
            recompute=one.degrees.recompute > 0,
            recompute_every=max(1, one.degrees.recompute),
            layers=tuple(np.diff(one.cut.bounds).tolist()),
            step_seconds=one.seconds,
            memory_bytes=max(one.memory_bytes),
        )
        for one in gang.scheduled(asked)
    )


def _launch(gpus: TypesByRank, found: ShapePlan, measured_on: tuple[str, ...]) -> PlannedLaunch:
    degrees, taken = found.degrees, found.memory_bytes
    stages = (count // (degrees.tensor * degrees.data) for _, count in gpus)
    ends = itertools.accumulate(stages, initial=0)
    return PlannedLaunch(
        degrees=LaunchDegrees(
            tensor=degrees.tensor,
            data=degrees.data,
            microbatches=degrees.microbatches * degrees.data,
            recompute=degrees.recompute > 0,
            recompute_every=max(1, degrees.recompute),
            layers=tuple(np.diff(found.cut.bounds).tolist()),
            step_seconds=found.seconds,
            memory_bytes=max(taken),
            measured_on=measured_on,
        ),
        memory=tuple(max(taken[first:end]) for first, end in itertools.pairwise(ends)),
    )
