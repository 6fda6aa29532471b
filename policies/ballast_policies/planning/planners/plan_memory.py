"""Bytes of the GPUs of a plan: of launches and forecasts (:mod:`ballast_policies.planning.memory`).

With microbatches of k times the profile's samples, and tensor-parallel groups of t, of a layer with H bytes
held, W of weights, A of activations, G of gradients into the weights and an output of o, each GPU has

    H / t, W / t, k A / t, k G / t, k o

since an output is on every rank of a group; of H replicas may have a part each (ZeRO). A layer that is
recomputed has k times its input in place of k A / t, which is there while its backward runs. Where bytes
were measured at t and k, they count.
"""

import dataclasses
import functools

import numpy as np

from ballast_policies.planning.gpu_profiles import GpuProfiles
from ballast_policies.planning.memory.measured_layers import PipelineForm
from ballast_policies.planning.memory.rank_bytes import LayerSums
from ballast_policies.planning.memory.stage_bytes import StageBytes
from ballast_policies.planning.partition import Partition
from ballast_policies.planning.planners.layout import Layout
from ballast_policies.planning.profile import (
    LayerProfile,
    fullest_part,
    held_by_replica,
    recomputed_bytes,
    zero_shares,
)
from ballast_policies.planning.schedules.registry import DEFAULT_SCHEDULE, SCHEDULES
from ballast_policies.planning.schedules.schedule import ScheduleError


class PlanMemory:
    """Memory of plans of one profile, whose microbatches have ``profiled_size`` samples."""

    def __init__(
        self,
        profile: LayerProfile,
        profiled_size: int,
        measured: GpuProfiles | None = None,
        zero_stage: int = 0,
    ) -> None:
        self._profile, self._profiled_size, self._measured = profile, profiled_size, measured
        self.zero_stage = zero_stage
        self._sums = functools.lru_cache(maxsize=256)(self._found_sums)
        self.stage_bytes = functools.lru_cache(maxsize=2000)(self._stage_bytes)

    def of_layout(self, layout: Layout, schedule: str) -> np.ndarray:
        """Bytes of a GPU of each stage, shape (p,), as the schedule is trained."""
        form = form_of(layout, schedule)
        data = (layout.data or 1) if form.averaged and self.shares else 1
        found = self.stage_bytes(form, layout.tensor, layout.microbatch_size, layout.recompute, data)
        return found.of_cut(Partition(bounds=layout.bounds))

    @property
    def shares(self) -> bool:
        """True if replicas have a part each of something."""
        return bool(self.zero_stage) or any(self._profile.expert_bytes)

    def _stage_bytes(
        self, form: PipelineForm, tensor: int, size: int, recompute: int, data: int = 1
    ) -> StageBytes:
        """Bytes of stages of ``data`` pipelines of groups of ``tensor`` GPUs, of microbatches of ``size``."""
        _, gradients, weights = zero_shares(self.zero_stage, data)
        form = dataclasses.replace(form, gradient_shares=gradients, weights_shared=weights > 1)
        return StageBytes(self._sums(tensor, size, recompute, data), form)

    def _found_sums(self, tensor: int, size: int, recompute: int, data: int) -> LayerSums:
        profile, scale = self._profile, size / self._profiled_size
        rows = None if self._measured is None else self._measured.rows(tensor, size)
        if rows is not None:
            profile, scale, tensor = LayerProfile.of(rows), 1.0, 1
        outputs = scale * np.asarray(profile.output_bytes, dtype=float)
        kept = scale * np.asarray(profile.activation_bytes, dtype=float) / tensor
        repeated = scale * np.asarray(profile.repeated_bytes, dtype=float) / tensor
        kept, repeated = recomputed_bytes(kept, repeated, outputs, recompute)
        shares, experts = zero_shares(self.zero_stage, data), np.asarray(profile.expert_bytes, dtype=float)
        part = fullest_part(profile.experts, data)
        held = held_by_replica(
            profile.held_bytes, profile.weight_bytes, *shares, expert_bytes=experts, expert_part=part
        )
        return LayerSums(
            held=held / tensor,
            weights=(profile.weight_bytes - experts + experts * part) / tensor,
            activations=kept,
            outputs=outputs,
            repeated=repeated,
            gradients=scale * np.asarray(profile.gradient_bytes, dtype=float) / tensor,
            experts=experts * part / tensor,
        )


def form_of(layout: Layout, schedule: str = DEFAULT_SCHEDULE) -> PipelineForm:
    """The pipeline that a layout is trained as: replicas are of the whole pipeline where they can be."""
    data = None if replicas_by_stage(layout, schedule) else layout.data
    return PipelineForm(
        schedule=schedule,
        positions=layout.pipeline,
        microbatches=layout.microbatches // (data or 1),
        replicas=layout.replicas if data is None else (),
        averaged=data is not None and data > 1,
    )


def replicas_by_stage(layout: Layout, schedule: str) -> bool:
    """True if a TrainingJob lists the layout's replicas stage by stage.

    Where stages have different numbers of them, where whole pipelines cannot share the microbatches evenly,
    and where whole pipelines would have a flush that the schedule does without.
    """
    if layout.data is None or layout.microbatches % layout.data:
        return True
    kind = SCHEDULES.find(schedule, ScheduleError)
    without_flush = kind.asynchronous and kind.build_replicated is not None and layout.tensor == 1
    return without_flush and layout.data > 1
