"""A gang in two pools: when it gets its GPUs, its stages, pods and costs, a new operator, a lost part."""

from typing import Any

import pytest
from ballast_operator.kube.kinds import NODE, POD
from ballast_operator.report.overview import overview
from ballast_policies.throughput.speeds import SpeedKey

from tests.operator.loops.simulated.autoscaler import Autoscaler
from tests.operator.loops.simulated.machines import node
from tests.operator.loops.simulated.simulation import NAMESPACE, Simulation

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
    simulation.add_job(name, stages=stages, **{"trainer": {"pace": 1}, **given, **spec})


def parts_of(simulation: Simulation, name: str = "wide") -> list[str]:
    """What the job holds of each pool, as text."""
    allocation = simulation.status(name).allocation
    return [] if allocation is None else [str(part) for part in allocation.by_pool]


def node_with(name: str, pool: str, allocatable: dict[str, str]) -> dict[str, Any]:
    """A node with these extended resources."""
    found = node(name, pool, 0)
    found["status"]["allocatable"] = allocatable
    return found


BOTH = ["2 x fast of pool fast", "2 x slow of pool slow"]


async def in_both(simulation: Simulation | None = None, **job: Any) -> Simulation:
    """The cluster, once such a job runs in both of its pools."""
    simulation = simulation or two_pools()
    add_wide(simulation, **job)
    await simulation.running("wide")
    return simulation


async def test_a_gang_that_no_pool_holds_runs_in_two_with_stages_that_suit_their_speeds():
    """A fast GPU does four times as much, and has five of twelve layers; each rank knows its GPU's type."""
    simulation = await in_both()
    assert parts_of(simulation) == BOTH
    assert simulation.cut("wide") == (5, 5, 1, 1)
    assert [rank.gpu_type for rank in simulation.plan("wide").ranks] == ["fast", "fast", "slow", "slow"]
    assert (
        "2 x fast of pool fast and 2 x slow of pool slow" in simulation.condition("wide", "Admitted").message
    )


def planned(*, layers=(1, 2, 4, 5), **of_type):
    return {"layers": list(layers), "gpus": [{"gpuType": t, "stages": n} for t, n in of_type.items()]}


async def test_a_plan_has_its_gpus_in_its_order_and_its_layers():
    """Slow GPUs first and more of them, though all the fast ones are free."""
    simulation = await in_both(
        two_pools(fast=4, slow=4), plan=planned(slow=3, fast=1), repack={"enabled": False}
    )
    assert parts_of(simulation) == ["3 x slow of pool slow", "1 x fast of pool fast"]
    assert simulation.cut("wide") == (1, 2, 4, 5)


async def test_a_plan_of_one_gpu_type_is_launched_there():
    simulation = await in_both(
        two_pools(fast=4, slow=4), plan=planned(slow=4), mixedPools="Never", repack={"enabled": False}
    )
    assert parts_of(simulation) == ["4 x slow of pool slow"]
    assert simulation.cut("wide") == (1, 2, 4, 5)


async def test_a_plan_for_gpus_that_there_are_not_is_refused_with_what_there_is():
    simulation = two_pools(fast=4, slow=2)
    add_wide(simulation, plan=planned(slow=3, fast=1), repack={"enabled": False})
    await simulation.tick()
    refusal = simulation.condition("wide", "Admitted")
    assert refusal.reason == "ExceedsCapacity"
    assert "plan.gpus needs 3 x slow, 1 x fast, with" in refusal.message
    assert "have room for: fast 4, slow 2. To fix: " in refusal.message


async def test_pools_that_are_too_small_together_are_named_in_the_refusal():
    simulation = two_pools(slow=1)
    add_wide(simulation)
    await simulation.tick()
    await simulation.refused(
        "wide",
        "ExceedsCapacity",
        "needs 4 GPUs; its pools do not have them together",
        "fast 2, slow 1. To fix: ",
    )


async def test_the_pods_of_each_part_ask_for_the_resource_of_their_pool():
    """Pools of two vendors: the resource, the toleration for it and the node are those of the part."""
    simulation = two_pools(pools={"slow": {"gpuResource": "amd.com/gpu"}})
    simulation.world.put(NODE, node_with("slow-0", "slow", {"amd.com/gpu": "2"}))
    add_wide(simulation)
    await simulation.running("wide")
    asked = {}
    for pod in simulation.pods("wide"):
        limits = pod["spec"]["containers"][0]["resources"]["limits"]
        asked[pod["metadata"]["name"]] = (pod["spec"]["nodeName"], *limits)
    assert sorted(asked.values()) == [("fast-0", "nvidia.com/gpu")] * 2 + [("slow-0", "amd.com/gpu")] * 2


@pytest.mark.slow
async def test_the_memory_of_each_pool_limits_its_own_stages():
    """GPUs of equal speed, a slow one with room for one layer of 1 GB: it has no more at the next launch."""
    pools = {"fast": {"memoryPerGpu": "5500M"}, "slow": {"memoryPerGpu": "1500M"}}
    simulation = await in_both(
        two_pools(pools=pools),
        throughput=[{**one, "stepsPerSecond": 1.0} for one in speeds(4)],
        trainer={"pace": 1, "layers": (0.1,) * 12, "layer_bytes": (10**9,) * 12},
    )
    assert simulation.cut("wide") == (3, 3, 3, 3)
    await simulation.tick()
    await simulation.relaunched("wide")
    assert simulation.cut("wide") == (5, 5, 1, 1)


@pytest.mark.slow
async def test_costs_are_kept_by_part_and_add_up_to_the_bill():
    """Each part at its pool's price; what the job has cost is what the pools bill for held GPUs."""
    simulation = await in_both()
    await simulation.ticks(40, seconds=37)
    found = simulation.costs()
    (line,) = found.jobs
    seconds = (simulation.now - simulation.status("wide").allocation.since).total_seconds()
    for pool, price in PRICES.items():
        assert line.by_pool[pool] == pytest.approx(2 * seconds * price / 3600, abs=1e-9)
    assert line.cost == pytest.approx(sum(line.by_pool.values()), abs=1e-9)
    assert found.pools
    for pool in found.pools:  # the bill begins with the decision after the launch, a second later
        assert pool.bill - pool.jobs == pytest.approx(0.0, abs=2 * PRICES[pool.pool] / 3600 + 1e-9)
    status = simulation.status("wide")
    assert sum(entry.cost for entry in status.pool_costs) == pytest.approx(status.cost_so_far, abs=1e-9)


async def test_explain_top_and_metrics_show_both_parts():
    simulation = await in_both()
    await simulation.tick()
    assert "holds    2 x fast of pool fast and 2 x slow of pool slow since" in simulation.explained("wide")
    found = overview([simulation.item("wide")], [simulation.policy()])
    assert list(found.jobs[0].parts) == BOTH
    assert {line.pool: line.held for line in found.pools} == {"fast": 2, "slow": 2}
    for name in ("fast", "slow"):
        labels = {"pool": name, "gpu_type": name}
        assert simulation.metrics.registry.get_sample_value("ballast_gpus_allocated", labels) == 2.0


@pytest.mark.slow
async def test_a_new_operator_keeps_the_gang_and_books_its_time_on_both_types():
    simulation = await in_both()
    await simulation.ticks(3, seconds=61)
    simulation.start_operator()
    await simulation.ticks(3, seconds=61)
    status = simulation.status("wide")
    assert (status.launches, status.state) == (1, "Running")
    received = simulation.allocator.decider.memory.accounts.received[f"{NAMESPACE}/wide"]
    assert received["fast"] == pytest.approx(received["slow"])
    assert received["fast"] > 100


async def test_the_speed_of_a_gang_in_two_pools_counts_for_neither_type():
    simulation = await in_both()
    await simulation.ticks(3)
    measured = simulation.allocator.decider.measurements
    both = SpeedKey.of_types([("fast", 2), ("slow", 2)])
    assert set(measured.jobs[NAMESPACE, "wide"].speeds) == {both}
    await simulation.allocator.save()
    simulation.start_operator()
    await simulation.tick()
    assert both in simulation.allocator.decider.measurements.jobs[NAMESPACE, "wide"].speeds


@pytest.mark.slow
async def test_a_lost_node_of_one_part_restarts_a_gang_of_one_size():
    """It waits until the four GPUs are there again, from its checkpoint."""
    simulation = await in_both()
    simulation.set_node_ready("slow-0", False)
    simulation.world.drop(NODE, "", "slow-0")
    for pod in simulation.pods("wide"):
        if pod["spec"].get("nodeName") == "slow-0":
            simulation.world.drop(POD, NAMESPACE, pod["metadata"]["name"])
    await simulation.until(lambda: simulation.status("wide").allocation is None)
    simulation.world.put(NODE, node_with("slow-0", "slow", {"nvidia.com/gpu": "2"}))
    await simulation.running("wide")
    assert parts_of(simulation) == BOTH
    assert simulation.status("wide").launches == 2


async def test_a_notice_for_one_part_shrinks_the_gang_live_onto_the_other():
    """Without a restart; from then on it is a gang in one pool."""
    simulation = await in_both(stages=(2, 4), throughput=speeds(2, 4, slow=2.0))
    assert parts_of(simulation) == BOTH
    taint = {"key": "aws-node-termination-handler/spot-itn", "effect": "NoSchedule"}
    simulation.world.patch(NODE, "", "slow-0", {"spec": {"taints": [taint]}})
    await simulation.until(lambda: parts_of(simulation) == BOTH[:1])
    status = simulation.status("wide")
    assert (status.launches, status.restarts, status.allocation.parts) == (1, {}, ())
    assert len(simulation.plan("wide").ranks) == 2


async def test_a_launch_waits_while_a_node_of_its_last_part_takes_no_pods():
    """Between decision and launch: nothing of the gang is made, and it is decided on again."""
    simulation = two_pools()
    add_wide(simulation)
    await simulation.look()
    await simulation.decide()
    simulation.world.patch(NODE, "", "slow-0", {"spec": {"taints": [{"key": "k", "effect": "NoSchedule"}]}})
    await simulation.look()
    await simulation.reconciler.reconcile((NAMESPACE, "wide"))
    assert simulation.status("wide").allocation is None
    simulation.world.patch(NODE, "", "slow-0", {"spec": {"taints": None}})
    await simulation.running("wide")
    assert parts_of(simulation) == BOTH


TO_COME = {"maxNodes": 1, "gpusPerNode": 2, "startSeconds": 60.0}


def scaled_from_zero(**autoscaler):
    """A fast node of two GPUs, and a slow pool that has none yet and may have one of two."""
    simulation = two_pools(pools={"slow": TO_COME})
    simulation.world.drop(NODE, "", "slow-0")
    return simulation, Autoscaler(simulation, pool="slow", **autoscaler)


async def test_a_part_waits_for_the_nodes_of_its_own_pool():
    """Its pods ask for the pool's labels, those of the other part are on their node; then it is a gang in
    two pools as any other, and the status has the real nodes.
    """
    simulation, autoscaler = scaled_from_zero()
    add_wide(simulation)
    await autoscaler.until(lambda: len(simulation.pods("wide")) == 4)
    nodes = simulation.status("wide").allocation.nodes
    assert sorted(nodes) == ["fast-0", "fast-0", "slow/new-0", "slow/new-0"]
    waiting = [pod for pod in simulation.pods("wide") if pod["spec"].get("nodeSelector")]
    assert [pod["spec"]["nodeSelector"] for pod in waiting] == [{"pool": "slow"}] * 2
    await autoscaler.until(lambda: simulation.state("wide") == "Running")
    assert parts_of(simulation) == BOTH
    assert sorted(simulation.status("wide").allocation.nodes) == ["fast-0", "fast-0", "new-0", "new-0"]
    assert simulation.cut("wide") == (5, 5, 1, 1)
    assert [rank.gpu_type for rank in simulation.plan("wide").ranks] == ["fast", "fast", "slow", "slow"]
    assert (simulation.status("wide").launches, autoscaler.made) == (1, 1)


async def test_only_nodes_that_exist_are_paid_while_the_others_are_awaited():
    """The two fast GPUs are held and cost; the slow ones do not exist."""
    simulation, autoscaler = scaled_from_zero(stock=0)
    add_wide(simulation)
    await autoscaler.until(lambda: simulation.status("wide").allocation is not None)
    allocation = simulation.status("wide").allocation
    assert [(part.pool, part.gpus) for part in allocation.on_nodes_by_pool] == [("fast", 2)]
    assert allocation.pools_to_grow == ("slow",)


@pytest.mark.slow
async def test_nodes_that_do_not_come_are_given_up_and_tried_again():
    """The cloud has none: the gang is taken back in time, and starts once one is to be had."""
    simulation, autoscaler = scaled_from_zero(stock=0)
    add_wide(simulation)
    await autoscaler.until(lambda: "NotBound" in simulation.status("wide").restarts, ticks=300)
    autoscaler.stock = 1
    await autoscaler.until(lambda: simulation.state("wide") == "Running", ticks=300)
    assert parts_of(simulation) == BOTH


SMALL = {"model": {"name": "small", "layers": 12}, "totalSteps": 100_000}


def add_small(simulation, name, **spec):
    simulation.add_job(name, stages=(2, 2), trainer={"pace": 1}, **{**SMALL, **spec})


async def test_gpus_that_another_job_needs_are_not_taken_for_a_second_part():
    """The waiting job has the slow pool; the other starts in the fast one alone."""
    simulation = two_pools()
    add_wide(simulation, stages=(2, 4), throughput=speeds(2, 4, slow=2.0))
    add_small(simulation, "other", gpuTypes=["slow"])
    await simulation.running("wide", "other")
    assert parts_of(simulation) == BOTH[:1]
    assert parts_of(simulation, "other") == BOTH[1:]


@pytest.mark.slow
async def test_a_gang_in_two_pools_gives_back_what_a_job_needs_and_grows_again_without_a_restart():
    """Its last ranks leave for the job, and come back when that is gone."""
    simulation, all_six = two_pools(slow=4), ["2 x fast of pool fast", "4 x slow of pool slow"]
    add_wide(simulation, stages=(2, 6), throughput=speeds(2, 4, 6, slow=3.0))
    await simulation.running("wide")
    assert parts_of(simulation) == all_six
    add_small(simulation, "small", gpuTypes=["slow"])
    await simulation.running("small")
    assert parts_of(simulation) == BOTH
    assert simulation.condition("wide", "Shrunk").reason == "GpusGivenBack"
    simulation.change("small", suspend=True)
    await simulation.until(lambda: len(simulation.plan("wide").ranks) == 6, seconds=5)
    await simulation.until(lambda: simulation.condition("wide", "Grown").is_true)
    assert parts_of(simulation) == all_six
    assert [rank.gpu_type for rank in simulation.plan("wide").ranks] == ["fast"] * 2 + ["slow"] * 4
    assert (simulation.status("wide").launches, simulation.status("wide").restarts) == (1, {})


@pytest.mark.slow
async def test_a_gang_in_two_pools_moves_into_one_that_becomes_free():
    """Four fast GPUs, at 4 steps/s, win more over the 2.5 that it reports than the restart costs."""
    simulation = two_pools(fast=4, roundSeconds=60)
    add_small(simulation, "first", gpuTypes=["fast"])
    await simulation.running("first")
    add_wide(simulation, trainer={"pace": 1, "speed": 2.5})
    await simulation.running("wide")
    assert parts_of(simulation) == BOTH
    simulation.change("first", suspend=True)
    await simulation.until(lambda: parts_of(simulation) == ["4 x fast of pool fast"], seconds=10, ticks=300)
    await simulation.running("wide")
    assert simulation.status("wide").lost_steps == 0


async def test_a_namespace_limit_counts_both_parts():
    simulation = two_pools(tenants={"eachNamespace": {"maxGpus": 3}})
    add_wide(simulation, stages=(2, 4), throughput=speeds(2, 4, slow=2.0))
    await simulation.ticks(5)
    assert simulation.status("wide").allocation.gpus == 3
