"""Jobs with ``planner`` in several pools: each mix of GPUs has the degrees that are planned for it."""

import itertools

import pytest
from ballast_operator.kube.kinds import JOB
from ballast_operator.views.spec import read_spec
from ballast_policies.contract.messages import Stage

from tests.operator.loops.mixed.test_life import parts_of, two_pools
from tests.operator.loops.simulated.simulation import NAMESPACE, Simulation

LAYER = {"repeat": 12, "forwardSeconds": 0.01, "backwardSeconds": 0.02, "heldBytes": 4e8, "weightBytes": 1e8}
HALF = {**LAYER, "forwardSeconds": 0.006, "backwardSeconds": 0.012, "heldBytes": 2e8}


def planner(*, fast="6G", slow="6G", tensor=False) -> dict:
    profiles = [{"layers": [{**LAYER, "outputBytes": 1e6}]}]
    return {
        "profiles": [*profiles, {"tensor": 2, "layers": [{**HALF, "outputBytes": 1e6}]}][: 1 + tensor],
        "gpus": [
            {"gpuType": "slow", "speed": 1.0, "memory": slow},
            {"gpuType": "fast", "speed": 4.0, "memory": fast},
        ],
        "bandwidth": 1e11,
    }


def add_planned(simulation: Simulation, *, stages=(4, 4), **spec) -> None:
    simulation.add_job(
        "wide",
        stages=stages,
        trainer={"pace": 1},
        **{
            "model": {"name": "gpt", "layers": 12},
            "mixedPools": "Allowed",
            "totalSteps": 100_000,
            "repack": {"enabled": False},
            "planner": planner(),
            **spec,
        },
    )


def has_the_degrees_of(simulation: Simulation, *gpus: tuple[str, int]) -> None:
    """The status, the trainer's configuration and its first stages are those planned for these GPUs."""
    spec, _ = read_spec(simulation.world.get(JOB, NAMESPACE, "wide"))
    planned = spec.mixes[gpus].degrees
    config, allocation = simulation.configuration("wide"), simulation.status("wide").allocation
    assert allocation.degrees == planned
    assert (config.parallelism.tensor, config.parallelism.data) == (planned.tensor, planned.data)
    assert config.plan.layers == planned.layers
    assert simulation.cut("wide") == planned.layers
    assert str(planned) in simulation.condition("wide", "Admitted").message


async def test_a_gang_that_no_pool_holds_has_the_degrees_of_its_mix():
    """The fast GPUs first, with the layers that the planner gives them; ``ballast explain`` names both."""
    simulation = two_pools()
    add_planned(simulation)
    await simulation.running("wide")
    assert parts_of(simulation) == ["2 x fast of pool fast", "2 x slow of pool slow"]
    has_the_degrees_of(simulation, ("fast", 2), ("slow", 2))
    text = simulation.explained("wide")
    assert f"planned  {simulation.status('wide').allocation.degrees}" in text
    assert "2 x fast of pool fast and 2 x slow of pool slow" in text


async def test_a_mix_may_have_tensor_and_data_degrees():
    """Which ranks of a stage are on GPUs of one type: a layer's halves fit, and no layer does."""
    simulation = two_pools(fast=4, slow=4)
    add_planned(simulation, stages=(8, 8), planner=planner(fast="1700M", slow="900M", tensor=True))
    await simulation.running("wide")
    has_the_degrees_of(simulation, ("fast", 4), ("slow", 4))
    degrees = simulation.status("wide").allocation.degrees
    assert degrees.tensor * degrees.data > 1
    assert sorted(parts_of(simulation)) == ["4 x fast of pool fast", "4 x slow of pool slow"]


async def test_a_mix_whose_plan_does_not_fit_a_pools_memory_is_not_launched():
    """``planner.gpus`` states more than the pool has; once it has as much, the gang starts."""
    simulation = two_pools(pools={"slow": {"memoryPerGpu": "100M"}})
    add_planned(simulation)
    await simulation.ticks(5)
    await simulation.refused("wide", "ExceedsCapacity", "To fix: ")
    assert simulation.status("wide").launches == 0
    with simulation.changed_pools() as changed:
        changed["slow"]["memoryPerGpu"] = "6G"
    await simulation.running("wide")
    has_the_degrees_of(simulation, ("fast", 2), ("slow", 2))


async def test_a_gang_starts_on_the_mix_that_is_planned_to_be_the_fastest():
    """Of those for which there is room, whatever a pool alone has."""
    simulation = two_pools(fast=2, slow=4, roundSeconds=30)
    add_planned(simulation, stages=(2, 6))
    await simulation.running("wide")
    gpus = simulation.status("wide").allocation.placement.by_pool
    spec, _ = read_spec(simulation.world.get(JOB, NAMESPACE, "wide"))
    mixes = {at: 1 / planned.degrees.step_seconds for at, planned in spec.mixes.items()}
    room = {"fast": 2, "slow": 4}
    best = max((at for at in mixes if all(count <= room[kind] for kind, count in at)), key=mixes.__getitem__)
    assert tuple((part.gpu_type, part.gpus) for part in gpus) == best
    has_the_degrees_of(simulation, *best)


@pytest.mark.parametrize("types", [1, 2])
async def test_a_type_in_two_pools_has_the_plan_for_all_its_gpus(types):
    """Two pools of two fast GPUs each, and a gang of four: alone in its planner, or beside another type."""
    simulation = fast_in_two_pools()
    add_planned(simulation, planner={**planner(), "gpus": planner()["gpus"][2 - types :]})
    await simulation.running("wide")
    spec, _ = read_spec(simulation.world.get(JOB, NAMESPACE, "wide"))
    allocation = simulation.status("wide").allocation
    assert sorted(parts_of(simulation)) == ["2 x fast of pool another", "2 x fast of pool one-pool"]
    pods = [len(part.pods) for part in allocation.parts]
    assert [count % allocation.degrees.gpus_per_stage for count in pods] == [0, 0]
    whole = spec.plans["fast"][4]
    assert allocation.degrees in [whole, *(plan.degrees for plan in spec.in_parts[("fast", 4),])]
    assert simulation.configuration("wide").plan.layers == allocation.degrees.layers


async def test_the_advice_for_two_pools_of_a_type_is_to_allow_both():
    simulation = fast_in_two_pools()
    add_planned(simulation, mixedPools="Never")
    await simulation.ticks(2)
    admitted = simulation.condition("wide", "Admitted")
    assert admitted.reason == "ExceedsCapacity" and "or set mixedPools: Allowed" in admitted.message


def fast_in_two_pools() -> Simulation:
    pools = {name: {"gpuType": "fast"} for name in ("one-pool", "another")}
    return Simulation(nodes={"a": ("one-pool", 2), "b": ("another", 2)}, pools=pools)


async def test_a_gang_on_three_types_has_the_degrees_of_its_mix():
    """No two of the pools hold it; the fastest first, each with the layers that the planner gives it."""
    pools = {kind: {"gpuType": kind} for kind in ("fast", "middle", "slow")}
    simulation = Simulation(nodes={kind: (kind, 2) for kind in pools}, pools=pools)
    middle = {"gpuType": "middle", "speed": 2.0, "memory": "6G"}
    gpus = [*planner()["gpus"], middle]
    add_planned(simulation, stages=(6, 6), planner={**planner(), "gpus": gpus})
    await simulation.running("wide")
    assert parts_of(simulation) == [f"2 x {kind} of pool {kind}" for kind in ("fast", "middle", "slow")]
    has_the_degrees_of(simulation, ("fast", 2), ("middle", 2), ("slow", 2))


@pytest.mark.slow
@pytest.mark.parametrize("through", ["edit", "operator"])
async def test_a_mix_that_runs_goes_on_when_its_plan_turns_the_order_of_its_types(through):
    """As newer speeds or a newer operator do: the launch keeps its ranks, the next has the other order."""
    simulation = two_pools(roundSeconds=30)
    add_planned(simulation)
    await simulation.running("wide")
    before = simulation.status("wide").allocation
    assert [part.gpu_type for part in before.by_pool] == ["fast", "slow"]
    turned = [{**gpu, "speed": 5 - gpu["speed"]} for gpu in planner()["gpus"]]
    simulation.change("wide", planner={**planner(), "gpus": turned})
    if through == "operator":
        simulation.start_operator()
    await simulation.ticks(30, seconds=5.0)
    status = simulation.status("wide")
    assert (status.launches, status.allocation.parts, status.allocation.ending) == (1, before.parts, None)
    assert simulation.state("wide") == "Running"
    await simulation.relaunched("wide")
    assert [part.gpu_type for part in simulation.status("wide").allocation.by_pool] == ["slow", "fast"]


@pytest.mark.parametrize("moved", [False, True])
async def test_what_a_mix_measures_counts_for_each_of_its_types(moved):
    """Slow GPUs that are half as fast as stated: the next launch gives them fewer layers.

    Where the trainer has moved layers meanwhile, they count for the type that has them now.
    """
    simulation = two_pools(roundSeconds=30)
    add_planned(simulation)
    spec, _ = read_spec(simulation.world.get(JOB, NAMESPACE, "wide"))
    first, trainer = spec.mixes[("fast", 2), ("slow", 2)].degrees, simulation.trainers["wide"]
    cut, half = [0, *itertools.accumulate(first.layers)], len(first.layers) // 2
    if moved:
        cut[half] += 1
        trainer.stages = tuple(
            Stage(rank=rank, first_layer=begin, end_layer=end)
            for rank, (begin, end) in enumerate(itertools.pairwise(cut))
        )
    trainer.layers = (0.03 / 4,) * cut[half] + (0.03 * 2,) * (12 - cut[half])
    await simulation.running("wide")
    await simulation.ticks(60)
    status = simulation.status("wide")
    assert (status.launches, status.allocation.degrees) == (1, first)
    assert {one.gpu_type: one.ratios for one in status.measured_layers} == {
        "fast": (1.0,) * 12,
        "slow": (2.0,) * 12,
    }
    await simulation.relaunched("wide")
    await simulation.running("wide")
    has_the_degrees_of(simulation, ("fast", 2), ("slow", 2))
    then = simulation.status("wide").allocation.degrees
    assert sum(then.layers[:half]) > sum(first.layers[:half]) and set(then.measured_on) == {"fast", "slow"}
