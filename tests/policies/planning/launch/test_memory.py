"""Whether measured layers fit the GPUs of a pipeline."""

import itertools
import random

import numpy as np
import pytest
from ballast_policies.planning.launch.memory import (
    MeasuredLayers,
    MemoryNeed,
    PipelineForm,
    bytes_on_positions,
)
from ballast_policies.planning.schedules import trained_schedules

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


@pytest.mark.parametrize("seed", range(60))
def test_the_least_memory_is_that_of_the_best_of_all_cuts(seed):
    """Any schedule, layers of unlike bytes: within the thousandth that is promised, and fits agrees."""
    rng = random.Random(seed)
    count = rng.randint(2, 8)
    layers = MeasuredLayers(
        held_bytes=tuple(rng.randint(0, 9) * GB for _ in range(count)),
        activation_bytes=tuple(rng.randint(0, 3) * GB for _ in range(count)) if rng.random() < 0.8 else (),
    )
    schedule = rng.choice(trained_schedules())
    form = a_form(schedule, microbatches=8, stages_per_rank=1 if rng.random() < 0.5 else 2)
    need = MemoryNeed(layers, form)
    positions = rng.randint(1, min(4, count))
    rows = bytes_on_positions(layers, a_form(schedule, positions, stages_per_rank=form.stages_per_rank))
    best = least_by_trying_all(rows)
    assert best <= need.least(positions) * (1 + 1e-9)
    assert need.least(positions) <= best * 1.0011 + 1
    assert need.fits(positions, best)
    assert best == 0 or not need.fits(positions, best * 0.999)


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
