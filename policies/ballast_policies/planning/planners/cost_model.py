"""The one cost model: seconds of a step and bytes of every GPU, for any layout of layers over GPUs.

Of stage i with layers l, tensor-parallel groups of t, r replicas, the speed s of its slowest GPU, b samples
a microbatch (k = b / the profile's), seconds of one microbatch:

    forward  = sum (k F_l / t + O_l) / s + (t - 1) / t k sum R_l / tensor link
    backward = sum (k B_l / t + P_l) / s + (t - 1) / t k sum R_l / tensor link  (+ forward of l recomputed)
    transfer = k output / link, to the next stage and back
    exchange = 2 (r - 1) / r sum W_l / t / data link                       once a step

where O and P are the parts of the forward and the backward that do not depend on b, and F and B the rest.
Where layers were measured by GPU type, tensor degree and microbatch size, forward and backward are what was
measured, of the stage's slowest type, and the update follows the exchange.
A step is a 1F1B step with a flush: the order is played exactly (:mod:`one_f_one_b`; the simulator where
stages have different numbers of replicas), and ends with the last exchange of gradients.

Bytes are those of :mod:`plan_memory`.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from ballast_policies.planning.gpu_profiles import GpuProfiles
from ballast_policies.planning.memory.measured_layers import PipelineForm
from ballast_policies.planning.memory.stage_bytes import ROUNDING, StageBytes
from ballast_policies.planning.partition import PlanningError, sums_of
from ballast_policies.planning.planners.layout import Devices, Groups, Layout
from ballast_policies.planning.planners.one_f_one_b import backward_ends, check_playable, step_of_many
from ballast_policies.planning.planners.plan_memory import PlanMemory
from ballast_policies.planning.profile import (
    LayerProfile,
    fullest_part,
    held_by_replica,
    repeated_layers,
    routed_both_ways,
    zero_shares,
)
from ballast_policies.planning.schedules.builders.synchronous import one_forward_one_backward_replicated
from ballast_policies.planning.schedules.costs import StageCosts
from ballast_policies.planning.schedules.registry import DEFAULT_SCHEDULE
from ballast_policies.planning.schedules.simulate import Trace, simulate


@dataclasses.dataclass(frozen=True, slots=True)
class StageGpus:
    """Properties of the GPUs of each stage: arrays of shape (p,), or (n, p) for n placements.

    ``boundary_link`` is of the link to the next stage, p - 1 values. ``types``: bit k for the k-th type.
    """

    speed: np.ndarray
    types: np.ndarray
    memory: np.ndarray
    tensor_link: np.ndarray
    data_link: np.ndarray
    boundary_link: np.ndarray

    def some(self, index: "np.ndarray | int") -> "StageGpus":
        """Some of several placements."""
        return StageGpus(**{f.name: getattr(self, f.name)[index] for f in dataclasses.fields(self)})

    @classmethod
    def together(cls, each: "Sequence[StageGpus]") -> "StageGpus":
        """Several placements as one value."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: np.stack([getattr(gpus, name) for gpus in each]) for name in names})


@dataclasses.dataclass(frozen=True, slots=True)
class Degrees:
    """Degrees that all stages share: tensor and data degree, samples and number of microbatches."""

    tensor: int
    data: int
    microbatch_size: int
    microbatches: int
    recompute: int = 0
    """``microbatches`` are of one pipeline; every ``recompute``-th layer repeats its forward, 0: none."""

    def layout(self, bounds: Sequence[int], groups: Iterable[Groups]) -> Layout:
        """The plan of stages cut at ``bounds``, 0 and L included, each on its ``groups``."""
        return Layout.of(
            bounds,
            groups,
            microbatch_size=self.microbatch_size,
            microbatches=self.microbatches * self.data,
            recompute=self.recompute,
        )


ZERO_HALVES = ((0, 0, 2), (0, 0, 2), (0, 1, 1), (1, 2, 0))
"""Halves of an all-reduce of weights in each forward, each backward and each step, by ZeRO stage.

A reduce-scatter or a gather takes half: gradients are scattered after each backward with ZeRO-2, and weights
gathered before each forward and backward with ZeRO-3.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of one microbatch, shape (n, p); ``transfer`` (n, p - 1); ``exchange`` once a step."""

    forward: np.ndarray
    backward: np.ndarray
    transfer: np.ndarray
    exchange: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Prediction of the model for a layout.

    Attributes:
        seconds: of a step.
        bytes: by stage, of each of its GPUs at the fullest moment, as the schedule is trained.
        fits: every GPU holds its stage.
    """

    seconds: float
    bytes: tuple[float, ...]
    fits: bool


RECOMPUTED = (0, 4, 2, 1)
"""Values that planners try: no layer repeats its forward, each fourth, each second, all."""


class CostModel:
    """The model for one profile and one cluster.

    Args:
        profile: layers, of one microbatch of ``microbatch_size`` samples on a GPU of speed 1.
        reduced_bytes: all-reduced by tensor parallelism, both ways together, shape (L,).
        microbatch_size: the profile's.
        devices: the GPUs.
        measured: the same layers by GPU type and degree, in place of the profile's seconds and the speeds.
        zero_stage: what replicas share, as ``parallelism.zeroStage``.

    Raises:
        PlanningError: replicas share what layers hold, and how much of it are weights is not known.
    """

    def __init__(
        self,
        profile: LayerProfile,
        reduced_bytes: tuple[float, ...],
        microbatch_size: int,
        devices: Devices,
        *,
        measured: GpuProfiles | None = None,
        zero_stage: int = 0,
    ) -> None:
        if zero_stage and any(profile.held_bytes) and not any(profile.weight_bytes):
            raise PlanningError(
                "layers hold bytes, and weightBytes does not say how many of them replicas gather. "
                "To fix: weightBytes, or --zero-stage 0"
            )
        self.zero_stage = zero_stage
        self.profile, self.devices, self.profiled_size = profile, devices, microbatch_size
        self.measured = measured
        self.layers = profile.layers
        outputs = profile.output_bytes
        forward, backward = np.asarray(profile.forward_seconds), np.asarray(profile.backward_seconds)
        whole = np.maximum(forward + backward, np.finfo(float).tiny)
        fixed = np.asarray(profile.overhead_seconds) * forward / whole
        fixed_backward = np.asarray(profile.overhead_seconds) * backward / whole
        self.F, self.B = sums_of(forward - fixed), sums_of(backward - fixed_backward)
        self.O, self.P = sums_of(fixed), sums_of(fixed_backward)
        self.W = sums_of(np.subtract(profile.weight_bytes, profile.expert_bytes))
        self.R, self.outputs = sums_of(reduced_bytes), np.asarray(outputs, dtype=float)
        self.memory = PlanMemory(profile, microbatch_size, measured, zero_stage)

    def stage_gpus(self, stages: tuple[Groups, ...]) -> StageGpus:
        """Speeds, memory and links of the GPUs of each stage."""
        devices = self.devices
        each = [[gpu for group in groups for gpu in group] for groups in stages]
        return StageGpus(
            speed=np.array([min(devices.speeds[gpu] for gpu in gpus) for gpus in each]),
            types=np.array(
                [sum({1 << devices.kinds.index(devices.types[gpu]) for gpu in gpus}) for gpus in each]
            ),
            memory=np.array([min(devices.memory[gpu] for gpu in gpus) for gpus in each]),
            tensor_link=np.array([min(devices.link(group) for group in groups) for groups in stages]),
            data_link=np.array(
                [min(devices.link(peers) for peers in zip(*groups, strict=True)) for groups in stages]
            ),
            boundary_link=np.array(
                [
                    min(devices.link(pair) for pair in _pairs(groups, following))
                    for groups, following in itertools.pairwise(stages)
                ],
                dtype=float,
            ),
        )

    def times(
        self, degrees: Degrees, gpus: StageGpus, bounds: np.ndarray, replicas: np.ndarray | None = None
    ) -> StageTimes:
        """Times of the stages.

        ``bounds``: of n partitions, shape (n, p + 1); ``replicas``: by stage, where they differ, (p,).
        """
        first, end = bounds[:, :-1], bounds[:, 1:]
        data = np.array(degrees.data) if replicas is None else replicas
        forward, backward, exchange = self._own_seconds(degrees, gpus, (first, end), data)
        scale = degrees.microbatch_size / self.profiled_size
        transfer = scale * self.outputs[end[:, :-1] - 1] / gpus.boundary_link
        return StageTimes(forward=forward, backward=backward, transfer=transfer, exchange=exchange)

    def layer_seconds(self, degrees: Degrees, gpus: StageGpus) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of each layer on each stage's GPUs: of a microbatch and after a step, (p, L) each.

        Transfers between stages are left out.
        """
        column = StageGpus(**{f.name: getattr(gpus, f.name)[:, None] for f in dataclasses.fields(gpus)})
        first = np.arange(self.layers)[None, :]
        data = np.array(degrees.data)
        forward, backward, exchange = self._own_seconds(degrees, column, (first, first + 1), data)
        return forward + backward, exchange

    def profiled(self, degrees: Degrees, types: np.ndarray) -> np.ndarray:
        """True, by placement, where all GPU types of the stages were measured at the degrees."""
        unknown = sum(
            1 << k
            for k, kind in enumerate(self.devices.kinds)
            if self.measured and self.measured.sums(kind, degrees.tensor, degrees.microbatch_size) is None
        )
        return np.asarray((types & unknown == 0).all(axis=-1))

    @property
    def no_degrees(self) -> str:
        """Reason that there is no plan, where none has degrees that divide the batch."""
        profiled, profiles = (
            ("", "") if self.measured is None else (" was profiled and", ", or more profiles")
        )
        return (
            f"no degree over {self.devices.count} GPUs{profiled} divides the batch. "
            f"To fix: another --batch-size{profiles}"
        )

    def _own_seconds(
        self, degrees: Degrees, gpus: StageGpus, layers: tuple[np.ndarray, np.ndarray], r: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Seconds of a microbatch forward and backward, and after a step; layers (first, end), r replicas."""
        (first, end), t = layers, degrees.tensor
        scale = degrees.microbatch_size / self.profiled_size
        half = (r - 1) / r * (self.W[end] - self.W[first]) / t / gpus.data_link
        in_forward, in_backward, in_step = ZERO_HALVES[self.zero_stage]
        exchange = in_step * half
        again = repeated_layers(self.layers, degrees.recompute)
        if self.measured is None:
            reduced = (t - 1) / t * scale * (self.R[end] - self.R[first]) / gpus.tensor_link
            F, B = scale / t * self.F + self.O, scale / t * self.B + self.P
            forward = (F[end] - F[first]) / gpus.speed + reduced
            backward = (B[end] - B[first]) / gpus.speed + reduced
            if degrees.recompute > 1:
                F, R = sums_of(again * np.diff(F)), sums_of(again * np.diff(self.R))
                reduced = (t - 1) / t * scale * (R[end] - R[first]) / gpus.tensor_link
                backward = backward + (F[end] - F[first]) / gpus.speed + reduced
        else:
            forward, backward, update = np.zeros((3, *np.broadcast_shapes(gpus.types.shape, end.shape)))
            for k, kind in enumerate(self.devices.kinds):
                sums = self.measured.sums(kind, t, degrees.microbatch_size)
                if sums is None:
                    continue
                if degrees.recompute > 1:
                    sums = np.stack([sums[0], sums[1] + sums_of(again * np.diff(sums[0])), sums[2]])
                there = gpus.types >> k & 1 == 1
                own = sums[:, end] - sums[:, first]
                slower = there & (own[0] + own[1] > forward + backward)
                forward, backward = np.where(slower, own[0], forward), np.where(slower, own[1], backward)
                update = np.where(there, np.maximum(update, own[2]), update)
            exchange = exchange + update
        backward = backward + forward if degrees.recompute == 1 else backward
        if any(self.profile.routed_bytes):
            routed = map(sums_of, routed_both_ways(self.profile.routed_bytes, again))
            once, repeated = (of[end] - of[first] for of in routed)
            each = (r - 1) / r * scale / gpus.data_link
            forward, backward = forward + each * once, backward + each * repeated
        return forward + in_forward * half, backward + in_backward * half, exchange

    def stage_bytes(self, degrees: Degrees, stages: int, schedule: str = DEFAULT_SCHEDULE) -> StageBytes:
        """Bytes of a GPU of any stage of pipelines of ``stages``."""
        form = PipelineForm(
            schedule=schedule,
            positions=stages,
            microbatches=degrees.microbatches,
            averaged=degrees.data > 1,
        )
        size, recompute = degrees.microbatch_size, degrees.recompute
        data = degrees.data if self.memory.shares else 1
        return self.memory.stage_bytes(form, degrees.tensor, size, recompute, data)

    def fits(
        self,
        degrees: Degrees,
        gpus: StageGpus,
        bounds: np.ndarray,
        schedule: str = DEFAULT_SCHEDULE,
    ) -> np.ndarray:
        """True, by partition, shape (n,), where every GPU holds its stage."""
        profiled = np.broadcast_to(self.profiled(degrees, gpus.types), len(bounds))
        if np.isinf(gpus.memory).all():
            return profiled
        stages = bounds.shape[1] - 1
        taken = self.stage_bytes(degrees, stages, schedule).taken(
            np.arange(stages), bounds[:, :-1], bounds[:, 1:]
        )
        return np.asarray(profiled & (taken <= gpus.memory * ROUNDING).all(axis=1))

    def step_seconds(self, degrees: Degrees, gpus: StageGpus, bounds: np.ndarray) -> np.ndarray:
        """Seconds of a step by partition, shape (n,); infinite where a GPU's memory is not enough."""
        times = self.times(degrees, gpus, bounds)
        ends = backward_ends(times.forward, times.backward, times.transfer, degrees.microbatches)
        seconds = (ends + times.exchange).max(axis=1)
        return np.where(self.fits(degrees, gpus, bounds), seconds, np.inf)

    def judge(self, layout: Layout, schedule: str = DEFAULT_SCHEDULE) -> StepCost:
        """Prediction of the model for any layout, also with different numbers of replicas.

        ``schedule``: that it is trained with, which its bytes depend on; the seconds are those of 1F1B.

        Raises:
            PlanningError: its GPU types were not all measured at its degrees.
        """
        if self.measured is not None:
            used = {self.devices.types[gpu] for stage in layout.stages for gpu in stage.gpus}
            self.measured.require(sorted(used), layout.tensor, layout.microbatch_size)
        bounds = np.array([layout.bounds])
        gpus = self.stage_gpus(tuple(stage.groups for stage in layout.stages))
        data = layout.data
        if data is not None and layout.microbatches % data == 0:
            degrees = Degrees(
                layout.tensor, data, layout.microbatch_size, layout.microbatches // data, layout.recompute
            )
            times = self.times(degrees, gpus, bounds)
            ends = backward_ends(times.forward, times.backward, times.transfer, degrees.microbatches)
            seconds = float((ends + times.exchange).max())
        else:
            seconds = step_of_many(
                lambda count: self.trace(dataclasses.replace(layout, microbatches=count)).makespan,
                layout.microbatches,
                ranks=sum(layout.replicas),
                period=math.lcm(*layout.replicas),
            )
        held = self.memory.of_layout(layout, schedule)
        return StepCost(
            seconds=seconds,
            bytes=tuple(held.tolist()),
            fits=bool((held <= gpus.memory * ROUNDING).all()),
        )

    def trace(self, layout: Layout) -> Trace:
        """The layout's step, played by the simulator; its ranks are tensor-parallel groups, stage by stage.

        Where all stages have as many replicas, one of the equal pipelines is played.

        Raises:
            PlanningError: it has too many microbatches to be played.
        """
        bounds = np.array([layout.bounds])
        gpus = self.stage_gpus(tuple(stage.groups for stage in layout.stages))
        replicas, count = layout.replicas, layout.microbatches
        data = layout.data
        if data is not None and count % data == 0:
            replicas, count = (1,) * layout.pipeline, count // data
        check_playable(sum(replicas), count)
        own = np.array([stage.replicas for stage in layout.stages])
        degrees = Degrees(layout.tensor, 1, layout.microbatch_size, 1, layout.recompute)
        times = self.times(degrees, gpus, bounds, own)
        return simulate(
            _schedule(replicas, count),
            StageCosts(
                forward=tuple(times.forward[0].tolist()),
                backward=tuple(times.backward[0].tolist()),
                update=tuple(times.exchange[0].tolist()),
                transfer=tuple(times.transfer[0].tolist()),
                serial_links=True,
            ),
        )

    def check_layers_fit(self, *, most_tensor: int = 1, smallest: int | None = None) -> None:
        """Refuse a layer that no GPU holds, however the model is cut.

        ``most_tensor``: GPUs a layer may be cut over; ``smallest``: microbatch size, None: the profile's.

        Raises:
            PlanningError: names the layer, what it needs, and what the largest GPU has.
        """
        scale = 1.0 if smallest is None else smallest / self.profiled_size
        largest = max(self.devices.memory)
        # More replicas than all GPUs do not share it.
        shares = zero_shares(self.zero_stage, self.devices.count)
        each = zip(
            self.profile.held_bytes,
            self.profile.weight_bytes,
            self.profile.activation_bytes,
            self.profile.expert_bytes,
            fullest_part(self.profile.experts, self.devices.count).tolist(),
            strict=True,
        )
        for layer, (whole, weights, activations, expert_bytes, part) in enumerate(each):
            kept = scale * activations
            held = float(
                held_by_replica(whole, weights, *shares, expert_bytes=expert_bytes, expert_part=part)
            )
            needed = (held + kept) / most_tensor
            # Of one microbatch, gradients are not there before the backward.
            least = held + max(0.0, kept - min(weights / shares[1], held))
            if least / most_tensor > largest * ROUNDING:
                digits = 3 if needed > 1.01 * largest else 12
                raise PlanningError(
                    f"layer {layer} needs {needed / 1e9:.{digits}g} GB, "
                    f"the largest GPU has {largest / 1e9:.{digits}g}"
                    + (f", also cut over {most_tensor} GPUs" if most_tensor > 1 else "")
                    + ". To fix: use GPUs with more memory, smaller microbatches or a smaller layer"
                )


_schedule = functools.lru_cache(maxsize=64)(one_forward_one_backward_replicated)


def _pairs(groups: Groups, following: Groups) -> list[tuple[int, int]]:
    """Pairs of sender and receiver: microbatch k of replica k mod r; each tensor rank to its counterpart."""
    rounds = np.lcm(len(groups), len(following))
    return sorted(
        {
            pair
            for k in range(int(rounds))
            for pair in zip(groups[k % len(groups)], following[k % len(following)], strict=True)
        }
    )
