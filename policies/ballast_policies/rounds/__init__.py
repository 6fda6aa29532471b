"""Rounds: from shares of time to gangs on nodes, again every few minutes."""

from ballast_policies.rounds.decide import decide_round
from ballast_policies.rounds.divisions import best_parts, mixtures, with_mixtures
from ballast_policies.rounds.gangs import (
    ElasticGang,
    MixedGang,
    SharedGpus,
    SharingJob,
    SizeSettings,
    SpreadGang,
)
from ballast_policies.rounds.ledger import in_whole_pods
from ballast_policies.rounds.memory import (
    Account,
    RoundMemory,
    advance,
    extra_nodes,
    kept_ranks,
    resize_cooldown_seconds,
    stays,
)
from ballast_policies.rounds.question import Question, SpotLimits
from ballast_policies.rounds.values import (
    Node,
    Placement,
    PoolPart,
    Round,
    RoundSettings,
    RoundState,
)

__all__ = [
    "Account",
    "ElasticGang",
    "MixedGang",
    "Node",
    "Placement",
    "PoolPart",
    "Question",
    "Round",
    "RoundMemory",
    "RoundSettings",
    "RoundState",
    "SharedGpus",
    "SharingJob",
    "SizeSettings",
    "SpotLimits",
    "SpreadGang",
    "advance",
    "best_parts",
    "decide_round",
    "extra_nodes",
    "in_whole_pods",
    "kept_ranks",
    "mixtures",
    "resize_cooldown_seconds",
    "stays",
    "with_mixtures",
]
