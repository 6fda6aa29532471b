"""A GPU that two jobs share: its price is paid once, in halves while both hold it."""

import random
from collections import defaultdict

import pytest
from ballast_operator.kube.kinds import JOB, POD
from ballast_policies.contract import JOB_LABEL

from tests.operator.loops.sharing.shared_nodes import PRICE, one_job, sharing_cluster
from tests.operator.loops.simulated.simulation import NAMESPACE, Simulation
from tests.support.examples import first_daily


def holders(simulation: Simulation) -> dict[str, dict[str, int]]:
    """Node -> job -> GPUs or replicas of it that the job holds."""
    found: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for name in simulation.present():
        held = simulation.status(name).allocation
        for pod, node in held.node_of.items() if held is not None else ():
            if pod not in held.ended:
                found[node][name] = found[node].get(name, 0) + held.gpus_per_pod
    return found


def per_hour(simulation: Simulation, shared: tuple[str, ...]) -> float:
    """What all that is held costs: a GPU that two jobs share costs as much as one that a job has alone."""
    return PRICE * sum(
        1 if node in shared else sum(jobs.values()) for node, jobs in holders(simulation).items()
    )


def of_jobs(simulation: Simulation) -> float:
    total = simulation.costs().to_dict()["total"]
    return total["jobs"] + total["deleted_jobs"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", first_daily(range(3)))
async def test_each_gpu_second_is_paid_once_and_no_gpu_has_more_than_two_jobs(seed: int):
    """An independent meter agrees with what all jobs have paid, at every moment.

    Jobs of one GPU and of two, that share and that do not, take turns, end, are suspended, lose nodes;
    operators die.
    """
    rng = random.Random(seed)
    shared = ("n", "m")
    simulation = sharing_cluster(*shared, whole={"w": 2}, roundSeconds=8, moves={"maxMovesPerHour": 3600})
    metered, pairs, handovers = 0.0, 0, 0

    def add(number: int) -> None:
        steps = rng.randint(100, 500)
        spec = one_job(steps, memoryPerGpu=rng.choice(("10G", "20G")))
        if rng.random() < 0.2:
            spec["sharesGpu"] = "Never"
        if rng.random() < 0.1:
            spec["stages"] = (2, 2)
        spec["trainer"]["beside"] = rng.choice((0.6, 0.9))
        simulation.add_job(f"j{number}", model={"name": rng.choice("xy")}, **spec)

    for number in range(6):
        add(number)
    before = per_hour(simulation, shared)
    last: dict[str, set[str]] = {}
    for number in range(6, 100):
        if rng.random() < 0.15:
            add(number)
        if rng.random() < 0.04:
            simulation.start_operator()
        if rng.random() < 0.05 and simulation.present():
            name = rng.choice(simulation.present())
            suspended = simulation.world.get(JOB, NAMESPACE, name)["spec"].get("suspend", False)
            simulation.change(name, suspend=not suspended)
        for node in ("n", "m", "w"):
            if rng.random() < 0.02:
                simulation.set_node_ready(node, False)
            elif rng.random() < 0.3:
                simulation.set_node_ready(node, True)
        seconds = rng.choice((0.2, 0.5, 1.3))
        metered += before * seconds / 3600
        await simulation.tick(seconds=seconds)
        held = holders(simulation)
        for node, jobs in held.items():
            assert sum(jobs.values()) <= 2
            if node in shared and len(jobs) == 2:
                pairs += 1
                specs = [simulation.world.get(JOB, NAMESPACE, name)["spec"] for name in jobs]
                assert all(spec["sharesGpu"] == "Allowed" for spec in specs)
                assert sum(int(spec["memoryPerGpu"][:-1]) for spec in specs) <= 32
            handovers += node in shared and last.get(node, set()) != set(jobs)
            last[node] = set(jobs)
        for pod in simulation.world.items(POD):
            if pod["status"]["phase"] == "Running":
                job = pod["metadata"]["labels"][JOB_LABEL]
                assert job not in simulation.present() or job in held[pod["spec"]["nodeName"]]
        before = per_hour(simulation, shared)
        assert of_jobs(simulation) == pytest.approx(metered, abs=1e-6)
    assert min(pairs, handovers) >= 5, (pairs, handovers)
