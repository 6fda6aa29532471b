"""Gangs that run in several pools at once: which may, where, and when it is their turn."""

from ballast_policies.rounds.mixed.options import best_parts, mixtures
from ballast_policies.rounds.mixed.shares import with_mixtures

__all__ = ["best_parts", "mixtures", "with_mixtures"]
