"""PTD-P: pipeline x tensor x data parallel training of one transformer on equal servers."""

from ballast_lab.ptdp.communication import (
    data_parallel_elements,
    pipeline_elements,
    scattered_pipeline_elements,
    tensor_parallel_elements,
)
from ballast_lab.ptdp.plans import GpuServers, PtdPlan, efficiency, plan_ptdp
from ballast_lab.ptdp.transformer import (
    Transformer,
    best_checkpoints,
    checkpointed_bytes,
    step_seconds,
    training_seconds,
)

__all__ = [
    "GpuServers",
    "PtdPlan",
    "Transformer",
    "best_checkpoints",
    "checkpointed_bytes",
    "data_parallel_elements",
    "efficiency",
    "pipeline_elements",
    "plan_ptdp",
    "scattered_pipeline_elements",
    "step_seconds",
    "tensor_parallel_elements",
    "training_seconds",
]
