"""A cluster with a fast and a slow pool, and jobs that may run in both at once."""

from typing import Any

from ballast_operator.kube.kinds import JOB, POLICY

from tests.operator.loops.simulated.machines import node
from tests.operator.loops.simulated.simulation import Simulation

MODEL = {"name": "gpt", "layers": 12}
PRICES = {"fast": 3.0, "slow": 0.7}


def speeds(*sizes: int, slow: float = 1.0) -> list[dict[str, Any]]:
    """Steps/s in proportion to the GPUs, of four fast ones 4.0 and of four slow ones ``slow``."""
    return [
        {"gpuType": name, "stages": size, "stepsPerSecond": rate * size / 4}
        for name, rate in (("fast", 4.0), ("slow", slow))
        for size in sizes
    ]


def two_pools(
    *, fast: int = 2, slow: int = 2, pools: dict[str, Any] | None = None, **policy: Any
) -> Simulation:
    """Nodes ``fast-0`` and ``slow-0``; ``pools``: pool -> more fields of it."""
    fields = {
        name: {"pricePerGpuHour": price, **(pools or {}).get(name, {})} for name, price in PRICES.items()
    }
    nodes = {"fast-0": ("fast", fast), "slow-0": ("slow", slow)}
    return Simulation(nodes=nodes, pools=fields, **policy)


def add_wide(
    simulation: Simulation, name: str = "wide", *, stages: tuple[int, int] = (4, 4), **spec: Any
) -> None:
    """A job that may run in both pools at once, and does not end by itself."""
    given = {"model": MODEL, "mixedPools": "Allowed", "throughput": speeds(stages[0]), "totalSteps": 100_000}
    simulation.add_job(name, stages=stages, trainer={"pace": 1}, **{**given, **spec})


def layers_of(simulation: Simulation, name: str = "wide") -> list[int]:
    """Layers of each rank."""
    return [stage.end_layer - stage.first_layer for stage in simulation.plan(name).stages]


def parts_of(simulation: Simulation, name: str = "wide") -> list[str]:
    """What the job holds of each pool, as text."""
    allocation = simulation.status(name).allocation
    return [] if allocation is None else [str(part) for part in allocation.by_pool]


def objects(simulation: Simulation) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(TrainingJobs, ClusterPolicies)."""
    return list(simulation.world.items(JOB)), list(simulation.world.items(POLICY))


def node_with(name: str, pool: str, allocatable: dict[str, str]) -> dict[str, Any]:
    """A node with these extended resources."""
    found = node(name, pool, 0)
    found["status"]["allocatable"] = allocatable
    return found
