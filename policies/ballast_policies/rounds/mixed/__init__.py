"""Gangs that run in several pools at once: which may, where, and when it is their turn."""

from ballast_policies.rounds.mixed.decide import decide_mixed_round
from ballast_policies.rounds.mixed.gang import MixedGang
from ballast_policies.rounds.mixed.options import best_parts, mixtures
from ballast_policies.rounds.mixed.question import Question
from ballast_policies.rounds.mixed.shares import with_mixtures

__all__ = ["MixedGang", "Question", "best_parts", "decide_mixed_round", "mixtures", "with_mixtures"]
