"""Rounds: from shares of time to gangs on nodes, again every few minutes."""

from ballast_policies.rounds.account import Account, advance
from ballast_policies.rounds.decide import decide_round
from ballast_policies.rounds.memory import RoundMemory
from ballast_policies.rounds.packing import in_whole_pods
from ballast_policies.rounds.spot_limits import SpotLimits, decide_within_limits
from ballast_policies.rounds.values import (
    Node,
    Placement,
    PoolPart,
    Round,
    RoundSettings,
    RoundState,
    mixed_name,
)

__all__ = [
    "Account",
    "Node",
    "Placement",
    "PoolPart",
    "Round",
    "RoundMemory",
    "RoundSettings",
    "RoundState",
    "SpotLimits",
    "advance",
    "decide_round",
    "decide_within_limits",
    "in_whole_pods",
    "mixed_name",
]
