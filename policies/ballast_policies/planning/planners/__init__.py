"""Whole plans: replicated stages (PipeDream), 2BW, pipeline x tensor x data (PTD-P), AMP."""

from ballast_policies.planning.planners.pipedream import Level, PipeDreamPlan, ReplicatedStage, plan_pipedream
from ballast_policies.planning.planners.ptdp import (
    PtdPlan,
    Transformer,
    best_checkpoints,
    checkpointed_bytes,
    data_parallel_elements,
    pipeline_elements,
    plan_ptdp,
    scattered_pipeline_elements,
    step_seconds,
    tensor_parallel_elements,
    training_seconds,
)
from ballast_policies.planning.planners.two_versions import (
    BlockModel,
    GpuServers,
    TwoVersionPlan,
    gpipe_memory_bytes,
    memory_bytes,
    microbatch_seconds,
    plan_two_versions,
)

__all__ = [
    "BlockModel",
    "GpuServers",
    "Level",
    "PipeDreamPlan",
    "PtdPlan",
    "ReplicatedStage",
    "Transformer",
    "TwoVersionPlan",
    "best_checkpoints",
    "checkpointed_bytes",
    "data_parallel_elements",
    "gpipe_memory_bytes",
    "memory_bytes",
    "microbatch_seconds",
    "pipeline_elements",
    "plan_pipedream",
    "plan_ptdp",
    "plan_two_versions",
    "scattered_pipeline_elements",
    "step_seconds",
    "tensor_parallel_elements",
    "training_seconds",
]
