"""Jobs with ``planner``: each launch has the degrees that are planned for its GPUs."""

import pytest
from ballast_operator.kube.kinds import CONFIG_MAP, JOB
from ballast_operator.views.spec import read_spec

from tests.operator.loops.simulated.simulation import NAMESPACE, Simulation
from tests.operator.loops.spot.test_left_in_time import announce

LAYER = {"repeat": 8, "heldBytes": 4e8, "weightBytes": 1e8, "activationBytes": 1e7, "outputBytes": 1e6}
PLANNED = {
    "totalSteps": 100_000,
    "trainer": {"scales": True},
    "stages": (2, 8),
    "model": {"name": "gpt", "layers": 8},
    "repack": {"enabled": False},
    "planner": {
        # Two layers a GPU; halves of four with a tensor degree of 2, which costs 20 % of the speed.
        "profiles": [
            {"layers": [{**LAYER, "forwardSeconds": 0.01, "backwardSeconds": 0.02}]},
            {
                "tensor": 2,
                "layers": [{**LAYER, "forwardSeconds": 0.006, "backwardSeconds": 0.012, "heldBytes": 2e8}],
            },
        ],
        "gpus": [{"gpuType": "fast", "memory": "900M"}],
        "bandwidth": 1e11,
    },
}


def eight_gpus(**spec) -> Simulation:
    return Simulation(nodes={"a": ("fast", 4), "b": ("fast", 4)}, roundSeconds=30, **spec)


def gpus(simulation: Simulation, name: str = "one") -> int:
    allocation = simulation.status(name).allocation
    return 0 if allocation is None or allocation.ending is not None else allocation.gpus


def has_the_degrees_of(simulation: Simulation, count: int) -> None:
    """The status, the trainer's configuration and its first stages are those planned for so many GPUs."""
    spec, _ = read_spec(simulation.world.get(JOB, NAMESPACE, "one"))
    degrees, config = spec.plans["fast"][count], simulation.configuration("one")
    assert simulation.status("one").allocation.degrees == degrees
    stages = len(degrees.layers)
    assert degrees.tensor * degrees.data * stages == count
    assert (config.parallelism.tensor, config.parallelism.data) == (degrees.tensor, degrees.data)
    assert (config.pipeline.max_stages, config.plan.layers) == (stages, degrees.layers)
    assert config.pipeline.microbatches == degrees.microbatches
    assert config.training.recompute == degrees.recompute
    assert simulation.cut("one") == degrees.layers
    assert str(degrees) in simulation.condition("one", "Admitted").message


def has_the_stages_of(simulation: Simulation, degrees) -> None:
    """The status and the plan in force are of these degrees."""
    assert simulation.cut("one") == degrees.layers
    assert simulation.status("one").allocation.degrees == degrees


async def test_a_job_grows_and_gives_back_by_the_planners_split_while_it_trains():
    """Its tensor and data degree stay where another launch would make it hardly faster."""
    simulation = eight_gpus()
    simulation.add_job("two", stages=(4, 4), totalSteps=100)
    simulation.add_job("one", **PLANNED)
    await simulation.running("one", "two")
    spec, _ = read_spec(simulation.world.get(JOB, NAMESPACE, "one"))
    four = simulation.status("one").allocation.degrees
    eight = spec.plans_with("fast", four)[8]
    assert len(eight.layers) == 8 and eight != spec.plans["fast"][8]
    assert eight.step_seconds <= 1.05 * spec.plans["fast"][8].step_seconds
    await simulation.until(lambda: (grown := simulation.condition("one", "Grown")) and grown.is_true)
    has_the_stages_of(simulation, eight)
    assert simulation.configuration("one").plan.layers == eight.layers
    assert str(eight) in simulation.condition("one", "Grown").message
    measurements = simulation.allocator.decider.measurements
    await simulation.until(
        lambda: any(at.alone_in_pool == ("fast", 8) for at in measurements.kinds.get(spec.kind, {}))
    )
    await simulation.run_job("three", stages=(4, 4), totalSteps=100_000)
    assert gpus(simulation) == 4
    has_the_stages_of(simulation, four)
    assert str(four) in simulation.condition("one", "Shrunk").message
    assert simulation.never_restarted("one")


async def test_stated_speeds_on_more_nodes_are_used_of_what_is_planned_alone():
    """Three GPUs have no plan, and slow ones are none of the planner's: others, and the job itself, run."""
    simulation = eight_gpus()
    over = [{"nodes": 2, "stepsPerSecond": 5.0}]
    stated = [
        {"gpuType": gpu_type, "stages": stages, "stepsPerSecond": 10.0, "spread": over}
        for gpu_type, stages in (("slow", 4), ("fast", 3), ("fast", 4))
    ]
    simulation.add_job("one", **PLANNED, throughput=stated)
    simulation.add_job("two", stages=(1, 1), totalSteps=100_000)
    await simulation.running("one", "two")
    spec, _ = read_spec(simulation.world.get(JOB, NAMESPACE, "one"))
    assert (spec.plans["fast"].keys() & {3, 4}, [*spec.spread]) == ({4}, [("fast", 4)])


async def test_a_planned_gang_leaves_a_node_that_goes_by_the_planners_split():
    """Without a restart, as soon as it is told; it has whole stages on what is left."""
    simulation = Simulation(nodes=dict.fromkeys("abcd", ("fast", 2)), roundSeconds=30)
    await simulation.run_job("one", **PLANNED)
    eight = simulation.status("one").allocation.degrees
    assert gpus(simulation) == 8 and eight.tensor == 2
    spec, _ = read_spec(simulation.world.get(JOB, NAMESPACE, "one"))
    announce(simulation, "b", 120)
    await simulation.until(lambda: gpus(simulation) < 8, ticks=100)
    has_the_stages_of(simulation, spec.plans_with("fast", eight)[6])
    assert simulation.nodes("one") == {*"acd"} and simulation.never_restarted("one")


async def test_a_job_whose_planner_is_edited_does_not_grow_by_what_was_decided_before():
    """The decision has more GPUs; its degrees are none of the edited planner's."""
    simulation = eight_gpus()
    simulation.add_job("two", stages=(4, 4), totalSteps=100)
    simulation.add_job("one", **PLANNED)
    await simulation.until(lambda: simulation.state("two") == "Succeeded" and not simulation.pods("two"))
    for _ in range(200):  # a decision that its pass has not carried out yet
        await simulation.tick(operator=False)
        await simulation.look()
        await simulation.decide()
        if simulation.observer.decided.assignments[NAMESPACE, "one"].extra_nodes:
            break
    else:
        raise AssertionError("no growth was decided")
    edited = {**PLANNED["planner"], "profiles": PLANNED["planner"]["profiles"][1:]}
    simulation.change("one", planner=edited)
    await simulation.look()
    await simulation.reconciler.reconcile((NAMESPACE, "one"))
    assert simulation.status("one").allocation.joining == ()
    await simulation.until(lambda: gpus(simulation) == 8 and simulation.state("one") == "Running")
    has_the_degrees_of(simulation, 8)


@pytest.mark.slow
async def test_a_job_is_launched_again_with_the_degrees_of_its_new_size():
    """Four GPUs, then eight, as another job ends; then four again, since a third one waits."""
    planner = {**PLANNED["planner"], "gpus": [{"gpuType": "fast"}]}  # as many replicas as there are GPUs
    simulation = eight_gpus()
    simulation.add_job("two", stages=(4, 4), totalSteps=100)
    simulation.add_job("one", **{**PLANNED, "planner": planner})
    await simulation.running("one", "two")
    assert gpus(simulation) == 4
    has_the_degrees_of(simulation, 4)
    four = simulation.status("one").allocation.degrees
    await simulation.until(lambda: gpus(simulation) == 8)
    status = simulation.status("one")
    assert (status.launches, dict(status.restarts)) == (2, {"Preempted": 1})
    await simulation.running("one")
    has_the_degrees_of(simulation, 8)
    eight = simulation.status("one").allocation.degrees
    assert (four.tensor, four.data, len(four.layers)) != (eight.tensor, eight.data, len(eight.layers))
    assert "since its degrees follow its size" in simulation.status("one").last_decision.why
    simulation.add_job("three", stages=(4, 4), totalSteps=100_000)
    await simulation.running("one", "three")
    await simulation.until(
        lambda: gpus(simulation) == 4 and simulation.configuration("one").plan.layers == four.layers
    )
    assert simulation.trainers["one"].step > 0


def any_memory(**changes) -> dict:
    """Four GPUs divide the batch of 8 and are faster than five, as long as each holds all 10 layers."""
    layers = [{**LAYER, "repeat": 10, "forwardSeconds": 0.01, "backwardSeconds": 0.02}]
    pipeline = {"minStages": 1, "maxStages": 5, "microbatches": 8, "globalBatchSize": 8}
    planner = {"profiles": [{"layers": layers}], "gpus": [{"gpuType": "fast"}], "bandwidth": 1e11}
    model = {"name": "gpt", "layers": 10}
    return {**PLANNED, "model": model, "planner": planner, "pipeline": pipeline, **changes}


@pytest.mark.parametrize("grow", [True, False])
async def test_gpus_that_would_not_make_a_job_faster_are_others(grow):
    """Of five free ones it takes the four of the fastest plan, and a job that comes later finds the other."""
    simulation = Simulation(nodes={"a": ("fast", 5)}, roundSeconds=30)
    await simulation.run_job("one", **any_memory(grow=grow))
    spec, _ = read_spec(simulation.world.get(JOB, NAMESPACE, "one"))
    assert 5 not in spec.plans["fast"] and gpus(simulation) == spec.largest_gang == 4
    has_the_degrees_of(simulation, 4)
    await simulation.run_job("two", stages=(1, 1), totalSteps=100_000)
    await simulation.ticks(60)
    assert (gpus(simulation), simulation.status("one").launches) == (4, 1)


@pytest.mark.parametrize(("moves", "then"), [(0, 5), (100, 4)])
async def test_a_gang_that_would_be_faster_on_fewer_gpus_goes_on_until_it_may_move(moves, then):
    """Its planner was edited: what it holds is a size that it would not be launched with any more."""
    simulation = Simulation(nodes={"a": ("fast", 5)}, roundSeconds=30, moves={"maxMovesPerHour": moves})
    planned = any_memory()
    planned["planner"] = {**planned["planner"], "gpus": [{"gpuType": "fast", "memory": "900M"}]}
    await simulation.run_job("one", **planned)
    assert gpus(simulation) == 5
    simulation.change("one", planner=any_memory()["planner"])
    await simulation.ticks(60)
    assert (gpus(simulation), simulation.status("one").launches) == (then, 1 + (then < 5))


@pytest.mark.slow
async def test_a_relaunch_counts_as_a_move():
    """Where the hour has no moves left, GPUs that come free do not stop it."""
    simulation = eight_gpus(moves={"maxMovesPerHour": 0})
    simulation.add_job("two", stages=(4, 4), totalSteps=100)
    planner = {**PLANNED["planner"], "gpus": [{"gpuType": "fast"}]}
    simulation.add_job("one", **{**PLANNED, "planner": planner})
    await simulation.until(lambda: simulation.state("two") == "Succeeded")
    await simulation.ticks(60, seconds=5.0)
    status = simulation.status("one")
    assert (status.allocation.gpus, status.launches) == (4, 1)


async def test_the_degrees_of_a_launch_stay_when_its_planner_is_changed():
    """The next launch has others."""
    simulation = eight_gpus()
    await simulation.run_job("one", **PLANNED)
    before = simulation.configuration("one")
    simulation.change("one", planner={**PLANNED["planner"], "bandwidth": 1e6})
    await simulation.suspended("one")
    assert simulation.configuration("one").plan == before.plan
    simulation.change("one", suspend=False)
    await simulation.running("one")
    has_the_degrees_of(simulation, gpus(simulation))
    assert simulation.configuration("one").plan != before.plan


async def test_pools_with_less_memory_than_a_plan_takes_are_left_out_in_words():
    """``planner.gpus`` states more than a pool has: none is launched there, and one that fits is used."""
    pools = {name: {"gpuType": "fast", "memoryPerGpu": "500M"} for name in ("one-pool", "another")}
    nodes = {"a": ("one-pool", 4), "b": ("another", 4)}
    simulation = Simulation(nodes=nodes, pools=pools, roundSeconds=30)
    simulation.add_job("one", **{**PLANNED, "stages": (4, 4)})
    await simulation.ticks(5)
    words = ("on 4 GPUs its plan takes ", "the largest GPU has 500 MB")
    await simulation.refused("one", "ExceedsMemory", *words)
    assert simulation.status("one").launches == 0
    with simulation.changed_pools() as changed:
        changed["another"]["memoryPerGpu"] = "900M"
    await simulation.running("one")
    status = simulation.status("one")
    assert (status.allocation.pool, status.launches) == ("another", 1)
    assert 500e6 < status.allocation.degrees.memory_bytes <= 900e6
    assert "not offered one-pool (has 500 MB)" in status.last_decision.why


async def test_degrees_put_into_the_status_by_hand_are_not_launched():
    """Those that its GPUs do not make up: the operator goes on, and the next launch has its own."""
    simulation = eight_gpus()
    simulation.add_job("one", **PLANNED)
    await simulation.until(lambda: simulation.status("one").allocation is not None)
    assert simulation.world.get(CONFIG_MAP, NAMESPACE, "one-plan") is None
    item = simulation.world.get(JOB, NAMESPACE, "one")
    item["status"]["allocation"]["degrees"] = {"tensor": 2, "data": 1, "microbatches": 8, "layers": [8]}
    simulation.world.put(JOB, item)
    await simulation.running("one")
    assert simulation.configuration("one").parallelism.tensor == 1
    await simulation.relaunched("one")
    has_the_degrees_of(simulation, gpus(simulation))


@pytest.mark.parametrize("later", [True, False])
async def test_reports_of_other_degrees_than_the_specs_are_not_its_speeds(later):
    """A launch goes on when ``planner`` is added or removed; what it reports is of its own degrees."""
    simulation = eight_gpus(moves={"maxMovesPerHour": 0})
    stated = {field: value for field, value in PLANNED.items() if field != "planner"}
    await simulation.run_job("one", **(stated if later else PLANNED))
    measurements = simulation.allocator.decider.measurements
    await simulation.until(lambda: bool(measurements.kinds))
    simulation.change("one", planner=PLANNED["planner"] if later else None)
    spec, _ = read_spec(simulation.world.get(JOB, NAMESPACE, "one"))
    await simulation.ticks(60)
    assert simulation.status("one").launches == 1 and spec.kind not in measurements.kinds


async def test_a_decision_for_another_planner_is_not_launched():
    """Three GPUs hold no two whole replicas, which the job asks for once ``planner`` is removed."""
    simulation = Simulation(nodes={"a": ("fast", 3)}, roundSeconds=30)
    planner = {**PLANNED["planner"], "gpus": [{"gpuType": "fast"}]}
    planner["profiles"] = planner["profiles"][:1]
    simulation.add_job("one", **{**PLANNED, "stages": (1, 8), "planner": planner}, parallelism={"data": 2})
    await simulation.look()
    await simulation.decide()
    simulation.change("one", planner=None)
    await simulation.look()
    await simulation.reconciler.reconcile((NAMESPACE, "one"))
    assert simulation.status("one").allocation is None
    await simulation.running("one")
    assert gpus(simulation) == 2
