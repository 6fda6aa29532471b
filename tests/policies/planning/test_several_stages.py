"""Ranks that hold several stages: the schedule's step decides, not the largest stage."""

import numpy as np
import pytest
from ballast_policies.planning.balancers.exact import exact_partition
from ballast_policies.planning.balancers.registry import BalancerInput
from ballast_policies.planning.balancers.several_stages import StagedPipeline
from ballast_policies.planning.partition import Partition, PlanningError, even_partition
from ballast_policies.planning.rank_capacity import RankCapacity
from ballast_policies.planning.rebalance import decide_rebalance
from ballast_policies.planning.schedules.registry import build_schedule, stages_of

from tests.policies.planning.partitions import all_partitions
from tests.support.examples import first_fast

SCHEDULES = [
    ("Interleaved1F1B", 2),
    ("Interleaved1F1B", 3),
    ("LoopedBFS", 2),
    ("ZeroBubbleV", 2),
    ("DualPipeV", 2),
]


def layer_costs(family: str, layers: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    return {
        "alike": np.ones(layers),
        "different": random.uniform(0.5, 1.5, layers),
        "heavy tail": random.lognormal(0, 0.8, layers),
        "cheaper to the end": np.linspace(1.0, 0.1, layers),
        "some free": random.choice([0.0, 1.0], layers, p=[0.3, 0.7]),
    }[family]


def pipeline(schedule: str, chunks: int, seconds: np.ndarray, *, ranks=2, capacity=None) -> StagedPipeline:
    return StagedPipeline(
        schedule=build_schedule(schedule, ranks=ranks, microbatches=8, chunks=chunks),
        forward=(seconds / 3).tolist(),
        backward=(seconds * 2 / 3).tolist(),
        optimizer=[0.0] * len(seconds),
        capacity=capacity or RankCapacity(),
    )


FAMILIES = ["alike", "different", "heavy tail", "cheaper to the end", "some free"]


@pytest.mark.parametrize("family", first_fast(FAMILIES, 2))
@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_few_partitions_are_all_tried(schedule, chunks, family):
    """So that none has a shorter step."""
    seconds = layer_costs(family, 8, 1)
    staged = pipeline(schedule, chunks, seconds)
    stages = stages_of(schedule, 2, chunks)
    found = staged.balanced(even_partition(8, stages))
    least = min(map(staged.step_seconds, all_partitions(8, stages)))
    assert staged.step_seconds(found) == pytest.approx(least, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_search_ends_close_to_the_best_of_all_partitions(family):
    """Where there are more partitions than the search may try."""
    seconds = layer_costs(family, 12, 1)
    staged = pipeline("ZeroBubbleV", 2, seconds / 100)
    found = staged.balanced(even_partition(12, 4))
    least = min(map(staged.step_seconds, all_partitions(12, 4)))
    assert staged.step_seconds(found) <= 1.05 * least


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_no_decision_is_slower_than_the_most_even_stages(schedule, chunks):
    """Nor than the partition in force."""
    for seed in range(2):
        seconds = layer_costs("heavy tail", 24, seed) / 100
        staged = pipeline(schedule, chunks, seconds, ranks=4)
        stages = stages_of(schedule, 4, chunks)
        in_force = even_partition(24, stages)
        found = staged.step_seconds(staged.balanced(in_force))
        assert found <= staged.step_seconds(exact_partition(seconds.tolist(), stages)) * (1 + 1e-12)
        assert found <= staged.step_seconds(in_force) * (1 + 1e-12)


def decide(staged: StagedPipeline, seconds, in_force: Partition):
    asked = BalancerInput(partition=in_force, seconds=seconds.tolist(), microbatches=4, staged=staged)
    return decide_rebalance(asked, min_gain=0.01, horizon_steps=1000, move_seconds=0.1)


def test_a_large_and_a_small_stage_make_up_for_each_other_on_one_rank():
    """Even stages are impossible here, even ranks are not; a decision by stage would leave them uneven."""
    # A V: rank 0 has the first and the last stage, rank 1 the two between.
    seconds = np.array([5.0, 2.0, 2.0, 2.0, 2.0, 1.0])
    staged = pipeline("ZeroBubbleV", 2, seconds)
    in_force = exact_partition(seconds.tolist(), 4)
    decision = decide(staged, seconds, in_force)
    before, after = (
        staged.rank_sums(each.loads(seconds.tolist())) for each in (in_force, decision.partition)
    )
    assert decision.rebalance
    assert after.max() < before.max()
    assert decision.partition.loads(seconds.tolist()).max() >= in_force.loads(seconds.tolist()).max()
    assert decision.step_seconds_after == pytest.approx(staged.step_seconds(decision.partition))
    assert decision.step_seconds_after < decision.step_seconds_before


@pytest.mark.slow
def test_a_second_decision_moves_nothing():
    """The partition that was chosen is kept."""
    seconds = layer_costs("heavy tail", 16, 3)
    staged = pipeline("Interleaved1F1B", 2, seconds, ranks=4)
    first = decide(staged, seconds, even_partition(16, 8))
    assert first.rebalance
    assert not decide(staged, seconds, first.partition).rebalance


def test_a_rank_may_give_one_stage_more_of_its_memory_than_another():
    """The limit holds for the rank: the sum of its stages."""
    seconds = np.array([3.0, 1.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0])
    # Each stage's part would hold two layers; rank 0 holds one layer and three.
    capacity = RankCapacity(layer_bytes=[1] * 8, memory=[2] * 4)
    staged = pipeline("ZeroBubbleV", 2, seconds, capacity=capacity)
    found = staged.balanced(even_partition(8, 4))
    held = staged.rank_sums(found.loads([1] * 8))
    assert (held <= 4).all()
    assert found != even_partition(8, 4)


def test_what_fits_no_rank_is_refused():
    capacity = RankCapacity(layer_bytes=[3] * 8, memory=[2] * 4)
    staged = pipeline("ZeroBubbleV", 2, np.ones(8), capacity=capacity)
    with pytest.raises(PlanningError, match="do not fit"):
        staged.balanced(even_partition(8, 4))


def test_parameters_are_made_even_over_ranks():
    """``rebalance.by: parameters`` counts what a rank holds, not what a stage holds."""
    parameters = [30, 10, 20, 20, 10, 10, 10, 10]
    seconds = np.ones(8)
    staged = pipeline("ZeroBubbleV", 2, seconds)
    found = staged.balanced(even_partition(8, 4), parameters)
    assert staged.rank_sums(found.loads(parameters)).tolist() == [60.0, 60.0]
