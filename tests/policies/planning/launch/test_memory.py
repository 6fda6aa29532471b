"""Whether measured layers fit the GPUs of a pipeline."""

import itertools
import random

import numpy as np
import pytest
from ballast_policies.planning.launch.first_cut import LaunchRanks, first_cut
from ballast_policies.planning.launch.measured_layers import MeasuredLayers, PipelineForm
from ballast_policies.planning.launch.memory import MemoryNeed
from ballast_policies.planning.launch.position_bytes import bytes_on_positions, schedule_of
from ballast_policies.planning.launch.rank_bytes import rank_bytes
from ballast_policies.planning.schedules import SCHEDULES, trained_schedules
from ballast_policies.planning.stages import first_stages, partition_of

GB = 10**9


def a_form(schedule="1F1B", positions=1, **changes):
    return PipelineForm(**{"schedule": schedule, "positions": positions, "microbatches": 8, **changes})


def least_by_trying_all(rows: np.ndarray) -> float:
    """The smallest fullest position over all cuts."""
    positions, layers = rows.shape
    return min(
        max(
            rows[at, first:end].sum() for at, (first, end) in enumerate(itertools.pairwise((0, *cut, layers)))
        )
        for cut in itertools.combinations(range(1, layers), positions - 1)
    )


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


@pytest.mark.parametrize("seed", range(40))
def test_the_least_memory_is_that_of_the_best_of_all_cuts(seed):
    """One stage a rank, layers of unlike bytes: within the thousandth that is promised, and fits agrees."""
    rng = random.Random(seed)
    count = rng.randint(2, 8)
    layers = random_layers(rng, count, all_bytes=False)
    schedule = rng.choice([name for name in trained_schedules() if SCHEDULES[name].stages_per_rank == 1])
    need = MemoryNeed(layers, a_form(schedule))
    positions = rng.randint(1, min(4, count))
    best = least_by_trying_all(bytes_on_positions(layers, a_form(schedule, positions)))
    assert best <= need.least(positions) * (1 + 1e-9)
    assert need.least(positions) <= best * 1.0011 + 1
    assert need.fits(positions, best)
    assert best == 0 or not need.fits(positions, best * 0.999)


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
        launched = partition_of(first_cut(first_stages(10, placement), layers, form, ranks))
        rows, buffered = layers.rows(form.optimizer), not SCHEDULES[schedule].asynchronous
        taken = rank_bytes(launched, built, facts, rows, buffered=buffered, averaged=averaged)
        assert max(each.total for each in taken) <= memory * (1 + 1e-6)


def test_more_positions_need_less_of_each_gpu():
    """32 GB of layers with activations that are in flight more often early on: 1F1B keeps the sum even."""
    need = MemoryNeed(MeasuredLayers(held_bytes=(4 * GB,) * 8, activation_bytes=(GB,) * 8), a_form())
    leasts = [need.least(positions) for positions in (1, 2, 4, 8)]
    assert leasts == sorted(leasts, reverse=True)
    assert leasts[0] == pytest.approx(40 * GB, rel=2e-3)
    assert leasts[3] == pytest.approx(12 * GB, rel=2e-3)


def test_all_microbatches_in_flight_take_more_than_a_few():
    """GPipe holds the activations of all eight, 1F1B of two, on each of two positions."""
    layers = MeasuredLayers(held_bytes=(0, 0), activation_bytes=(GB, GB))
    assert MemoryNeed(layers, a_form("GPipe")).least(2) == pytest.approx(8 * GB, rel=2e-3)
    assert MemoryNeed(layers, a_form("1F1B")).least(2) == pytest.approx(2 * GB, rel=2e-3)


def test_what_was_not_measured_fits():
    """No bytes, or fewer layers than positions: nothing is known that would forbid it."""
    assert MemoryNeed(MeasuredLayers(), a_form()).fits(4, 1.0)
    assert MemoryNeed(MeasuredLayers(held_bytes=(GB,)), a_form()).fits(2, 1.0)


def test_a_layer_that_is_too_large_fits_no_number_of_positions():
    """However the model is cut, one position has that layer."""
    need = MemoryNeed(MeasuredLayers(held_bytes=(GB, 31 * GB, GB, GB)), a_form())
    assert [need.fits(positions, 16.0 * GB) for positions in (1, 2, 3, 4)] == [False] * 4
    assert need.layers.largest == (1, 31 * GB)
