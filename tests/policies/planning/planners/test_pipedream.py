"""PipeDream's partitioner (dissertation 2.4.1) against brute force and its known shapes."""

import itertools

import pytest
from ballast_policies.planning import PlanningError
from ballast_policies.planning.planners import Level, plan_pipedream
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples


def compositions(total, parts):
    for cuts in itertools.combinations(range(1, total), parts - 1):
        yield list(itertools.pairwise((0, *cuts, total)))


def brute_force(inner, first, end, level, weights, outputs):
    """Slowest stage of the best pipeline over one level: every cut, every split of the components."""
    best = float("inf")
    layers, m = end - first, level.components
    for parts in range(1, min(layers, m) + 1):
        for stages in compositions(layers, parts):
            for split in compositions(m, parts):
                worst = 0.0
                for index, ((a, b), (x, y)) in enumerate(zip(stages, split, strict=True)):
                    replicas = y - x
                    weight = sum(weights[first + a : first + b])
                    sync = 2 * (replicas - 1) * weight / level.bandwidth
                    worst = max(worst, max(inner(first + a, first + b), sync) / replicas)
                    if index:
                        worst = max(worst, 2 * outputs[first + a - 1] / level.bandwidth)
                best = min(best, worst)
    return best


profile = st.integers(1, 7).flatmap(
    lambda layers: st.tuples(
        *(st.lists(st.floats(0.1, 9.0), min_size=layers, max_size=layers) for _ in range(3))
    )
)


@given(profile=profile, m=st.integers(1, 4), bandwidth=st.floats(0.5, 100.0))
def test_pipedream_one_level_equals_brute_force(profile, m, bandwidth):
    """Every contiguous cut with every number of replicas."""
    seconds, weights, outputs = profile
    level = Level(components=m, bandwidth=bandwidth)
    plan = plan_pipedream(seconds, weights, outputs, [level])
    want = brute_force(lambda a, b: sum(seconds[a:b]), 0, len(seconds), level, weights, outputs)
    assert plan.seconds_per_microbatch == pytest.approx(want, rel=1e-9)
    assert sum(stage.replicas for stage in plan.stages) == m
    assert [stage.first_layer for stage in plan.stages][1:] == [s.end_layer for s in plan.stages][:-1]


@examples(40)
@given(profile=profile, m=st.tuples(st.integers(1, 3), st.integers(1, 2)), slow=st.floats(0.5, 10.0))
def test_pipedream_two_levels_equal_brute_force(profile, m, slow):
    """Servers of GPUs: the inner level's best pipeline is the compute of the outer."""
    seconds, weights, outputs = profile
    inner, outer = Level(components=m[0], bandwidth=50.0), Level(components=m[1], bandwidth=slow)
    plan = plan_pipedream(seconds, weights, outputs, [inner, outer])

    def server(a, b):
        return brute_force(lambda x, y: sum(seconds[x:y]), a, b, inner, weights, outputs)

    want = brute_force(server, 0, len(seconds), outer, weights, outputs)
    assert plan.seconds_per_microbatch == pytest.approx(want, rel=1e-9)
    assert sum(stage.replicas for stage in plan.stages) == m[0] * m[1]


def test_pipedream_convolutions_before_fat_layers_give_15_1():
    """VGG-16's shape: compute with few weights is replicated, the fully connected end is not."""
    seconds = [1.0] * 15 + [0.5, 0.5]
    weights = [1e5] * 15 + [4e9, 4e8]
    outputs = [1e6] * 17
    plan = plan_pipedream(seconds, weights, outputs, [Level(components=16, bandwidth=1e9)])
    assert plan.configuration == "15-1"


def test_pipedream_tiny_weights_give_pure_data_parallelism():
    """One stage on all ranks."""
    plan = plan_pipedream([1.0] * 8, [1.0] * 8, [1e9] * 8, [Level(components=4, bandwidth=1e6)])
    assert plan.configuration == "4"
    assert plan.seconds_per_microbatch == pytest.approx(2.0)


def test_pipedream_heavy_weights_and_even_layers_give_a_straight_pipeline():
    """GNMT's shape: no stage is worth replicating."""
    plan = plan_pipedream([1.0] * 8, [1e9] * 8, [1.0] * 8, [Level(components=4, bandwidth=1e6)])
    assert plan.configuration == "1-1-1-1"


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        (([], [], [], [Level(components=1, bandwidth=1.0)]), "one value a layer"),
        (([1.0], [1.0], [1.0, 2.0], [Level(components=1, bandwidth=1.0)]), "one value a layer"),
        (([1.0], [1.0], [1.0], [Level(components=0, bandwidth=1.0)]), "at least one component"),
    ],
)
def test_a_profile_or_level_that_makes_no_sense_is_refused(arguments, want):
    """With the numbers."""
    with pytest.raises(PlanningError, match=want):
        plan_pipedream(*arguments)
