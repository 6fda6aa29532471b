"""GPUs that pass from one gang to the next: each second of each of them is paid by one job, or is idle."""

import random
from collections import Counter

import pytest
from ballast_operator.api.job_allocation import is_coming
from ballast_operator.kube.kinds import JOB, POD, POLICY
from ballast_operator.report.costs import costs
from ballast_policies.contract import JOB_LABEL

from tests.operator.loops.simulated.simulation import NAMESPACE, Simulation
from tests.support.examples import first_daily

PRICE = 36.0
NODES = {"a": ("fast", 2), "b": ("fast", 1), "c": ("fast", 1)}


def cluster() -> Simulation:
    """One pool that is always contended, and rounds so short that gangs take turns."""
    simulation = Simulation(nodes=NODES, roundSeconds=4, moves={"maxMovesPerHour": 3600})
    item = simulation.world.get(POLICY, "", "default")
    item["spec"]["nodePools"][0]["pricePerGpuHour"] = PRICE
    simulation.world.put(POLICY, item)
    return simulation


def present(simulation: Simulation) -> list[str]:
    return [name for name in simulation.trainers if simulation.world.get(JOB, NAMESPACE, name) is not None]


def paid_nodes(simulation: Simulation) -> Counter[tuple[str, str]]:
    """(job, node) -> GPUs that the job pays for."""
    found: Counter[tuple[str, str]] = Counter()
    for name in present(simulation):
        allocation = simulation.status(name).allocation
        if allocation is not None:
            for pod, node in allocation.node_of.items():
                if pod not in allocation.ended and not is_coming(node):
                    found[name, node] += allocation.gpus_per_pod
    return found


def of_jobs(simulation: Simulation) -> float:
    """What jobs have paid, deleted ones included."""
    jobs = [simulation.world.get(JOB, NAMESPACE, name) for name in present(simulation)]
    policy = simulation.world.get(POLICY, "", "default")
    total = costs(jobs, [policy], now=simulation.now).to_dict()["total"]
    return total["jobs"] + total["deleted_jobs"]


def check(simulation: Simulation) -> None:
    """No GPU has two payers, and no pod that lives has none."""
    paid = paid_nodes(simulation)
    by_node: Counter[str] = Counter()
    for (_, node), gpus in paid.items():
        by_node[node] += gpus
    for node, gpus in by_node.items():
        assert gpus <= NODES[node][1], f"{gpus} of {NODES[node][1]} GPUs of {node} are paid"
    for pod in simulation.world.items(POD):
        if pod["status"]["phase"] == "Running":
            job = pod["metadata"]["labels"][JOB_LABEL]
            if job in present(simulation):
                assert paid[job, pod["spec"]["nodeName"]] > 0, f"no job pays for {pod['metadata']['name']}"


def of_teams(simulation: Simulation) -> Counter[str]:
    """Team -> what it has paid for the jobs, up to now."""
    found: Counter[str] = Counter()
    for name in present(simulation):
        status = simulation.status(name)
        for part in status.team_costs:
            found[part.team] += part.cost
        gang = status.allocation
        if gang is not None and gang.pays:
            since = max(filter(None, (status.cost_at, gang.since)))
            gpus = sum(part.gpus for part in gang.on_nodes_by_pool)
            team = status.team_costs[-1].team if status.team_costs else ""
            found[team] += gpus * (simulation.now - since).total_seconds() * PRICE / 3600
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", first_daily(range(3)))
async def test_each_gpu_second_is_paid_by_one_team(seed: int):
    """Jobs change their teams while GPUs change hands, with or without an operator that sees it at once.

    The team that an operator has seen last pays until one sees the next.
    """
    rng, simulation = random.Random(seed), cluster()
    metered: Counter[str] = Counter()
    for number in range(5):
        simulation.add_job(f"j{number}", stages=(1, 2), totalSteps=10**6, trainer={"total": 10**6})
    known: dict[str, str] = {}
    changes, away = 0, 0
    for _ in range(120):
        if rng.random() < 0.1:
            item = simulation.world.get(JOB, NAMESPACE, rng.choice(sorted(simulation.trainers)))
            item["spec"]["entity"] = rng.choice(("vision", "speech", "text"))
            item["metadata"]["generation"] = item["metadata"].get("generation", 1) + 1
            simulation.world.put(JOB, item)
            changes += 1
        if away == 0 and rng.random() < 0.05:
            away = rng.randint(1, 8)
        seconds, before = rng.choice((0.2, 0.5, 1.3)), paid_nodes(simulation)
        for (name, _), gpus in before.items():
            metered[known.get(name, "")] += gpus * seconds * PRICE / 3600
        await simulation.tick(seconds=seconds, operator=away == 0)
        check(simulation)
        if away == 0:
            jobs = {name: simulation.world.get(JOB, NAMESPACE, name) for name in present(simulation)}
            known = {name: item["spec"].get("entity", "") for name, item in jobs.items()}
            paid = of_teams(simulation)
            assert {team: paid[team] for team in metered} == pytest.approx(dict(metered), abs=1e-6)
            assert paid.total() == pytest.approx(metered.total(), abs=1e-6)
        elif (away := away - 1) == 0:
            simulation.start_operator()
    assert changes >= 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", first_daily(range(3)))
async def test_each_gpu_second_is_paid_once(seed: int):
    """An independent meter of what each job holds agrees with what all have paid, at every moment.

    Jobs take turns, end, fail and lose nodes; operators die.
    """
    rng, simulation, metered = random.Random(seed), cluster(), 0.0

    def add(number: int) -> None:
        stages, steps = rng.choice(((1, 1), (1, 2), (2, 2))), rng.randint(30, 300)
        simulation.add_job(f"j{number}", stages=stages, totalSteps=steps, trainer={"total": steps})

    for number in range(4):
        add(number)
    handovers, before = 0, paid_nodes(simulation)
    last: dict[str, str] = {}
    for number in range(4, 154):
        if rng.random() < 0.1:
            add(number)
        if rng.random() < 0.04:
            simulation.start_operator()
        for node in NODES:
            if rng.random() < 0.03:
                simulation.set_node_ready(node, rng.random() < 0.3)
            elif rng.random() < 0.3:
                simulation.set_node_ready(node, True)
        seconds = rng.choice((0.2, 0.5, 1.3))
        metered += sum(before.values()) * seconds * PRICE / 3600
        await simulation.tick(seconds=seconds)
        check(simulation)
        now = paid_nodes(simulation)
        for job, node in now.keys() - before.keys():
            handovers += last.get(node, job) != job
            last[node] = job
        before = now
        assert of_jobs(simulation) == pytest.approx(metered, abs=1e-6)
    assert handovers >= 3
