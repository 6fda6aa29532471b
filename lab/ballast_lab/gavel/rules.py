"""The rules of Gavel's simulator: how it makes rounds from allocations, and its own policies."""

import dataclasses
import functools

from ballast_lab.arrays.rules import Rules
from ballast_lab.gavel.shares import GavelPolicies

GAVEL_RULES = Rules(
    name="gavel",
    least_seconds_between_solves=1920.0,
    by_type=True,
    shuffle_types=True,
    deficits=True,
    whole_steps=True,
    end_with_last_job=True,
    keeps_accounts=False,
    newcomers_block=True,
    own_policies=GavelPolicies,
)
"""The rules of Gavel's simulator, for comparison with its published figures."""

PUBLISHED_RULES = dataclasses.replace(
    GAVEL_RULES, name="published", own_policies=functools.partial(GavelPolicies, interior=True)
)
"""Gavel's simulator with the solver of its published curves."""
