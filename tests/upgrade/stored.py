"""Whole clusters as an operator of some version left them: recorded at each release, read by all later ones.

A recording is one moment of a job's life over the cluster in memory: every stored object as JSON, and
what the machines know. ``scripts/record-stored-objects VERSION`` writes ``golden/VERSION/STATE.json``.
"""

import dataclasses
import datetime
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from ballast_operator.kube import kinds
from ballast_operator.kube.kinds import POD, Kind, key_of

from tests.operator.loops.simulated.machines import Trainer, end_pod
from tests.operator.loops.simulated.simulation import NAMESPACE, Simulation

GOLDEN = Path(__file__).parent / "golden"
KINDS = {kind.kind: kind for kind in vars(kinds).values() if isinstance(kind, Kind)}


async def waiting(simulation: Simulation) -> None:
    await simulation.run_job("other", stages=(4, 4), gpuTypes=["fast"], trainer={"pace": 5})
    simulation.add_job("one", stages=(4, 4), gpuTypes=["fast"])
    await simulation.until(lambda: simulation.state("one") == "Waiting")


async def starting(simulation: Simulation) -> None:
    simulation.add_job("one")
    await simulation.until(lambda: simulation.state("one") == "Starting")


async def running(simulation: Simulation) -> None:
    simulation.add_job("one", trainer={"pace": 5})
    await simulation.until(lambda: simulation.trainers["one"].step >= 40)


async def repacking(simulation: Simulation) -> None:
    simulation.add_job("one", trainer={"shrink_at": 30})
    await simulation.until(lambda: simulation.state("one") == "Repacking")


async def repacked(simulation: Simulation) -> None:
    simulation.add_job("one", trainer={"shrink_at": 30, "pace": 5})
    await simulation.until(lambda: bool(simulation.status("one").repacks))


async def stopping(simulation: Simulation) -> None:
    await running(simulation)
    simulation.world.patch(kinds.JOB, NAMESPACE, "one", {"spec": {"suspend": True}})
    await simulation.until(lambda: simulation.state("one") == "Stopping")


async def suspended(simulation: Simulation) -> None:
    await stopping(simulation)
    await simulation.until(lambda: simulation.state("one") == "Suspended")


async def restarting(simulation: Simulation) -> None:
    await running(simulation)
    end_pod(simulation.world, NAMESPACE, simulation.pods("one")[0]["metadata"]["name"], 137)
    await simulation.until(lambda: bool(simulation.status("one").restarts))


async def succeeded(simulation: Simulation) -> None:
    simulation.add_job("one")
    await simulation.until(lambda: simulation.state("one") == "Succeeded")


async def failed(simulation: Simulation) -> None:
    await simulation.run_job("one", backoffLimit=0, trainer={"pace": 1})
    end_pod(simulation.world, NAMESPACE, simulation.pods("one")[0]["metadata"]["name"], 1)
    await simulation.until(lambda: simulation.state("one") == "Failed")


MOMENTS: dict[str, Callable[[Simulation], Awaitable[None]]] = {
    moment.__name__: moment
    for moment in (
        waiting,
        starting,
        running,
        repacking,
        repacked,
        stopping,
        suspended,
        restarting,
        succeeded,
        failed,
    )
}
"""Moment -> how to come there from an empty cluster with four GPUs of two pools each."""


def cluster() -> Simulation:
    """Two pools, and a policy that says all that a policy of this version can."""
    return Simulation(
        nodes={"a": ("fast", 4), "b": ("slow", 4)},
        objective={"policy": "hierarchical", "entities": {"x": {"weight": 2}, "y": {"parent": "x"}}},
        moves={"minRunSeconds": 5, "maxMovesPerHour": 10},
        solver={"timeLimitSeconds": 5},
        tenants={"eachNamespace": {"maxGpus": 8}, "namespaces": {"team": {"maxRunningJobs": 4}}},
    )


async def record(moment: str) -> str:
    """The cluster at that moment, as text."""
    simulation = cluster()
    await MOMENTS[moment](simulation)
    await simulation.allocator.save()
    recording = {
        "now": simulation.now.isoformat(),
        "objects": [item | {"kind": kind.kind} for (kind, _), item in simulation.world.objects.items()],
        "trainers": {name: dataclasses.asdict(trainer) for name, trainer in simulation.trainers.items()},
    }
    return json.dumps(recording, indent=1, sort_keys=True) + "\n"


def restored(recording: dict[str, Any]) -> Simulation:
    """The cluster of a recording, under this version's operator, which has just started."""
    simulation = cluster()
    world = simulation.world
    world.objects.clear()
    for item in recording["objects"]:
        kind = KINDS[item["kind"]]
        world.objects[kind, key_of(item)] = item
        world.version = max(world.version, int(item["metadata"]["resourceVersion"]))
        if kind is POD:
            world.uids_of_pods.setdefault(key_of(item), set()).add(item["metadata"]["uid"])
    simulation.now = datetime.datetime.fromisoformat(recording["now"])
    simulation.trainers = {name: Trainer(**known) for name, known in recording["trainers"].items()}
    simulation.start_operator()
    return simulation
