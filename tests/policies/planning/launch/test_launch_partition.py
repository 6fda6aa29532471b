"""The first stages of a launch, by layers, speeds and memory; and the speed of one over mixed GPUs."""

import itertools
import random

import pytest
from ballast_policies.planning.launch import (
    LaunchedPipeline,
    LaunchRanks,
    RankGpu,
    first_stages,
    launch_partition,
    step_seconds,
)
from ballast_policies.planning.memory.measured_layers import MeasuredLayers, PipelineForm
from ballast_policies.planning.memory.stage_bytes import bytes_on_positions

from tests.support.examples import first_daily

GB = 10**9


def cut(layers, *, count, memory=(), speeds=(), ranks=2, schedule="1F1B", **options):
    """Numbers of layers of the stages of a pipeline with one stage a rank."""
    placement = tuple(range(ranks))
    form = PipelineForm(schedule=schedule, positions=1, microbatches=8)
    known = LaunchRanks(placement=placement, memory=memory, speeds=speeds)
    stages = launch_partition(first_stages(count, placement), layers, form, known, **options)
    assert [stage.rank for stage in stages] == list(placement)
    assert stages[0].first_layer == 0 and stages[-1].end_layer == count
    return [stage.end_layer - stage.first_layer for stage in stages]


def test_what_wins_little_over_even_stages_leaves_them():
    """Measurements differ by a few per cent from run to run; so would the stages of equal jobs."""
    layers = MeasuredLayers(seconds=(1.0, 1.0, 1.0, 1.03, 1.02, 1.03))
    assert cut(layers, count=6, ranks=2) == [3, 3]
    assert cut(MeasuredLayers(seconds=(1.0,) * 4 + (1.9,)), count=5, min_gain=0.0) == [3, 2]


def test_a_rank_four_times_as_fast_gets_four_times_the_layers():
    """Without any measurement: layers count as alike."""
    assert cut(MeasuredLayers(), count=10, speeds=(4.0, 1.0)) == [8, 2]
    assert cut(MeasuredLayers(), count=10, speeds=(1.0, 4.0)) == [2, 8]


def test_even_stages_that_do_not_fit_are_moved_even_where_nothing_is_won():
    """The first two layers fill a GPU each."""
    layers = MeasuredLayers(held_bytes=(10 * GB, 10 * GB, GB, GB))
    assert cut(layers, count=4, memory=(12.0 * GB,) * 2) == [1, 3]


def test_where_nothing_fits_memory_is_disregarded():
    """What was measured may be out of date; the trainer says what is missing."""
    layers = MeasuredLayers(seconds=(1.0, 1.0, 2.0), held_bytes=(10 * GB,) * 3)
    assert cut(layers, count=3, memory=(1.0 * GB,) * 2) == [2, 1]


@pytest.mark.parametrize(
    "layers",
    [
        MeasuredLayers(),
        MeasuredLayers(seconds=(1.0, 9.0), held_bytes=(GB, GB)),
        MeasuredLayers(seconds=(0.0,) * 6),
    ],
    ids=["nothing", "of another model", "no time"],
)
def test_what_cannot_be_used_leaves_even_stages(layers):
    assert cut(layers, count=6, memory=(1.0,) * 2) == [3, 3]


@pytest.mark.parametrize("seed", first_daily(range(40), 10))
def test_no_cut_that_fits_is_faster(seed):
    """Unlike layers, speeds and memories against all cuts; within the gain for which even stages stay."""
    rng = random.Random(seed)
    count, ranks = rng.randint(2, 8), 0
    ranks = rng.randint(2, min(4, count))
    layers = MeasuredLayers(
        seconds=tuple(rng.uniform(0.1, 3.0) for _ in range(count)),
        held_bytes=tuple(rng.randint(1, 9) * GB for _ in range(count)),
        activation_bytes=tuple(rng.randint(0, 2) * GB for _ in range(count)),
    )
    speeds = tuple(rng.choice((1.0, 2.0, 4.0)) for _ in range(ranks))
    memory = tuple(float(rng.choice((20, 40, 80)) * GB) for _ in range(ranks))
    rows = bytes_on_positions(layers, PipelineForm(schedule="1F1B", positions=ranks, microbatches=8))

    def load(sizes):
        bounds = [0, *itertools.accumulate(sizes)]
        parts = [range(*pair) for pair in itertools.pairwise(bounds)]
        if any(sum(rows[at, part]) > memory[at] for at, part in enumerate(map(list, parts))):
            return float("inf")
        return max(sum(layers.seconds[k] for k in part) / speeds[at] for at, part in enumerate(parts))

    every = [
        [end - first for first, end in itertools.pairwise((0, *inner, count))]
        for inner in itertools.combinations(range(1, count), ranks - 1)
    ]
    best = min(map(load, every))
    found = load(cut(layers, count=count, ranks=ranks, speeds=speeds, memory=memory, min_gain=0.01))
    assert found <= best / 0.99 or best == float("inf")


FORM = PipelineForm(schedule="1F1B", positions=1, microbatches=8)


def pipeline(seconds, held=(), kept=()):
    layers = MeasuredLayers(seconds=tuple(seconds), held_bytes=tuple(held), activation_bytes=tuple(kept))
    return LaunchedPipeline(layers=layers, count=len(seconds), form=FORM)


def cuts(layers, ranks):
    for inner in itertools.combinations(range(1, layers), ranks - 1):
        yield (0, *inner, layers)


@pytest.mark.parametrize("seed", first_daily(range(30), 8))
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
