"""When to look at the partition, and whether a move kept its promise."""

import numpy as np
import pytest
from ballast_policies.planning.balancers.exact import exact_partition
from ballast_policies.planning.balancers.registry import BalancerInput
from ballast_policies.planning.balancers.several_stages import StagedPipeline
from ballast_policies.planning.following.looking import CheckTimer, lost_seconds, measured_worse
from ballast_policies.planning.partition import Partition
from ballast_policies.planning.rank_capacity import RankCapacity
from ballast_policies.planning.schedules.registry import build_schedule
from ballast_policies.planning.step_time import predict_step_seconds
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples


@given(
    seconds=st.lists(st.floats(0, 10), min_size=4, max_size=24),
    ranks=st.integers(1, 4),
    microbatches=st.integers(1, 16),
    min_gain=st.sampled_from([0.0, 0.03, 0.3]),
    slow=st.sampled_from([None, 0.5]),
)
def test_what_is_lost_is_the_gain_of_the_best_partition(seconds, ranks, microbatches, min_gain, slow):
    """The bound that saves looking for it hides no gain of at least minGain."""
    inner = np.random.default_rng(len(seconds)).choice(
        np.arange(1, len(seconds)), size=ranks - 1, replace=False
    )
    partition = Partition(bounds=(0, *sorted(inner.tolist()), len(seconds)))
    speeds = None if slow is None else [slow, *[1.0] * (ranks - 1)]
    capacity = RankCapacity(speeds=speeds)
    now, best = (
        predict_step_seconds(each.loads(seconds, speeds), microbatches)
        for each in (partition, exact_partition(seconds, ranks, capacity))
    )
    asked = BalancerInput(partition=partition, seconds=seconds, microbatches=microbatches, capacity=capacity)
    lost = lost_seconds(asked, min_gain=min_gain)
    if now - best > max(min_gain * now, 0) * 1.0001:
        assert lost == pytest.approx(now - best)
    elif now - best < min_gain * now * 0.9999:
        assert lost == 0.0


@pytest.mark.parametrize("lost", [0.001, 0.05, 1.0])
def test_it_is_time_to_look_when_as_much_is_lost_as_a_move_costs(lost):
    """Slow losses wait long, fast ones hardly; what was lost is never over a step more than the cost."""
    waiting, cost, total = CheckTimer(), 0.2, 0.0
    while not waiting.is_over(cost):
        waiting, total = waiting.after_step(lost), total + lost
    assert cost <= total <= cost + lost
    assert not CheckTimer().is_over(0.0), "without a loss there is nothing to look at"


def test_looks_in_vain_become_rare():
    """Each waits for twice the loss of the one before, until layers move."""
    waiting, steps = CheckTimer(), []
    for _ in range(4):
        count = 0
        while not waiting.is_over(1.0):
            waiting, count = waiting.after_step(0.5), count + 1
        steps.append(count)
        waiting = waiting.after_look(moved=False)
    assert steps == [2, 4, 8, 16]
    assert waiting.after_look(moved=True) == CheckTimer()


@pytest.mark.parametrize(
    ("after", "predicted", "worse"),
    [
        ([2.4, 2.5, 2.6], 1.0, True),
        ([1.9, 2.5, 2.6], 1.0, False),
        ([2.4, 2.5, 2.6], 2.0, False),
        ([], 1.0, False),
    ],
    ids=["slower", "noise", "dearer layers", "nothing measured"],
)
def test_a_move_is_worse_only_where_every_step_after_it_is(after, predicted, worse):
    """Slower than the slowest step before, each brought to what its layers cost."""
    before = [1.2, 1.8, 2.0]
    assert measured_worse(before, after, predicted=predicted, min_gain=0.1) == worse


STAGED = st.sampled_from([("Interleaved1F1B", 2), ("LoopedBFS", 2), ("ZeroBubbleV", 2)])


@pytest.mark.slow
@examples(25, deadline=None)
@given(staged=STAGED, seed=st.integers(0, 1000), min_gain=st.sampled_from([0.0, 0.03]))
def test_of_several_stages_a_rank_no_more_is_lost_than_the_balancer_wins(staged, seed, min_gain):
    """Both play the schedule: a look is never due where the balancer would find nothing."""
    random = np.random.default_rng(seed)
    layers, (schedule, chunks) = int(random.integers(6, 14)), staged
    seconds = random.lognormal(0, 0.7, layers).tolist()
    pipeline = StagedPipeline(
        schedule=build_schedule(schedule, ranks=2, microbatches=4, chunks=chunks),
        forward=[second / 3 for second in seconds],
        backward=[second * 2 / 3 for second in seconds],
        optimizer=[0.0] * layers,
        capacity=RankCapacity(),
    )
    cuts = random.choice(np.arange(1, layers), size=3, replace=False)
    partition = Partition(bounds=(0, *sorted(cuts.tolist()), layers))
    asked = BalancerInput(partition=partition, seconds=seconds, microbatches=4, staged=pipeline)
    lost = lost_seconds(asked, min_gain=min_gain)
    now = pipeline.step_seconds(partition)
    won = now - pipeline.step_seconds(pipeline.balanced(partition))
    assert 0 <= lost <= won + 1e-9
    assert lost == 0 or lost >= min_gain * now


def test_stages_that_make_up_for_each_other_on_a_rank_lose_nothing():
    """By stage these would be uneven; in a V, the first and the last stage share a rank."""
    seconds = [1.0, 2.0, 2.0, 3.0]
    partition = Partition(bounds=(0, 1, 2, 3, 4))
    pipeline = StagedPipeline(
        schedule=build_schedule("ZeroBubbleV", ranks=2, microbatches=4),
        forward=[second / 3 for second in seconds],
        backward=[second * 2 / 3 for second in seconds],
        optimizer=[0.0] * 4,
        capacity=RankCapacity(),
    )
    asked = BalancerInput(partition=partition, seconds=seconds, microbatches=4, staged=pipeline)
    assert lost_seconds(asked, min_gain=0.0) == 0.0
