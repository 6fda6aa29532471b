"""Memory of GPUs is a constraint: jobs are placed where they fit, by what is stated or measured."""

import pytest
from ballast_operator.api.conditions import TOLD, JobReason, Told
from ballast_operator.kube.kinds import NODE, POLICY
from ballast_policies.planning.memory.measured_layers import MeasuredLayers, PipelineForm
from ballast_policies.planning.memory.need import MemoryNeed
from ballast_policies.scheduling.measurements import LayerProfiles

from tests.operator.loops.simulated.machines import node
from tests.operator.loops.simulated.simulation import Simulation, policy

GB = 10**9


def a_pool(name, memory=None, gpu_type=None):
    stated = {} if memory is None else {"memoryPerGpu": memory}
    return {"name": name, "nodeSelector": {"pool": name}, "gpuType": gpu_type or name, **stated}


def a_cluster(*, small="16G", large="80G", small_gpus=4, large_gpus=4, **spec) -> Simulation:
    """A pool of GPUs with little memory, and one of GPUs with much."""
    nodes = {"s": ("small", small_gpus), "l": ("large", large_gpus)}
    pools = [a_pool("small", small), a_pool("large", large)]
    return Simulation(nodes=nodes, **{"nodePools": pools, **spec})


def known_layers(monkeypatch, held, activations=(), *, schedule="1F1B"):
    """Jobs are of a kind whose layers were measured to have these bytes."""
    layers = MeasuredLayers(held_bytes=tuple(held), activation_bytes=tuple(activations))
    need = MemoryNeed(layers, PipelineForm(schedule=schedule, positions=1, microbatches=8))
    monkeypatch.setattr(LayerProfiles, "need", lambda *_: need)


async def test_a_job_that_asks_for_more_memory_is_placed_where_that_is():
    """It would be as fast on the small GPUs; these are not offered, and the decision says so."""
    simulation = a_cluster()
    await simulation.run_job("one", memoryPerGpu="40Gi")
    status = simulation.status("one")
    assert status.allocation.pool == "large"
    assert "on 2 GPUs it needs 42.9 GB of each: not offered small (has 16 GB)" in status.last_decision.why


async def test_a_job_waits_for_large_gpus_while_small_ones_are_free():
    """The large pool is taken: it waits, rather than start where it would fail."""
    simulation = a_cluster(large_gpus=2)
    await simulation.run_job("first", memoryPerGpu="40Gi")
    simulation.add_job("second", memoryPerGpu="40Gi")
    await simulation.refused("second", JobReason.WAITING_FOR_CAPACITY, "not offered small (has 16 GB)")


async def test_a_layer_that_no_gpu_holds_is_refused_with_its_number_and_an_event(monkeypatch):
    """The third layer needs 31 GB, the largest GPU has 16; a warning for the owner, and other jobs run."""
    simulation = a_cluster(large="16G")
    known_layers(monkeypatch, [GB, GB, 31 * GB, GB])
    simulation.add_job("one")
    await simulation.until(lambda: simulation.condition("one", "Admitted") is not None)
    condition = simulation.condition("one", "Admitted")
    assert (condition.is_true, condition.reason) == (False, JobReason.EXCEEDS_MEMORY)
    assert condition.message.startswith("layer 2 needs 31 GB, the largest GPU has 16 GB")
    assert "To fix: make microbatches or layers smaller, or add a pool of larger GPUs" in condition.message
    assert TOLD[condition.reason] is Told.WARNING


@pytest.mark.slow
async def test_an_elastic_job_is_not_made_smaller_than_it_fits(monkeypatch):
    """Alone it has four GPUs; a second job makes it give back two, never three: one GPU has 40 GB to hold."""
    simulation = Simulation(
        nodes={"a": ("gpu", 4)}, nodePools=[a_pool("gpu", "24G")], objective={"policy": "max-min-fairness"}
    )
    known_layers(monkeypatch, [10 * GB] * 4)
    await simulation.run_job("one", stages=(1, 4), totalSteps=10_000, trainer={"pace": 1, "scales": True})
    assert simulation.status("one").allocation.gpus == 4
    for name in ("two", "three"):
        simulation.add_job(name, stages=(1, 4), totalSteps=10_000, trainer={"pace": 1, "scales": True})
    await simulation.running("two")
    await simulation.ticks(3, seconds=60)
    gpus = [
        status.allocation.gpus
        for status in map(simulation.status, ("one", "two", "three"))
        if status.allocation is not None
    ]
    assert set(gpus) == {2}


async def test_pools_of_one_gpu_type_are_told_apart_by_their_memory():
    """Both are a100; the job is placed in the pool of the larger ones, whichever comes first by name."""
    pools = [a_pool("a", "40G", "a100"), a_pool("b", "80G", "a100")]
    simulation = Simulation(nodes={"n1": ("a", 4), "n2": ("b", 4)}, nodePools=pools)
    for name in ("one", "two"):
        simulation.add_job(name, memoryPerGpu="60G")
    await simulation.running("one", "two")
    assert {simulation.status(name).allocation.pool for name in ("one", "two")} == {"b"}


@pytest.mark.parametrize(
    ("labels", "gpu_type", "expected"),
    [
        ({"nvidia.com/gpu.product": "Tesla-V100-SXM2-16GB"}, "anything", 16 * GB),
        ({}, "h100-sxm5-80gb", 80 * GB),
        ({}, "anything", None),
        ({"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb"}, "slice", None),
    ],
    ids=["label", "type", "unknown", "part of a GPU"],
)
async def test_memory_is_taken_from_the_catalogue(labels, gpu_type, expected):
    """By the labels of the nodes, else the pool's GPU type; where neither is known, nothing is assumed."""
    simulation = Simulation(nodes={"a": ("pool", 2)})
    item = node("a", "pool", 2)
    item["metadata"]["labels"] |= labels
    simulation.world.put(NODE, item)
    simulation.world.put(POLICY, policy("pool", nodePools=[a_pool("pool", gpu_type=gpu_type)]))
    await simulation.run_job("one")
    capacity = simulation.policy()["status"]["capacity"][0]
    assert capacity.get("memoryPerGpu") == expected
