"""Tensor parallelism under stragglers: ZERO-resizing, lightweight migration, and SEMI, which combines both.

The decisions alone, as functions of measured seconds; the trainer carries them out.
"""

from ballast_policies.planning.tensor_parallel.resizing import (
    keep_list,
    layer_ratio,
    longest_absence,
    resize_ratios,
    resized_seconds,
    updated_variation,
)
from ballast_policies.planning.tensor_parallel.semi import (
    LinearCost,
    MoveCosts,
    SemiDecision,
    decide_semi,
    fit_cost,
    helper_columns,
    mean_is_stale,
    migrated_share,
    migrating_stragglers,
    migration_gain,
    semi_seconds,
    stragglers,
)
from ballast_policies.planning.tensor_parallel.workload import (
    POLICIES,
    decide_workload,
    left_alone,
    measured_no_faster,
    own_work_seconds,
)

__all__ = [
    "POLICIES",
    "LinearCost",
    "MoveCosts",
    "SemiDecision",
    "decide_semi",
    "decide_workload",
    "fit_cost",
    "helper_columns",
    "keep_list",
    "layer_ratio",
    "left_alone",
    "longest_absence",
    "mean_is_stale",
    "measured_no_faster",
    "migrated_share",
    "migrating_stragglers",
    "migration_gain",
    "own_work_seconds",
    "resize_ratios",
    "resized_seconds",
    "semi_seconds",
    "stragglers",
    "updated_variation",
]
