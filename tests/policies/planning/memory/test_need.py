"""Whether measured layers fit the GPUs of a pipeline."""

import dataclasses
import random

import pytest
from ballast_policies.planning.launch import LaunchRanks, first_stages, launch_partition, partition_of
from ballast_policies.planning.memory.measured_layers import MeasuredLayers, PipelineForm
from ballast_policies.planning.memory.moments import schedule_of
from ballast_policies.planning.memory.need import MemoryNeed
from ballast_policies.planning.memory.rank_bytes import rank_bytes
from ballast_policies.planning.memory.stage_bytes import sums_of_layers
from ballast_policies.planning.schedules.registry import SCHEDULES, trained_schedules

GB = 10**9


def a_form(schedule="1F1B", positions=1, **changes):
    return PipelineForm(**{"schedule": schedule, "positions": positions, "microbatches": 8, **changes})


def random_layers(rng, count, *, all_bytes):
    def column(most, known=True):
        return tuple(rng.randint(0, most) * GB for _ in range(count)) if known else ()

    return MeasuredLayers(
        held_bytes=column(9),
        activation_bytes=column(3, rng.random() < 0.8),
        output_bytes=column(2, all_bytes),
        gradient_bytes=column(2, all_bytes),
        repeated_bytes=column(2, all_bytes and rng.random() < 0.5),
    )


@pytest.mark.parametrize("schedule", trained_schedules())
def test_what_fits_is_launched_with_stages_that_fit_by_the_forecast(schedule):
    """Outputs, messages, gradients and repeats included; where nothing fits, no cut of little memory does."""
    rng = random.Random(1)
    for positions in (2, 2, 3, 4):
        layers = random_layers(rng, 10, all_bytes=True)
        averaged = rng.random() < 0.5
        form = a_form(schedule, positions, microbatches=12, stages_per_rank=2, averaged=averaged)
        need, (built, facts) = MemoryNeed(layers, form), schedule_of(form)
        memory = need.least(positions)
        assert need.fits(positions, memory)
        assert not need.fits(positions, memory * 0.99)
        placement = tuple(holders[0] for holders in built.stage_ranks)
        ranks = LaunchRanks(placement=placement, memory=(memory,) * positions)
        launched = partition_of(launch_partition(first_stages(10, placement), layers, form, ranks))
        taken = rank_bytes(launched, built, facts, sums_of_layers(layers), form)
        assert max(each.total for each in taken) <= memory * (1 + 1e-6)


@pytest.mark.parametrize(("weights", "gradients"), [(GB, GB), (3 * GB, GB), (4 * GB, 0)])
def test_more_positions_need_less_of_each_gpu(weights, gradients):
    """32 GB of layers with activations that are in flight more often early on: 1F1B keeps the sum even."""
    sizes = {"held_bytes": (4 * GB,) * 8, "weight_bytes": (weights,) * 8, "activation_bytes": (GB,) * 8}
    need = MemoryNeed(MeasuredLayers(**sizes), a_form())
    leasts = [need.least(positions) for positions in (1, 2, 4, 8)]
    assert leasts == sorted(leasts, reverse=True)
    assert leasts[0] == 40 * GB
    # All eight microbatches are in flight before the first gradient of the first stage is there; a layer has
    # no more gradients than it holds beside its weights, none where it does not learn.
    assert leasts[3] == 12 * GB - gradients


@pytest.mark.parametrize(
    "schedule",
    ["Interleaved1F1B", "ZeroBubbleH1", "InterleavedZeroBubble", "ZeroBubbleV", "PipeDreamVerticalSync"],
)
def test_of_very_many_microbatches_those_of_a_full_pipeline_count(schedule):
    """More than are played: 6,000 in each step take what 24 do."""
    layers = random_layers(random.Random(2), 12, all_bytes=True)
    form = a_form(schedule, 4, stages_per_rank=SCHEDULES[schedule].stages_on_a_rank())
    few, many = (
        MemoryNeed(layers, dataclasses.replace(form, microbatches=count)).least(4) for count in (24, 6000)
    )
    assert many == few


def test_all_microbatches_in_flight_take_more_than_a_few():
    """GPipe holds the activations of all eight, 1F1B of two, on each of two positions."""
    layers = MeasuredLayers(held_bytes=(0, 0), activation_bytes=(GB, GB))
    assert MemoryNeed(layers, a_form("GPipe")).least(2) == 8 * GB
    assert MemoryNeed(layers, a_form("1F1B")).least(2) == 2 * GB


def test_what_was_not_measured_fits():
    """No bytes, or fewer layers than positions: nothing is known that would forbid it."""
    assert MemoryNeed(MeasuredLayers(), a_form()).fits(4, 1.0)
    assert MemoryNeed(MeasuredLayers(held_bytes=(GB,)), a_form()).fits(2, 1.0)


def test_a_layer_that_is_too_large_fits_no_number_of_positions():
    """However the model is cut, one position has that layer."""
    need = MemoryNeed(MeasuredLayers(held_bytes=(GB, 31 * GB, GB, GB)), a_form())
    assert [need.fits(positions, 16.0 * GB) for positions in (1, 2, 3, 4)] == [False] * 4
    assert need.layers.largest == (1, 31 * GB)
