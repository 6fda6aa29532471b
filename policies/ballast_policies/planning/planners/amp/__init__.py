"""AMP: tensor, data and pipeline degrees, placement and layers on unlike devices and links."""

from ballast_policies.planning.planners.amp.annealing import (
    Search,
    all_strategies,
    anneal,
    microbatch_sizes,
    sample_tiling,
    search,
    tilings,
)
from ballast_policies.planning.planners.amp.cost import (
    boundary_seconds,
    device_bytes,
    stage_bytes,
    stage_memory,
    stage_seconds,
    step_seconds,
    sync_seconds,
    with_best_layers,
)
from ballast_policies.planning.planners.amp.layers import assign_layers, pipeline_seconds
from ballast_policies.planning.planners.amp.model import DeviceGrid, LayerCost, Placement, Strategy

__all__ = [
    "DeviceGrid",
    "LayerCost",
    "Placement",
    "Search",
    "Strategy",
    "all_strategies",
    "anneal",
    "assign_layers",
    "boundary_seconds",
    "device_bytes",
    "microbatch_sizes",
    "pipeline_seconds",
    "sample_tiling",
    "search",
    "stage_bytes",
    "stage_memory",
    "stage_seconds",
    "step_seconds",
    "sync_seconds",
    "tilings",
    "with_best_layers",
]
