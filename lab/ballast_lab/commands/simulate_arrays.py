"""``ballast simulate`` by other rules than the operator's, and with pairs of jobs or ideal shares."""

import functools
from collections.abc import Callable
from typing import Any

from ballast_policies.simulator.result import Result

from ballast_lab.arrays.engine import simulate
from ballast_lab.arrays.rules import BALLAST_RULES, WHOLE_ROUND_RULES, ArraySettings
from ballast_lab.gavel.shares import GAVEL_RULES, PUBLISHED_RULES

RULES = {rules.name: rules for rules in (GAVEL_RULES, PUBLISHED_RULES, BALLAST_RULES, WHOLE_ROUND_RULES)}


def array_simulation(rules: str, **settings: Any) -> Callable[..., Result]:
    """The simulation by the rules of that name, which takes workload, cluster and table.

    Raises:
        SettingsError: the settings exclude each other.
    """
    return functools.partial(simulate, settings=ArraySettings(rules=RULES[rules], **settings))
