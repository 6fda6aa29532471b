"""Simulations by any set of rules, the operator's own or the laboratory's."""

import functools

from ballast_lab.commands.simulate_arrays import RULES, array_simulation
from ballast_policies.simulator.engine import simulate
from ballast_policies.simulator.settings import SimulatedCluster, SimulationSettings
from ballast_policies.simulator.workloads import TraceJob, Workload
from ballast_policies.throughput.table import JobType, ThroughputTable

ALL_RULES = tuple(RULES)


def simulation(rules="ballast", *, arrays=False, **settings):
    """What takes workload, cluster and table; ``arrays``: on arrays even where the operator decides."""
    if rules == "ballast" and not (arrays or settings.keys() & {"ideal", "space_sharing"}):
        return functools.partial(simulate, settings=SimulationSettings(**settings))
    return array_simulation(rules, **settings)


def table(rates):
    """``rates``: (name, GPUs) -> {GPU type: steps/s}."""
    found = {}
    for (name, gpus), by_type in rates.items():
        for gpu_type, rate in by_type.items():
            found.setdefault(gpu_type, {})[JobType(name=name, gpus=gpus)] = rate
    return ThroughputTable(source="a test's table", alone_rates=found)


def job(name="a", steps=720.0, arrival=0.0, gpus=1, **rest):
    """A job of a table's type."""
    return TraceJob(type=JobType(name=name, gpus=gpus), steps=steps, arrival=arrival, **rest)


def simulated(jobs, gpus, oracle, *, prices=None, per_node=None, **settings):
    """The result of the jobs on GPUs by type."""
    run = simulation(**{"policy": "max-min-fairness", **settings})
    cluster = SimulatedCluster(gpus=gpus, prices=prices or {}, gpus_per_node=per_node or {})
    return run(Workload(name="test", jobs=tuple(jobs)), cluster, oracle)
