"""What a tensor group does about late ranks, by the name of a policy."""

import pytest
from ballast_policies.planning.tensor_parallel import (
    POLICIES,
    LinearCost,
    MoveCosts,
    decide_workload,
    own_work_seconds,
)
from hypothesis import given
from hypothesis import strategies as st

COLUMNS = (128, 128, 128, 128)
LATE = (8.0, 1.0, 1.0, 1.0)


def decided(policy, seconds=LATE, **options):
    return decide_workload(policy, seconds, seconds, COLUMNS, costs=MoveCosts(), **options)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_rank_is_a_straggler(policy):
    """Noise within the tolerance changes nothing under any policy."""
    decision = decided(policy, (1.0, 1.01, 1.02, 0.99))
    assert decision.stragglers == decision.migrated[4:] == ()
    assert decision.migrated == decision.pruned == (0, 0, 0, 0)


def test_resize_brings_the_late_rank_to_the_mean():
    """Equation 1: T = [8, 1, 1, 1] leaves out (8 - 2.75) / 8 of the columns, and no rank helps."""
    decision = decided("resize")
    assert decision.pruned == (84, 0, 0, 0)
    assert decision.migrated == (0, 0, 0, 0)


def test_migrate_brings_the_late_rank_to_the_fastest():
    """All that is too much goes to helpers, nothing is lost."""
    decision = decided("migrate")
    assert decision.migrated == (112, 0, 0, 0)
    assert decision.pruned == (0, 0, 0, 0)


def test_none_does_nothing_about_anybody():
    """Plain tensor parallelism."""
    assert decided("none").pruned == decided("none").migrated == (0, 0, 0, 0)


def test_semi_weighs_the_costs():
    """Free communication migrates all, dear communication leaves all out."""
    dear = MoveCosts(communicate=LinearCost(per_column=1.0))
    free = MoveCosts(resize=LinearCost(per_column=1.0))
    assert decide_workload("semi", LATE, LATE, COLUMNS, costs=dear).migrated[0] == 0
    assert decide_workload("semi", LATE, LATE, COLUMNS, costs=free).pruned[0] == 0


def test_an_unknown_policy_is_refused():
    """With those that there are."""
    with pytest.raises(ValueError, match="none, resize, migrate, semi"):
        decided("pray")


@given(
    policy=st.sampled_from(POLICIES),
    seconds=st.lists(st.floats(1.0, 10.0), min_size=4, max_size=4),
    others=st.floats(0.0, 2.0),
)
def test_a_decision_in_force_does_not_undo_itself(policy, seconds, others):
    """Seconds measured under a decision are carried back to those that it was made from."""
    before = decide_workload(
        policy, [t + others for t in seconds], seconds, COLUMNS, costs=MoveCosts(resize_fixed=0.1)
    )
    helpers = sum(count == 0 for count in before.migrated)
    measured = []
    for rank, products in enumerate(seconds):
        done = COLUMNS[rank] - before.migrated[rank] - before.pruned[rank]
        done += sum(before.migrated) / helpers if before.migrated[rank] == 0 else 0
        measured.append(products * done / COLUMNS[rank])
    total, products = own_work_seconds([t + others for t in measured], measured, COLUMNS, before)
    assert products == pytest.approx(seconds)
    assert total == pytest.approx([t + others for t in seconds])
