"""Rules of ``parallelism.gpusPerPod``: a job's ranks fill whole pods, and a tensor group is in one pod."""

from typing import Any

from ballast_policies.contract.conditions import at, one_is_not
from ballast_policies.contract.job.parallelism import ParallelismConfig
from ballast_policies.contract.job.pipeline import PipelineConfig
from ballast_policies.contract.rules import Rule

_COLUMN = at("parallelism.tensor") * at("parallelism.data")
_FIELD = "parallelism.gpus_per_pod"


def _whole_pod_stages(pipeline: PipelineConfig, parallelism: ParallelismConfig) -> tuple[int, ...]:
    """Numbers of stages, from ``minStages`` to ``maxStages``, whose ranks fill whole pods."""
    most = pipeline.max_stages or max(pipeline.min_stages, parallelism.ranks_per_pod)
    return tuple(
        stages
        for stages in range(pipeline.min_stages, most + 1)
        if stages * parallelism.ranks_per_position % parallelism.ranks_per_pod == 0
    )


def _fills_pods(config: Any) -> bool:
    pipeline: PipelineConfig = config.pipeline
    parallelism: ParallelismConfig = config.parallelism
    if pipeline.used_replicas:
        return sum(pipeline.used_replicas) % parallelism.ranks_per_pod == 0
    return bool(_whole_pod_stages(pipeline, parallelism))


def _explain_partial_pods(config: Any) -> str:
    pipeline, parallelism = config.pipeline, config.parallelism
    pods = f"pods of gpusPerPod: {parallelism.ranks_per_pod}"
    if pipeline.used_replicas:
        return f"the {sum(pipeline.used_replicas)} ranks of pipeline.replicas do not fill {pods}"
    return (
        f"no number of stages from minStages: {pipeline.min_stages} to maxStages: {pipeline.max_stages}, "
        f"with {parallelism.ranks_per_position} ranks each, fills {pods}"
    )


POD_RULES = (
    Rule(
        condition=(at(_FIELD) == 1) | (at(_FIELD) % at("parallelism.tensor") == 0),
        field=_FIELD,
        reason="gpusPerPod is not a multiple of parallelism.tensor: a tensor group stays inside a pod",
        fix="choose a multiple of tensor, or 1 for groups over the network",
    ),
    Rule(
        condition=one_is_not("pipeline.replicas", 1) | (at(_FIELD) <= at("pipeline.max_stages") * _COLUMN),
        field=_FIELD,
        reason="a pod has more GPUs than the largest gang has ranks",
        fix="lower gpusPerPod, or raise pipeline.maxStages",
    ),
    Rule(
        condition=at("repack.target_stages") * _COLUMN % at(_FIELD) == 0,
        field="repack.target_stages",
        reason="the ranks of repack.targetStages do not fill whole pods of gpusPerPod, and a part of a pod "
        "cannot be released",
        fix="choose targetStages so that its ranks are a multiple of gpusPerPod",
    ),
    # CEL has no ranges of numbers.
    Rule(
        condition=_fills_pods,
        field=_FIELD,
        reason="the ranks do not fill whole pods",
        fix="choose gpusPerPod so that a number of ranks that the job may have is a multiple of it",
        explain=_explain_partial_pods,
    ),
)
