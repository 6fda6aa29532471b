"""The speed of a pipeline over unlike GPUs: against all cuts, and the orders of its parts."""

import itertools
import random

import pytest
from ballast_policies.planning.launch import LaunchedPipeline, RankGpu, step_seconds
from ballast_policies.planning.memory.measured_layers import MeasuredLayers, PipelineForm

FORM = PipelineForm(schedule="1F1B", positions=1, microbatches=8)


def pipeline(seconds, held=(), kept=()):
    layers = MeasuredLayers(seconds=tuple(seconds), held_bytes=tuple(held), activation_bytes=tuple(kept))
    return LaunchedPipeline(layers=layers, count=len(seconds), form=FORM)


def cuts(layers, ranks):
    for inner in itertools.combinations(range(1, layers), ranks - 1):
        yield (0, *inner, layers)


@pytest.mark.parametrize("seed", range(30))
def test_the_largest_load_is_that_of_the_best_of_all_cuts(seed):
    """With m microbatches a step takes (m - 1) times the largest load, and all loads once."""
    chance = random.Random(seed)
    count, ranks = chance.randint(3, 7), chance.randint(2, 3)
    seconds = [chance.choice((0.1, 0.2, 0.7, 1.0)) for _ in range(count)]
    speeds = [chance.choice((1.0, 0.5, 0.25)) for _ in range(ranks)]
    found = step_seconds(pipeline(seconds), tuple(RankGpu(speed=speed) for speed in speeds))
    loads = [
        [
            sum(seconds[first:end]) / speed
            for (first, end), speed in zip(itertools.pairwise(cut), speeds, strict=True)
        ]
        for cut in cuts(count, ranks)
    ]
    least = min(max(each) for each in loads)
    possible = [(7 * least + sum(each)) / 8 for each in loads if max(each) == pytest.approx(least)]
    assert any(found == pytest.approx(one) for one in possible)


def test_early_stages_keep_more_microbatches_so_the_order_of_the_parts_decides_whether_it_fits():
    """A layer keeps 1 GB for each microbatch in flight: two on the first of two ranks, one on the last."""
    layers = pipeline([1.0, 1.0], held=(10**9,) * 2, kept=(10**9,) * 2)
    large, small = RankGpu(speed=1.0, memory=3e9), RankGpu(speed=1.0, memory=2e9)
    assert step_seconds(layers, (large, small)) is not None
    assert step_seconds(layers, (small, large)) is None


def test_more_ranks_than_layers_have_no_step_time():
    assert step_seconds(pipeline([1.0]), (RankGpu(speed=1.0),) * 2) is None


def test_unknown_memory_limits_nothing():
    layers = pipeline([1.0, 1.0], held=(10**12,) * 2, kept=(0, 0))
    assert step_seconds(layers, (RankGpu(speed=1.0), RankGpu(speed=1.0, memory=2e12))) is not None
