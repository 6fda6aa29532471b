"""PipeDream's partitioner (dissertation 2.4.1) against brute force and its known shapes."""

import pytest
from ballast_policies.planning.partition import PlanningError
from ballast_policies.planning.planners.pipedream import Level, plan_pipedream


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
