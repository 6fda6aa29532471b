"""Which layers on which stage, which stage on which rank; numpy only, for a small trainer image."""

from ballast_policies.planning.diffusion import diffuse
from ballast_policies.planning.moves import Move, moves_between
from ballast_policies.planning.partition import (
    Partition,
    PlanningError,
    even_partition,
    exact_partition,
    imbalance,
    speed_up_ceiling,
)
from ballast_policies.planning.rebalance import RebalanceDecision, decide_rebalance
from ballast_policies.planning.repack import RepackDecision, repack
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
    "RebalanceDecision",
    "RepackDecision",
    "bubble",
    "decide_rebalance",
    "diffuse",
    "even_partition",
    "exact_partition",
    "fitted_action_seconds",
    "imbalance",
    "moves_between",
    "predict_step_seconds",
    "repack",
    "simulated_step_seconds",
    "speed_up_ceiling",
]
