"""A cut's bytes: forecast, launch, balancer and planner answer the same."""

import dataclasses

import pytest
from ballast_operator.views.spec import spec_of_launch
from ballast_policies.contract.errors import ContractError
from ballast_policies.contract.job.job import JobConfig
from ballast_policies.planning.launch import stages_over
from ballast_policies.planning.memory.measured_layers import MeasuredLayers
from ballast_policies.planning.memory.need import bytes_of_cuts
from ballast_policies.planning.memory.stage_bytes import stage_bytes
from ballast_policies.planning.partition import Partition
from ballast_policies.planning.profile import ProfiledLayer
from ballast_policies.planning.rank_capacity import RankCapacity
from ballast_policies.planning.schedules.registry import SCHEDULES, trained_schedules
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.forecast import forecast
from ballast_trainer.loop.replanning import LayerSizes, staged_pipeline, within_memory
from ballast_trainer.pipeline.layout import ScheduleRequest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.trainer.layers.trained_layers import first_rank


@st.composite
def configs(draw):
    """A job over up to four positions of the pipeline: any schedule, replicas, data parallelism."""
    schedule = draw(st.sampled_from(trained_schedules()))
    kind, positions = SCHEDULES[schedule], draw(st.integers(1, 4))
    pipeline = {"maxStages": positions, "schedule": schedule}
    if kind.stages_per_rank is None:
        pipeline["stagesPerRank"] = draw(st.integers(2, 3))
    data = draw(st.integers(1, 3))
    if kind.build_replicated is not None and positions > 1 and draw(st.booleans()):
        pipeline["replicas"] = draw(st.lists(st.integers(1, 3), min_size=positions, max_size=positions))
        data = 1
    pipeline["microbatches"] = pipeline["globalBatchSize"] = data * draw(st.integers(1, 9))
    fields = {
        "totalSteps": 10,
        "model": {"name": "gpt", "layers": 13, "args": {"dim": 16, "heads": 2, "context": 8}},
        "pipeline": pipeline,
        "parallelism": {"data": data},
        "training": {"optimizer": draw(st.sampled_from(["adamw", "sgd"])), "clipNorm": 0.0},
        "rebalance": {"memoryBytes": 10**6},
    }
    try:
        return JobConfig.from_mapping(fields)
    except ContractError:
        assume(False)


@st.composite
def measured(draw):
    """Bytes of 13 layers, as one that trains has measured them."""

    def column(top):
        return tuple(draw(st.lists(st.integers(0, top), min_size=13, max_size=13)))

    return MeasuredLayers(
        held_bytes=column(80),
        weight_bytes=column(20),
        activation_bytes=column(30),
        output_bytes=column(20),
        gradient_bytes=column(9),
        repeated_bytes=column(9) if draw(st.booleans()) else (0,) * 13,
    )


def trained(config, ranks, placement, cut, layers):
    """The state of the trainer's rank 0 that has measured these layers."""
    training = first_rank(config, stages_over(cut, placement), ranks, config.parallelism.data)
    passing = (*layers.output_bytes, *layers.gradient_bytes, *layers.repeated_bytes)
    training.profile.add([0.1] * 39, [*layers.activation_bytes, *passing])
    return training


@pytest.mark.slow
@examples(60)
@given(data=st.data())
def test_forecast_launch_and_balancer_answer_the_same_bytes(data):
    """Of any job, any layers and any cut, on each rank."""
    config = data.draw(configs())
    pipeline = config.pipeline
    ranks = sum(pipeline.used_replicas) or pipeline.max_stages * config.parallelism.data
    positions = ranks // config.parallelism.data
    try:
        request = ScheduleRequest.of(config, positions)
        placement = request.placement()
    except ConfigurationError:
        assume(False)
    inner = st.sets(st.integers(1, 12), min_size=len(placement) - 1, max_size=len(placement) - 1)
    cut = Partition(bounds=(0, *sorted(data.draw(inner)), 13))
    layers = data.draw(measured())
    columns = {name: values for name, values in dataclasses.asdict(layers).items() if name != "seconds"}
    rows = [
        ProfiledLayer(forward_seconds=1.0, backward_seconds=1.0, **dict(zip(columns, row, strict=True)))
        for row in zip(*columns.values(), strict=True)
    ]
    expected = [rank.bytes for rank in forecast(config, rows, cut, ranks=ranks).ranks]

    training = trained(config, ranks, placement, cut, layers)
    sizes = LayerSizes(bytes=layers.held_bytes, parameters=(1,) * 13, weight_bytes=layers.weight_bytes)
    staged = staged_pipeline(training, training.profile.costs(), placement, RankCapacity(), sizes)
    spec = spec_of_launch(config.to_json(), team="")
    form = dataclasses.replace(spec.pipeline_form(), positions=spec.positions(ranks))
    if staged is not None:
        assert list(staged.taken(cut)) == pytest.approx(expected)
        assert list(bytes_of_cuts(layers, form)(cut)) == pytest.approx(expected)
        return
    # Of a stage with replicas, the fullest of them.
    firsts = [*placement, positions]
    by_stage = [max(expected[firsts[i] : firsts[i + 1]]) for i in range(len(placement))]
    balanced = within_memory(training, sizes, RankCapacity(), 10**6).bytes_taken(cut)
    assert balanced.tolist() == pytest.approx(by_stage)
    assert stage_bytes(layers, form).of_cut(cut).tolist() == pytest.approx(by_stage)
