"""The first plan of a launch: the spec's share of it, and stages by what was measured of the kind."""

import itertools

import pytest
from ballast_policies.contract.job.job import JobConfig
from ballast_policies.contract.plan import Plan
from ballast_policies.planning.schedules.registry import SCHEDULES, build_schedule, trained_schedules
from ballast_policies.planning.schedules.schedule import ScheduleError

from tests.contract.examples import EXAMPLES, at_default
from tests.operator.loops.simulated.simulation import Simulation
from tests.operator.views.builders import a_config, a_spec
from tests.support.examples import first_fast

BATCH = {"microbatches": 12, "globalBatchSize": 12}


async def launched(**spec) -> tuple[Plan, JobConfig]:
    """The plan and the configuration of a job that runs on a pool of four GPUs."""
    simulation = Simulation(nodes={"a": ("fast", 4)})
    await simulation.run_job("one", **spec)
    return simulation.plan("one"), simulation.configuration("one")


@pytest.mark.parametrize(
    ("pipeline", "ranks"),
    [
        ({"schedule": "1F1B"}, [0, 1, 2, 3]),
        ({"schedule": "Interleaved1F1B"}, [0, 1, 2, 3] * 2),
        ({"schedule": "LoopedBFS", "stagesPerRank": 3}, [0, 1, 2, 3] * 3),
        ({"schedule": "ZeroBubbleV"}, [0, 1, 2, 3, 3, 2, 1, 0]),
    ],
    ids=lambda value: value["schedule"] if isinstance(value, dict) else "",
)
async def test_the_first_plan_has_the_stages_of_the_schedule(pipeline, ranks):
    """As many a rank as it wants, each where the schedule has it, the layers spread evenly over all."""
    plan, _ = await launched(
        model={"name": "gpt", "layers": 13}, pipeline={**BATCH, "minStages": 4, "maxStages": 4, **pipeline}
    )
    assert [stage.rank for stage in plan.stages] == ranks
    assert plan.stages[-1].end_layer == 13
    assert {stage.end_layer - stage.first_layer for stage in plan.stages} <= {
        13 // len(ranks),
        13 // len(ranks) + 1,
    }


@pytest.mark.parametrize(("layers", "ranks"), [(8, 4), (7, 3), (3, 1)])
async def test_a_gang_is_no_larger_than_the_layers_allow(layers, ranks):
    """Each rank of an interleaved pipeline needs two; a rank alone has the whole model."""
    pipeline = {**BATCH, "maxStages": min(4, layers), "schedule": "Interleaved1F1B"}
    plan, _ = await launched(model={"name": "gpt", "layers": layers}, pipeline=pipeline)
    assert len(plan.ranks) == ranks
    assert len(plan.stages) == (2 * ranks if ranks > 1 else 1)


@pytest.mark.parametrize(
    ("parallelism", "stages", "ranks"), [({"tensor": 2}, 3, 4), ({"data": 4}, 2, 4), ({"tensor": 3}, 4, 3)]
)
async def test_a_gang_fills_whole_positions_of_the_pipeline(parallelism, stages, ranks):
    """Four GPUs are two positions of two ranks, one of four, or one of three with a GPU left over."""
    plan, config = await launched(
        model={"name": "gpt", "layers": 8}, parallelism=parallelism, pipeline={**BATCH, "maxStages": stages}
    )
    each = config.parallelism.tensor * config.parallelism.data
    assert len(plan.ranks) == ranks
    assert [stage.rank for stage in plan.stages] == list(range(ranks // each))


async def test_replicas_of_stages_fix_the_size_of_the_gang():
    """The first stage has two ranks and twice the layers of the second."""
    plan, _ = await launched(
        model={"name": "gpt", "layers": 9}, pipeline={**BATCH, "maxStages": 2, "replicas": [2, 1]}, repack={}
    )
    assert len(plan.ranks) == 3
    assert [(stage.rank, stage.end_layer) for stage in plan.stages] == [(0, 6), (2, 9)]


async def test_a_gang_has_a_size_that_its_schedule_exists_for():
    """Ten microbatches do not go into equal rounds over three ranks: two train."""
    pipeline = {"microbatches": 10, "globalBatchSize": 10, "maxStages": 3, "schedule": "Interleaved1F1B"}
    plan, _ = await launched(pipeline=pipeline)
    assert len(plan.ranks) == 2


def test_a_gang_of_replicas_has_a_microbatch_of_each_for_every_stage():
    """Of four microbatches each of two replicas has two: three stages would not run."""
    pipeline = {"microbatches": 4, "globalBatchSize": 4, "maxStages": 3, "schedule": "1F1B"}
    spec = a_spec(config=a_config(pipeline=pipeline, parallelism={"data": 2}))
    assert [ranks for ranks in range(1, 9) if spec.suits(ranks)] == [2, 4]


@pytest.mark.parametrize("schedule", first_fast(trained_schedules(), 2))
def test_a_schedule_can_be_built_for_every_size_that_it_suits(schedule):
    for ranks, microbatches in itertools.product(range(1, 8), range(7, 25)):
        pipeline = {"schedule": schedule, "microbatches": microbatches, "globalBatchSize": microbatches}
        spec = a_spec(config=a_config(pipeline={**pipeline, "maxStages": 4}))
        each = SCHEDULES[schedule].stages_on_a_rank()
        try:
            build_schedule(schedule, ranks=ranks, microbatches=microbatches, chunks=each)
        except ScheduleError:
            # PipeDream2BW is built again for each step's microbatches, by the trainer.
            assert not spec.suits(ranks) or schedule == "PipeDream2BW"
        else:
            assert spec.suits(ranks)


MODEL = {"name": "gpt", "layers": 6}
MEASURED = {"pace": 1, "layers": (0.1, 0.1, 0.1, 0.1, 0.3, 0.3), "layer_bytes": (10**9,) * 6}
"""A trainer that reports seconds and bytes of six layers, of which the last are dear."""


def a_cluster(**spec):
    pools = [{"name": "gpu", "nodeSelector": {"pool": "gpu"}, "gpuType": "gpu", **spec}]
    return Simulation(nodes={"a": ("gpu", 4)}, nodePools=pools)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (4, 2)),
        ({"rebalance": {"enabled": False}}, (3, 3)),
        ({"rebalance": {"by": "parameters"}}, (3, 3)),
        ({"model": {"name": "gpt", "layers": 6, "args": {"width": 512}}}, (3, 3)),
    ],
    ids=["of the kind", "its layers stay where they are", "parameters are spread", "another model"],
)
async def test_the_second_job_of_a_kind_starts_with_the_stages_of_the_first_ones_layers(changes, expected):
    """The first starts with even ones: nothing is known of its layers."""
    simulation = a_cluster()
    await simulation.run_job("first", model=MODEL, totalSteps=1000, trainer=MEASURED)
    assert simulation.cut("first") == (3, 3)
    await simulation.ticks(3)
    await simulation.run_job("second", **{"model": MODEL, **changes})
    assert simulation.cut("second") == expected


async def test_measured_bytes_keep_jobs_of_the_kind_from_gpus_that_they_do_not_fit():
    """Two GPUs with 2.5 GB do not hold six layers of 1 GB; the gang that runs stays."""
    simulation = a_cluster(memoryPerGpu="2500M")
    await simulation.run_job("first", model=MODEL, totalSteps=1000, trainer=MEASURED)
    await simulation.ticks(3)
    simulation.add_job("second", model=MODEL)
    await simulation.refused(
        "second", "ExceedsMemory", "on 2 GPUs its layers take at least 3 GB of the fullest one"
    )
    assert simulation.state("first") == "Running"


EXAMPLE: JobConfig = EXAMPLES["config"]

EXCLUDED = {
    "pipeline.replicas",
    "plan",
    "training.rate_factor",
    "data.collate",
    "evaluation.data.pad_to_multiple_of",
    "evaluation.data.packing",
    "evaluation.data.shift_labels",
}
"""Fields at their defaults in the example: it has tensor and data parallelism, which exclude replicas, a
decay of the learning rate, which excludes a schedule of the user's own, data that is padded, and data for
evaluations that a function collates. It may shrink, which a plan
excludes: see ``mixed/test_life.py``."""


def test_the_example_sets_every_field():
    """A new field that it leaves at its default would not be seen to arrive."""
    assert set(at_default(EXAMPLE)) == EXCLUDED


async def test_every_field_of_a_training_job_arrives_at_its_trainer():
    """Tensor and data parallelism, stragglers, schedule, metrics and all the rest, as the user wrote them."""
    simulation = Simulation(nodes=dict.fromkeys("ab", ("fast", 8)), roundSeconds=600)
    await simulation.run_job("full", **{**EXAMPLE.to_dict(), "totalSteps": EXAMPLE.total_steps})
    assert simulation.configuration("full") == EXAMPLE
    allocation = simulation.status("full").allocation
    assert (allocation.gpus, allocation.gpus_per_pod) == (16, 4)
