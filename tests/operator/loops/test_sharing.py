"""Two jobs on one GPU: launch, what they report, the one that is left, and who pays."""

import random
from collections import defaultdict
from typing import Any

import pytest
from ballast_operator.kube.kinds import JOB, NODE, POD
from ballast_operator.report.overview import overview
from ballast_policies.contract.messages import JOB_LABEL
from ballast_policies.throughput.speeds import SpeedKey

from tests.operator.loops.simulated.simulation import NAMESPACE, Simulation, throughput
from tests.support.examples import first_daily

PRICE = 36.0
LABELS = {"nvidia.com/gpu.replicas": "2", "nvidia.com/gpu.sharing-strategy": "time-slicing"}


def sharing_cluster(*shared: str, whole: dict[str, int] | None = None, **spec: Any) -> Simulation:
    """Nodes of the pool ``fast``, which shares, and of ``whole``, which does not: node -> GPUs."""
    nodes = dict.fromkeys(shared, ("fast", 2)) | {
        name: ("whole", gpus) for name, gpus in (whole or {}).items()
    }
    alike = {"pricePerGpuHour": PRICE, "memoryPerGpu": "32G"}
    pools = {"fast": {**alike, "sharing": {"kind": "TimeSlicing", "jobsPerGpu": 2}}}
    simulation = Simulation(nodes=nodes, pools=pools | ({"whole": alike} if whole else {}), **spec)
    for name in shared:
        simulation.world.patch(NODE, "", name, {"metadata": {"labels": LABELS}})
    return simulation


def one_job(steps: int = 100_000, **spec: Any) -> dict[str, Any]:
    """A job of one GPU that may share it, with its speed alone."""
    known = throughput(1, fast=5.0)
    fields = {"sharesGpu": "Allowed", "memoryPerGpu": "10G", "totalSteps": steps, "throughput": known, **spec}
    return {"stages": (1, 1), "trainer": {}, **fields}


def partners(simulation: Simulation) -> dict[str, str]:
    """Job that holds a GPU -> who is on it as well."""
    held = {name: simulation.status(name).allocation for name in simulation.trainers}
    return {name: allocation.partner for name, allocation in held.items() if allocation is not None}


async def test_two_jobs_share_a_gpu_and_the_third_waits():
    """Each asks for one replica, and names the other wherever people look."""
    simulation = sharing_cluster("n", roundSeconds=3600)
    for name in ("a", "b", "c"):
        simulation.add_job(name, **one_job())
    await simulation.running("a", "b")
    assert partners(simulation) == {"a": "team/b", "b": "team/a"}
    for name in ("a", "b"):
        (pod,) = simulation.pods(name)
        assert pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    await simulation.ticks(5)
    assert simulation.status("c").launches == 0
    policy = simulation.policy()
    (pool,) = policy["status"]["capacity"]
    assert (pool["gpus"], pool["gpusHeld"]) == (1, 1)
    gauges = simulation.metrics.registry
    assert gauges.get_sample_value("ballast_gpus_shared", {"pool": "fast"}) == 1
    labels = {"pool": "fast", "gpu_type": "fast"}
    assert gauges.get_sample_value("ballast_gpus_allocated", labels) == 1
    jobs = [simulation.world.get(JOB, NAMESPACE, name) for name in ("a", "b", "c")]
    told = simulation.explained("b")
    assert "team/a is on its GPU as well" in told
    assert "shares it with team/a, at 0.60 of its speed alone (estimated)" in told
    assert [line.partner for line in overview(jobs, [policy]).jobs] == ["team/b", "team/a", ""]
    assert [line.partner for line in simulation.costs().jobs] == ["team/b", "team/a", ""]


async def test_the_resource_may_have_the_plugins_other_name():
    """With ``renameByDefault`` nodes offer, and pods ask for, nvidia.com/gpu.shared."""
    simulation = sharing_cluster("n")
    with simulation.changed_pools() as pools:
        pools["fast"]["gpuResource"] = "nvidia.com/gpu.shared"
    item = simulation.world.get(NODE, "", "n")
    item["status"]["allocatable"] = {"nvidia.com/gpu.shared": "2"}
    simulation.world.put(NODE, item)
    simulation.add_job("a", **one_job())
    simulation.add_job("b", **one_job())
    await simulation.until(lambda: partners(simulation) == {"a": "team/b", "b": "team/a"})
    await simulation.until(lambda: bool(simulation.pods("a") and simulation.pods("b")))
    for name in ("a", "b"):
        (pod,) = simulation.pods(name)
        assert pod["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu.shared": "1"}


@pytest.mark.slow
async def test_a_job_that_is_left_alone_trains_on_and_is_given_another_partner():
    """One replica is its own, and the other is kept until a partner is decided."""
    simulation = sharing_cluster("n", roundSeconds=3600)
    simulation.add_job("a", **one_job())
    simulation.add_job("b", **one_job(100))
    await simulation.until(lambda: simulation.state("b") == "Succeeded")
    await simulation.until(lambda: partners(simulation) == {"a": ""})
    simulation.add_job("alone", stages=(1, 1), memoryPerGpu="1G")
    simulation.add_job("large", **one_job(memoryPerGpu="23G"))
    await simulation.ticks(10)
    assert partners(simulation) == {"a": ""}
    simulation.add_job("c", **one_job())
    await simulation.until(lambda: partners(simulation) == {"a": "team/c", "c": "team/a"})
    assert simulation.status("a").launches == 1


@pytest.mark.slow
async def test_a_pair_that_is_slower_than_taking_turns_ends_with_the_round_and_is_not_made_again():
    """What they report of each other is not their speed alone, with which it is compared."""
    simulation = sharing_cluster("n", roundSeconds=30)
    for name, kind in (("a", "x"), ("b", "y")):
        spec = one_job(model={"name": kind})
        spec["trainer"]["beside"] = 0.45
        simulation.add_job(name, **spec)
    await simulation.until(lambda: partners(simulation) == {"a": "team/b", "b": "team/a"})
    await simulation.until(lambda: "" in partners(simulation).values())
    for _ in range(100):
        await simulation.tick()
        assert set(partners(simulation).values()) <= {""}
    for speeds in simulation.allocator.decider.measurements.kinds.values():
        (beside,) = (known for key, known in speeds.items() if key.partner)
        assert speeds[SpeedKey.of("fast", 1)].steps_per_second == pytest.approx(5.0)
        assert beside.steps_per_second == pytest.approx(2.25)


async def test_a_job_shares_only_once_its_speed_alone_is_known():
    """By which a pair is judged: stated, or measured of it or of another of its kind."""
    simulation = sharing_cluster("n", roundSeconds=20, moves={"minRunSeconds": 1000})
    simulation.add_job("a", **one_job(throughput=[]))
    simulation.add_job("b", **one_job(throughput=[]))
    await simulation.running("a")
    assert partners(simulation) == {"a": ""}
    await simulation.until(lambda: partners(simulation) == {"a": "team/b", "b": "team/a"})


async def test_a_job_that_allows_to_share_and_cannot_says_why_and_runs_alone():
    """Several GPUs, unknown memory, more memory than there is, no pool that shares."""
    simulation = sharing_cluster("n", "m", "o")
    simulation.add_job("elastic", **{**one_job(), "stages": (1, 2)})
    simulation.add_job("unknown", **{k: v for k, v in one_job().items() if k != "memoryPerGpu"})
    simulation.add_job("large", **one_job(memoryPerGpu="32G"))
    names = ("elastic", "unknown", "large")
    await simulation.running(*names)
    why = {name: simulation.status(name).last_decision.why for name in names}
    assert "sharesGpu: it may have 1 to 2 GPUs" in why["elastic"]
    assert "neither stated nor measured" in why["unknown"]
    assert "it needs 32 GB of GPUs that are shared, and the largest has 32 GB" in why["large"]
    plain = Simulation(nodes={"n": ("fast", 1)})
    await plain.run_job("a", **one_job())
    assert "sharesGpu: no pool has a node whose GPU two jobs may share" in plain.status("a").last_decision.why
    assert plain.status("a").allocation.shared_gpu is None


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
