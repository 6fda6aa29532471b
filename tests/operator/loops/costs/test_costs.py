"""What jobs and nodes cost: each second of each GPU is paid by one job or is idle, at its pool's price."""

import datetime
import random
from collections import Counter
from pathlib import Path

import pytest
import yaml
from ballast_operator.api.job_allocation import is_coming
from ballast_operator.kube.kept_fields import pinned_node
from ballast_operator.kube.kinds import JOB, NODE, POD, POLICY
from ballast_operator.report.costs import costs
from ballast_policies.contract.messages import JOB_LABEL

from tests.operator.loops.simulated.machines import node
from tests.operator.loops.simulated.simulation import NAMESPACE, START, Simulation, at, throughput
from tests.operator.loops.simulated.world import as_sent
from tests.support.examples import first_daily


async def test_a_cluster_without_prices_has_hours_and_no_bill():
    """Nothing fails, and nothing is invented."""
    simulation = Simulation(nodes={"a": ("fast", 4)})
    await simulation.run_job("one", totalSteps=100_000)
    since = simulation.status("one").allocation.since
    await simulation.ticks(60)
    result = simulation.costs()
    (job,) = result.jobs
    assert (result.to_dict()["total"]["bill"], job.cost, job.on_demand_cost) == (0, 0, None)
    assert job.gpu_hours == pytest.approx(2 * (simulation.now - since).total_seconds() / 3600)


def test_a_status_of_an_older_operator_still_has_its_cost():
    """Its pools are not known; the cost is."""
    job = {
        "metadata": {"name": "old", "namespace": "n"},
        "spec": {"totalSteps": 10},
        "status": {"costSoFar": 4.5, "costAt": "2026-01-01T00:00:00Z", "state": "Succeeded"},
    }
    (line,) = costs([job], [], now=START + datetime.timedelta(days=1)).jobs
    assert (line.cost, line.projected, line.by_pool) == (4.5, 4.5, {})


EXAMPLE = Path(__file__).parents[4] / "examples" / "clusterpolicy.yaml"


def shipped(policy: str) -> Simulation:
    """The example's pools, two nodes with two GPUs each, and its ClusterPolicy with another policy."""
    simulation = Simulation(nodes={})
    example = yaml.safe_load(EXAMPLE.read_text())
    example["spec"]["objective"]["policy"] = policy
    example["spec"]["roundSeconds"], example["spec"]["moves"] = 10, {}
    simulation.world.drop(POLICY, "", "default")
    simulation.world.put(POLICY, example)
    for pool in example["spec"]["nodePools"]:
        item = node(pool["name"], pool["name"], 2)
        item["metadata"]["labels"] = dict(pool["nodeSelector"])
        simulation.world.put(NODE, item)
    return simulation


@pytest.mark.parametrize("policy", ["min-cost", "min-cost-slo", "max-throughput-per-dollar"])
async def test_a_job_runs_on_spot_where_that_is_the_cheapest(policy):
    """V100s at 0.74, not at 2.48 nor at their mean; status speaks of pool and GPU type."""
    simulation = shipped(policy)
    await simulation.run_job("one", throughput=throughput(a100=2.0, v100=1.0))
    allocation = simulation.status("one").allocation
    assert (allocation.pool, allocation.gpu_type) == ("v100-spot", "v100")
    assert " at " not in simulation.status("one").last_decision.why
    shadow = simulation.policy()["status"].get("shadowPrices", {})
    assert set(shadow) <= {"a100", "v100"}


PRICE = 36.0
NODES = {"a": ("fast", 2), "b": ("fast", 1), "c": ("fast", 1)}


def cluster() -> Simulation:
    """One pool that is always contended, and rounds so short that gangs take turns."""
    pools = {"fast": {"pricePerGpuHour": PRICE}}
    return Simulation(nodes=NODES, pools=pools, roundSeconds=4, moves={"maxMovesPerHour": 3600})


def paid_nodes(simulation: Simulation) -> Counter[tuple[str, str]]:
    """(job, node) -> GPUs that the job pays for."""
    found: Counter[tuple[str, str]] = Counter()
    for name in simulation.present():
        allocation = simulation.status(name).allocation
        if allocation is not None:
            for pod, at in allocation.node_of.items():
                if pod not in allocation.ended and not is_coming(at):
                    found[name, at] += allocation.gpus_per_pod
    return found


def check(simulation: Simulation) -> None:
    """No pod that lives has no payer; that no GPU has two is a law of the world."""
    paid = paid_nodes(simulation)
    for pod in simulation.world.items(POD):
        if pod["status"]["phase"] == "Running":
            job = pod["metadata"]["labels"][JOB_LABEL]
            if job in simulation.present():
                assert paid[job, pod["spec"]["nodeName"]] > 0, f"no job pays for {pod['metadata']['name']}"


def of_teams(simulation: Simulation) -> Counter[str]:
    """Team -> what it has paid for the jobs, up to now."""
    found: Counter[str] = Counter()
    for name in simulation.present():
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
        simulation.add_job(f"j{number}", stages=(1, 2), totalSteps=10**6)
    known: dict[str, str] = {}
    changes, away = 0, 0
    for _ in range(80):
        if rng.random() < 0.1:
            name = rng.choice(sorted(simulation.trainers))
            simulation.change(name, entity=rng.choice(("vision", "speech", "text")))
            changes += 1
        if away == 0 and rng.random() < 0.05:
            away = rng.randint(1, 8)
        seconds, before = rng.choice((0.2, 0.5, 1.3)), paid_nodes(simulation)
        for (name, _), gpus in before.items():
            metered[known.get(name, "")] += gpus * seconds * PRICE / 3600
        await simulation.tick(seconds=seconds, operator=away == 0)
        check(simulation)
        if away == 0:
            jobs = {name: simulation.world.get(JOB, NAMESPACE, name) for name in simulation.present()}
            known = {name: item["spec"].get("entity", "") for name, item in jobs.items()}
            paid = of_teams(simulation)
            assert {team: paid[team] for team in metered} == pytest.approx(dict(metered), abs=1e-6)
            assert paid.total() == pytest.approx(metered.total(), abs=1e-6)
        elif (away := away - 1) == 0:
            simulation.start_operator()
    assert changes >= 5


PRICES = {"sure": 3.6, "spot": 1.2}
ROUNDING = 1e-4


def uneven_cluster() -> Simulation:
    nodes = {"a": ("sure", 2), "b": ("spot", 2), "c": ("spot", 1), "d": ("spot", 1)}
    pools = {pool: {"gpuType": "v100", "pricePerGpuHour": price} for pool, price in PRICES.items()}
    return Simulation(nodes=nodes, pools=pools, roundSeconds=15)


class Meter:
    """What each job has paid, deleted ones included, and what the nodes cost, in small steps of time."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation, self.jobs, self.nodes = simulation, dict[str, float](), 0.0

    async def tick(self, seconds: float) -> None:
        if self.simulation.policy().get("status", {}).get("bill"):
            for one in self.simulation.world.items(NODE):
                gpus = int(one["status"]["allocatable"]["nvidia.com/gpu"])
                self.nodes += PRICES[one["metadata"]["labels"]["pool"]] * gpus * seconds / 3600
        await self.simulation.tick(seconds=seconds)
        self.jobs |= {job["job"]: job["cost"] for job in self.simulation.costs().to_dict()["jobs"]}


@pytest.mark.slow
@pytest.mark.parametrize("number_of_launches", first_daily([12, 50]))
async def test_launches_preemptions_and_failovers(number_of_launches):
    """Jobs come, end and are deleted, nodes go and come, operators die: no cent is missing at any time."""
    rng, simulation = random.Random(2), uneven_cluster()
    meter, launches, number = Meter(simulation), 0, 0
    gone: set[str] = set()
    while launches < number_of_launches:
        number += 1
        if number % 4 == 1 and len(simulation.present()) < 40:
            stages = rng.choice(((1, 1), (1, 2), (2, 2)))
            steps = rng.randint(50, 300)
            simulation.add_job(f"j{number}", stages=stages, totalSteps=steps)
        if rng.random() < 0.08:
            name = rng.choice("bcd")
            if name in gone:
                simulation.world.put(NODE, node(name, "spot", 2 if name == "b" else 1))
                gone.discard(name)
            elif any(pinned_node(pod) == name for pod in simulation.world.items(POD)):
                simulation.set_node_ready(name, False)
            else:
                simulation.world.drop(NODE, "", name)
                gone.add(name)
        for name in "bcd":
            if name not in gone and rng.random() < 0.2:
                simulation.set_node_ready(name, True)
        if rng.random() < 0.05:
            simulation.start_operator()
        if rng.random() < 0.02 and simulation.present():
            simulation.world.drop(JOB, NAMESPACE, rng.choice(simulation.present()))
        await meter.tick(rng.choice((0.2, 0.5, 0.8)))
        total = simulation.costs().to_dict()["total"]
        assert total["bill"] - total["idle"] == pytest.approx(
            total["jobs"] + total["deleted_jobs"], abs=ROUNDING
        )
        launches = sum(simulation.status(name).launches for name in simulation.present()) + sum(
            name not in simulation.present() for name in meter.jobs
        )
        assert number < 3000
    total = simulation.costs().to_dict()["total"]
    assert sum(meter.jobs.values()) > 0.05
    assert total["bill"] - total["idle"] == pytest.approx(sum(meter.jobs.values()), abs=0.01)
    assert total["bill"] == pytest.approx(meter.nodes, abs=0.01)
    assert total["idle"] >= 0


async def start_late(simulation: Simulation) -> None:
    """A new operator whose jobs have passes before its first decision."""
    simulation.start_operator()
    await simulation.look()
    for name in simulation.present():
        await simulation.reconciler.reconcile((NAMESPACE, name))


@pytest.mark.slow
@pytest.mark.parametrize("seed", first_daily(range(8)))
async def test_a_backup_that_comes_back_counts_each_gpu_second_once(seed: int):
    """What jobs held by the backup they hold until an operator comes; one that was deleted since is back."""
    rng, simulation = random.Random(seed), cluster()
    for number in range(4):
        steps = rng.choice((100, 10**6))
        simulation.add_job(f"j{number}", stages=(1, 2), totalSteps=steps)
    held = 0.0

    async def pass_time(ticks: int) -> None:
        nonlocal held
        for _ in range(ticks):
            seconds, gpus = rng.choice((0.2, 0.5, 1.3)), paid_nodes(simulation).total()
            await simulation.tick(seconds=seconds)
            held += gpus * seconds * PRICE / 3600

    await pass_time(rng.randint(5, 40))
    backup = {key: as_sent(item) for key, item in simulation.world.objects.items()}
    then, held_then, gpus_then = simulation.now, held, paid_nodes(simulation).total()
    if rng.random() < 0.5:
        simulation.world.drop(JOB, NAMESPACE, rng.choice(simulation.present()))
    await pass_time(rng.randint(1, 60))
    simulation.world.objects = backup
    held = held_then + gpus_then * (simulation.now - then).total_seconds() * PRICE / 3600
    await start_late(simulation)
    await pass_time(10)
    total = simulation.costs().to_dict()["total"]
    assert (total["jobs"], total["deleted_jobs"]) == pytest.approx((held, 0.0), abs=1e-6)
    assert total["bill"] - total["idle"] == pytest.approx(held, abs=1e-6)


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_job_that_is_restored_does_not_pay_for_the_time_between(restarts: bool):
    """A backup tool makes it anew, with the status of its first life; perhaps while no operator runs."""
    simulation, held = cluster(), 0.0
    simulation.add_job("one", totalSteps=10**6, entity="vision")

    async def pass_time(ticks: int) -> None:
        nonlocal held
        for _ in range(ticks):
            gpus = paid_nodes(simulation).total()
            await simulation.tick(seconds=1.0)
            held += gpus * PRICE / 3600

    await pass_time(20)
    backup = as_sent(simulation.world.get(JOB, NAMESPACE, "one"))
    assert backup["status"]["allocation"]
    simulation.change("one", suspend=True)
    await pass_time(20)
    simulation.world.drop(JOB, NAMESPACE, "one")
    await pass_time(500)
    earlier = held - await restored(simulation, backup)
    assert simulation.costs().jobs[0].cost == pytest.approx(held - earlier, abs=1e-6)
    if restarts:
        simulation.start_operator()
    await pass_time(40)
    (job,) = simulation.costs().jobs
    assert job.cost == pytest.approx(held - earlier, abs=1e-6)
    assert simulation.status("one").restarts == {} and simulation.state("one") == "Running"
    total = simulation.costs().to_dict()["total"]
    assert total["bill"] - total["idle"] == pytest.approx(held, abs=1e-6)
    (team,) = simulation.costs().teams
    assert team.spent == pytest.approx(held, abs=1e-6)


async def restored(simulation: Simulation, backup: dict) -> float:
    """Make the job of a backup anew; returns what it had cost."""
    for field in ("uid", "resourceVersion", "creationTimestamp"):
        del backup["metadata"][field]
    backup["metadata"]["creationTimestamp"] = at((simulation.now - START).total_seconds())
    simulation.trainers["one"].epoch = simulation.trainers["one"].launch = 0  # its processes are new, too
    simulation.world.put(JOB, backup)
    return backup["status"].get("costSoFar", 0.0)
