"""Two jobs on one GPU: launch, what they report, and the one that is left."""

import pytest
from ballast_operator.cli.live.explain import as_text
from ballast_operator.kube.kinds import JOB, NODE, POLICY
from ballast_operator.report.explanation import explanation
from ballast_operator.report.overview import overview
from ballast_policies.throughput.speeds import SpeedKey

from tests.operator.loops.sharing.shared_nodes import one_job, sharing_cluster
from tests.operator.loops.simulated.simulation import NAMESPACE, Simulation


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
    told = as_text(explanation(jobs[1], [], [policy], []))
    assert "team/a is on its GPU as well" in told
    assert "shares it with team/a, at 0.60 of its speed alone (estimated)" in told
    assert [line.partner for line in overview(jobs, [policy]).jobs] == ["team/b", "team/a", ""]
    assert [line.partner for line in simulation.costs().jobs] == [
        "team/b",
        "team/a",
        "",
    ]


async def test_the_resource_may_have_the_plugins_other_name():
    """With ``renameByDefault`` nodes offer, and pods ask for, nvidia.com/gpu.shared."""
    simulation = sharing_cluster("n")
    policy = simulation.policy()
    policy["spec"]["nodePools"][0]["gpuResource"] = "nvidia.com/gpu.shared"
    simulation.world.put(POLICY, policy)
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
