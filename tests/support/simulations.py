"""Simulations by any set of rules, the operator's own or the laboratory's."""

import functools

from ballast_lab.commands.simulate_arrays import RULES, array_simulation
from ballast_policies.simulator.engine import simulate
from ballast_policies.simulator.settings import SimulationSettings

ALL_RULES = tuple(RULES)


def simulation(rules="ballast", *, arrays=False, **settings):
    """What takes workload, cluster and table; ``arrays``: on arrays even where the operator decides."""
    if rules == "ballast" and not (arrays or settings.keys() & {"ideal", "space_sharing"}):
        return functools.partial(simulate, settings=SimulationSettings(**settings))
    return array_simulation(rules, **settings)
