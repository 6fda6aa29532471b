"""Rounds: from shares of time to gangs on nodes, again every few minutes."""

from ballast_policies.rounds.account import Account, advance
from ballast_policies.rounds.decide import decide_round
from ballast_policies.rounds.values import (
    Gang,
    Node,
    Placement,
    Round,
    RoundSettings,
    RoundState,
)

__all__ = [
    "Account",
    "Gang",
    "Node",
    "Placement",
    "Round",
    "RoundSettings",
    "RoundState",
    "advance",
    "decide_round",
]
