"""What a stage takes, by table, against the schedule played action by action."""

import itertools

import pytest
from ballast_policies.planning.memory.measured_layers import MeasuredLayers, PipelineForm
from ballast_policies.planning.memory.moments import schedule_of
from ballast_policies.planning.memory.rank_bytes import rank_bytes
from ballast_policies.planning.memory.stage_bytes import (
    bytes_on_positions,
    reserves,
    stage_bytes,
    sums_of_layers,
)
from ballast_policies.planning.partition import Partition
from ballast_policies.planning.schedules.registry import SCHEDULES, trained_schedules
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples

ONE_STAGE = [name for name in trained_schedules() if SCHEDULES[name].stages_per_rank == 1]
REPLICATED = [name for name in ONE_STAGE if SCHEDULES[name].build_replicated is not None]


@st.composite
def measured_layers(draw, least=1, most=8):
    """Layers of different bytes, some of which were not measured."""
    count = draw(st.integers(least, most))

    def column(top):
        return tuple(draw(st.lists(st.integers(0, top), min_size=count, max_size=count)))

    return MeasuredLayers(
        held_bytes=column(90),
        activation_bytes=column(30) if draw(st.booleans()) else (),
        output_bytes=column(20) if draw(st.booleans()) else (),
        gradient_bytes=column(20) if draw(st.booleans()) else (),
        repeated_bytes=column(20) if draw(st.booleans()) else (),
        weight_bytes=column(40) if draw(st.booleans()) else (),
    )


@st.composite
def cuts(draw, layers, ranks):
    inner = st.sets(st.integers(1, layers - 1), min_size=ranks - 1, max_size=ranks - 1)
    return Partition(bounds=(0, *sorted(draw(inner)), layers) if layers > 1 else (0, layers))


def by_playing(layers, form, cut):
    """Bytes of each position: of one with replicas, of the fullest."""
    schedule, facts = schedule_of(form)
    ranks = rank_bytes(cut, schedule, facts, sums_of_layers(layers), form)
    return [max(ranks[rank].total for rank in holders) for holders in schedule.stage_ranks]


@pytest.mark.slow
@examples(200)
@given(data=st.data())
def test_a_stages_bytes_are_those_of_the_schedule_played(data):
    """Of every schedule with one stage a rank, any cut, number of microbatches and replicas."""
    layers = data.draw(measured_layers(least=2))
    count = len(layers.held_bytes)
    schedule = data.draw(st.sampled_from(ONE_STAGE))
    positions = data.draw(st.integers(2, min(5, count)))
    replicas, microbatches = (), data.draw(st.integers(1, 12))
    if schedule in REPLICATED and data.draw(st.booleans()):
        replicas = tuple(data.draw(st.lists(st.integers(1, 3), min_size=positions, max_size=positions)))
        microbatches *= 6
    elif SCHEDULES[schedule].equal_rounds or schedule == "PipeDream2BW":
        microbatches *= positions
    form = PipelineForm(
        schedule=schedule,
        positions=positions,
        microbatches=microbatches,
        replicas=replicas,
        averaged=data.draw(st.booleans()),
        gradient_shares=data.draw(st.sampled_from([1] if SCHEDULES[schedule].splits_backward else [1, 4])),
        weights_shared=data.draw(st.booleans()),
    )
    cut = data.draw(cuts(count, positions))
    taken = stage_bytes(layers, form).of_cut(cut)
    assert taken.tolist() == pytest.approx(by_playing(layers, form, cut), rel=1e-12, abs=1e-9)
    rows, reserve = bytes_on_positions(layers, form), reserves(layers, form)
    bound = [
        rows[at, first:end].sum() + reserve[at]
        for at, (first, end) in enumerate(itertools.pairwise(cut.bounds))
    ]
    assert all(found <= most + 1e-9 for found, most in zip(taken, bound, strict=True))


def test_a_bound_has_messages_beside_averaged_gradients():
    layers = MeasuredLayers(held_bytes=(0, 0), output_bytes=(3, 0), weight_bytes=(0, 8))
    form = PipelineForm(schedule="1F1B", positions=2, microbatches=1, averaged=True)
    taken = stage_bytes(layers, form).of_cut(Partition(bounds=(0, 1, 2)))
    assert (reserves(layers, form) >= taken).all()


@pytest.mark.slow
@examples(100)
@given(data=st.data())
def test_the_least_memory_is_that_of_the_best_of_all_cuts(data):
    layers = data.draw(measured_layers())
    count = len(layers.held_bytes)
    positions = data.draw(st.integers(1, min(4, count)))
    form = PipelineForm(
        schedule=data.draw(st.sampled_from(["1F1B", "GPipe", "PipeDream"])),
        positions=positions,
        microbatches=data.draw(st.integers(1, 8)),
    )
    found = stage_bytes(layers, form)
    every = itertools.combinations(range(1, count), positions - 1)
    best = min(found.of_cut(Partition(bounds=(0, *cut, count))).max() for cut in every)
    assert found.least() == pytest.approx(best, rel=1e-12)
