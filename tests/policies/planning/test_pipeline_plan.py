"""Whole pipeline plans: faster than the even split, within memory, and what they say holds together."""

import dataclasses

import numpy as np
import pytest
from ballast_policies.planning.partition import PlanningError
from ballast_policies.planning.pipeline_plan import plan_pipeline
from ballast_policies.planning.profile import GpuKind, LayerProfile
from ballast_policies.planning.schedules.registry import SCHEDULES
from ballast_policies.planning.schedules.schedule import ScheduleError
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples


def make_profile(seconds, *, held=1.0, activation=0.1, output=0.0, weight=0.5):
    n = len(seconds)
    return LayerProfile(
        forward_seconds=tuple(s / 3 for s in seconds),
        backward_seconds=tuple(2 * s / 3 for s in seconds),
        held_bytes=(held,) * n,
        weight_bytes=(weight,) * n,
        activation_bytes=(activation,) * n,
        output_bytes=(output,) * n,
    )


@pytest.mark.slow
@examples(25)
@given(
    seconds=st.lists(st.floats(0.1, 5.0), min_size=8, max_size=14),
    schedule=st.sampled_from(sorted(SCHEDULES)),
    slow=st.floats(0.2, 1.0),
    bandwidth=st.sampled_from([None, 10.0]),
)
def test_a_plan_is_complete_and_never_slower_than_the_even_split(seconds, schedule, slow, bandwidth):
    """Every layer on one stage, every GPU used; the even split is at best as fast."""
    plan = plan_pipeline(
        make_profile(seconds, output=1.0),
        [GpuKind(gpu_type="a", count=2), GpuKind(gpu_type="b", count=1, speed=slow)],
        microbatches=6,
        schedule=schedule,
        chunks=2,
        bandwidth=bandwidth,
    )
    assert [stage.first_layer for stage in plan.stages] == [0, *(s.end_layer for s in plan.stages[:-1])]
    assert plan.stages[-1].end_layer == len(seconds)
    assert sorted(plan.gpu_types) == ["a", "a", "b"]
    assert plan.bubble.idle == pytest.approx(plan.trace.idle_fraction)
    assert plan.step_seconds <= plan.even_step_seconds * (1 + 1e-9)


def test_a_fast_gpu_gets_more_layers():
    """In proportion to its speed, and the prediction is the simulator's."""
    plan = plan_pipeline(
        make_profile([1.0] * 12),
        [GpuKind(gpu_type="h100", count=1, speed=3.0), GpuKind(gpu_type="v100", count=1)],
        microbatches=8,
    )
    layers = {stage.gpu_type: stage.end_layer - stage.first_layer for stage in plan.stages}
    assert layers == {"h100": 9, "v100": 3}
    assert plan.imbalance == pytest.approx(0.0, abs=1e-9)
    assert plan.even_step_seconds / plan.step_seconds > 1.5


def test_activations_in_flight_count_against_the_memory():
    """GPipe keeps all 16 microbatches and does not fit where 1F1B does."""
    profile = make_profile([1.0] * 8, activation=1.0)
    gpus = [GpuKind(gpu_type="a", count=4, memory_bytes=14.0)]
    plan = plan_pipeline(profile, gpus, microbatches=16)
    assert max(stage.bytes for stage in plan.stages) <= 14.0
    with pytest.raises(PlanningError, match="fewer microbatches in flight"):
        plan_pipeline(profile, gpus, microbatches=16, schedule="GPipe")


def test_what_is_there_for_a_moment_counts_against_the_memory():
    """Two stages a rank, whose layers alone would fit: messages and outputs do not."""
    profile = dataclasses.replace(make_profile([1.0] * 6, activation=0.0), output_bytes=(50,) * 6)
    gpus = [GpuKind(gpu_type="a", count=2, memory_bytes=36.0)]
    with pytest.raises(PlanningError, match="times its memory"):
        plan_pipeline(profile, gpus, microbatches=2, schedule="LoopedBFS", chunks=2)
    plan = plan_pipeline(
        profile, [GpuKind(gpu_type="a", count=2)], microbatches=2, schedule="LoopedBFS", chunks=2
    )
    assert max(stage.bytes for stage in plan.stages) > 36.0


def test_weight_versions_count_against_the_memory():
    """PipeDream's first stage holds one version a microbatch in flight."""
    profile = make_profile([1.0] * 4, activation=0.0)
    plan = plan_pipeline(profile, [GpuKind(gpu_type="a", count=4)], microbatches=8, schedule="PipeDream")
    assert [stage.bytes for stage in plan.stages] == [1.0 + 3 * 0.5, 1.0 + 2 * 0.5, 1.0 + 0.5, 1.0]


def test_slow_links_change_the_plan():
    """The step is no slower than that of the plan made for free links, played over the slow ones."""
    random = np.random.default_rng(1)
    profile = make_profile(random.uniform(0.5, 1.5, 16).tolist(), output=1.0)
    gpus = [GpuKind(gpu_type="a", count=4)]
    slow = plan_pipeline(profile, gpus, microbatches=16, bandwidth=1.0)
    free = plan_pipeline(profile, gpus, microbatches=16)
    assert slow.step_seconds > free.step_seconds
    assert slow.step_seconds <= slow.even_step_seconds


@pytest.mark.parametrize(
    ("error", "arguments", "want"),
    [
        (PlanningError, {"gpus": 9}, "8 layers cannot be cut into 9 stages"),
        (PlanningError, {"schedule": "Interleaved1F1B", "chunks": 3, "gpus": 4}, "12 stages"),
        (ScheduleError, {"schedule": "nonsense"}, "is not one of 1F1B"),
    ],
)
def test_impossible_requests_are_refused(error, arguments, want):
    gpus = [GpuKind(gpu_type="a", count=arguments.pop("gpus", 2))]
    with pytest.raises(error, match=want):
        plan_pipeline(make_profile([1.0] * 8), gpus, **({"microbatches": 12} | arguments))
    with pytest.raises(PlanningError, match="every layer needs every value"):
        LayerProfile(
            forward_seconds=(1.0,),
            backward_seconds=(),
            held_bytes=(1.0,),
            weight_bytes=(1.0,),
            activation_bytes=(1.0,),
            output_bytes=(1.0,),
        )
