"""How many GPUs a job's gang asks for, whether it may grow, and whether any pool can hold it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ballast_policies.contract import ContractError
from ballast_policies.contract.decode import decode_text
from ballast_policies.contract.limits import OBJECT

from ballast_operator.api.cluster_policy import NodePool
from ballast_operator.api.conditions import JobReason
from ballast_operator.views.clock import Time
from ballast_operator.views.job import JobView
from ballast_operator.views.spec import JobSpec

GROWTH_PAUSE_SECONDS = 60.0
"""Between two growths of a gang, or tries."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a job is not in the problem at all."""

    reason: str
    message: str


def most_gpus(view: JobView) -> int:
    """Most GPUs that the job wants.

    After a repack, no more than the ranks it kept: its model stays smaller.
    """
    spec = view.spec
    assert spec is not None
    wanted = spec.largest_gang
    if view.status.repacks:
        last = view.status.repacks[-1]
        kept = len(last.survivors) if last.gpus is None else last.gpus
        # gpusPerPod may have been changed since.
        wanted = min(wanted, -(-kept // spec.gpus_per_pod) * spec.gpus_per_pod)
    return wanted


def may_grow(view: JobView, now: Time) -> bool:
    """Whether the gang trains, wants more GPUs, and has not just tried to get some."""
    allocation, spec = view.status.allocation, view.spec
    if allocation is None or spec is None or not spec.grow or not view.acknowledged or view.shrinking:
        return False
    if allocation.joining or allocation.gpus >= most_gpus(view) or not _same_recipe(view, spec):
        return False
    return (
        allocation.joining_since is None
        or (now - allocation.joining_since).total_seconds() >= GROWTH_PAUSE_SECONDS
    )


def _same_recipe(view: JobView, spec: JobSpec) -> bool:
    """Whether new pods would train with the configuration that the gang was launched with.

    Most changes of a spec take effect at the next launch; ranks do not read how many
    stages the gang may have.
    """
    try:
        launched = decode_text(dict[str, Any], view.plan_config, limits=OBJECT)
    except ContractError:  # someone has changed the ConfigMap
        return False
    return _recipe(launched) == _recipe(spec.config_fields)


def _recipe(config: Mapping[str, Any]) -> dict[str, Any]:
    pipeline = config.get("pipeline")
    if not isinstance(pipeline, Mapping):
        return dict(config)
    return {**config, "pipeline": {k: v for k, v in pipeline.items() if k not in ("minStages", "maxStages")}}


def gang_size(
    view: JobView, pools: Sequence[NodePool], by_pool: Mapping[str, int], allowed: Sequence[str]
) -> int:
    """Most ranks that the job can use, one of its pools has, and its schedule supports.

    Never below ``minStages``, even if that exceeds the pools or the schedule; see :func:`admission_error`.
    """
    spec = view.spec
    assert spec is not None
    wanted = most_gpus(view)
    largest = max((by_pool[pool.name] for pool in pools if pool.gpu_type in allowed), default=0)
    fewest, most = max(1, min(spec.smallest_gang, wanted)), min(wanted, largest)
    return next((size for size in range(most, fewest - 1, -1) if spec.suits(size)), fewest)


def growth_sizes(view: JobView) -> tuple[int, ...]:
    """Sizes that the gang could grow to, fewest first."""
    spec, allocation = view.spec, view.status.allocation
    assert spec is not None and allocation is not None
    return tuple(size for size in range(allocation.gpus + 1, most_gpus(view) + 1) if spec.suits(size))


def admission_error(
    spec: JobSpec, pools: Sequence[NodePool], by_pool: Mapping[str, int], allowed: Sequence[str], size: int
) -> Refusal | None:
    """Why no round of this policy can place the job; None: one can."""
    have = ", ".join(sorted({pool.gpu_type for pool in pools}))
    pipeline = spec.config.pipeline
    if spec.smallest_gang > spec.largest_gang:
        each = f" with {spec.stages_per_rank} stages each" if spec.stages_per_rank > 1 else ""
        each += f" in pods of gpusPerPod={spec.gpus_per_pod}" if spec.gpus_per_pod > 1 else ""
        return Refusal(
            reason=JobReason.MISCONFIGURED,
            message=f"pipeline.minStages={pipeline.min_stages}{each} exceeds "
            f"model.layers={spec.layers}. To fix: lower minStages",
        )
    if not allowed:
        return Refusal(
            reason=JobReason.NO_MATCHING_GPU_TYPE,
            message=f"gpuTypes allows {', '.join(spec.gpu_types)}; the node pools have {have}. "
            "To fix: add one of these to gpuTypes, or a pool to the ClusterPolicy",
        )
    if not spec.suits(size):
        return Refusal(
            reason=JobReason.MISCONFIGURED,
            message=f"pipeline.microbatches={pipeline.microbatches} is not divisible by {size} ranks, "
            f"required by {pipeline.schedule}. To fix: set a multiple of the number of ranks",
        )
    largest = {pool.name: by_pool[pool.name] for pool in pools if pool.gpu_type in allowed}
    if max(largest.values(), default=0) < size:
        sizes = ", ".join(f"{name} {count}" for name, count in sorted(largest.items()))
        per_pod = spec.gpus_per_pod
        pods = f" in pods of gpusPerPod={per_pod}, each on one node" if per_pod > 1 else ""
        have = "have room for" if pods else "have"
        lower = "pipeline.minStages or gpusPerPod" if pods else "pipeline.minStages"
        return Refusal(
            reason=JobReason.EXCEEDS_CAPACITY,
            message=f"needs {size} GPUs of one pool{pods}; its pools {have}: {sizes}. "
            f"To fix: lower {lower}, or add nodes",
        )
    return None
