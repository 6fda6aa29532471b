"""Planning of a pipeline: which layers on which stage, which stage on which rank. Needs numpy only."""

from ballast_policies.planning.balancers.exact import exact_partition
from ballast_policies.planning.diffusion import diffuse
from ballast_policies.planning.partition import (
    Move,
    Partition,
    PlanningError,
    even_partition,
    imbalance,
    moves_between,
    speed_up_ceiling,
)
from ballast_policies.planning.rank_capacity import RankCapacity
from ballast_policies.planning.rebalance import RebalanceDecision, decide_rebalance
from ballast_policies.planning.repack import RepackDecision, kept_positions, repack
from ballast_policies.planning.step_time import (
    bubble,
    fitted_action_seconds,
    predict_step_seconds,
    simulated_step_seconds,
)

__all__ = [
    "Move",
    "Partition",
    "PlanningError",
    "RankCapacity",
    "RebalanceDecision",
    "RepackDecision",
    "bubble",
    "decide_rebalance",
    "diffuse",
    "even_partition",
    "exact_partition",
    "fitted_action_seconds",
    "imbalance",
    "kept_positions",
    "moves_between",
    "predict_step_seconds",
    "repack",
    "simulated_step_seconds",
    "speed_up_ceiling",
]
