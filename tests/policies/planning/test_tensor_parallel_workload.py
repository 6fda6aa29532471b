"""What a tensor group does about late ranks, by the name of a policy."""

import pytest
from ballast_policies.planning.tensor_parallel.semi import LinearCost, MoveCosts, semi_seconds
from ballast_policies.planning.tensor_parallel.workload import (
    POLICIES,
    decide_workload,
    measured_no_faster,
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


CHI = st.sampled_from([1.0, 1.5, 2.0, 3.0, 4.0, 8.0])


@given(
    policy=st.sampled_from(POLICIES),
    chis=st.lists(CHI, min_size=2, max_size=8),
    share=st.floats(0.05, 1.0),
    fixed=st.floats(0, 2),
    per_column=st.floats(0, 0.05),
    help_fixed=st.floats(0, 1),
)
def test_no_policy_expects_a_longer_step_than_doing_nothing(
    policy, chis, share, fixed, per_column, help_fixed
):
    """At any slowness, number of late ranks and cost: it wins two percent, or leaves them alone."""
    columns = [100] * len(chis)
    products = [share * chi for chi in chis]
    seconds = [1 - share + part for part in products]
    costs = MoveCosts(
        resize_fixed=fixed,
        resize=LinearCost(per_column=per_column),
        communicate=LinearCost(fixed=fixed, per_column=per_column),
        help_fixed=help_fixed,
    )
    decision = decide_workload(policy, seconds, products, columns, costs=costs)
    after = semi_seconds(decision, seconds, products, columns, costs=costs)
    if any(decision.migrated) or any(decision.pruned):
        assert after < max(seconds) * 0.98 + 1e-9
    else:
        assert after == max(seconds)
    for other in ("resize", "migrate") if policy == "semi" else ():
        alone = decide_workload(other, seconds, products, columns, costs=costs)
        assert after <= semi_seconds(alone, seconds, products, columns, costs=costs) * 1.02 + 1e-9


def test_a_straggler_that_comes_and_goes_is_followed():
    """The decision of each exchange is made from what the ranks would need for their own work."""
    in_force, seen = None, []
    lossless = MoveCosts(resize_fixed=5.0)
    for chi in (1.0, 4.0, 4.0, 1.0, 2.0):
        rates = [chi, 1.0, 1.0, 1.0]
        done = COLUMNS if in_force is None else in_force.computed(COLUMNS)
        measured = [rate * part / 128 for rate, part in zip(rates, done, strict=True)]
        total, products = own_work_seconds(measured, measured, COLUMNS, in_force)
        in_force = decide_workload("semi", total, products, COLUMNS, costs=lossless)
        seen.append(in_force.migrated[0])
    assert seen[0] == seen[3] == 0 and seen[1] == seen[2] > seen[4] > 0


def test_products_that_helpers_pay_for_decide_at_moderate_slowness():
    """At chi = 2 dear helping leaves the rank alone, at chi = 8 the same price is worth paying."""
    costs = MoveCosts(help_fixed=1.2, resize_fixed=9.0)
    moderate = decide_workload("semi", (2.0, 1.0, 1.0, 1.0), (2.0, 1.0, 1.0, 1.0), COLUMNS, costs=costs)
    assert moderate.migrated == moderate.pruned == (0, 0, 0, 0)
    assert "left alone" in moderate.why
    assert decide_workload("semi", LATE, LATE, COLUMNS, costs=costs).migrated[0] > 0


def test_a_decision_that_made_no_step_shorter_is_told():
    """By what was measured with it and before it, and by what sending columns costs beside that."""
    decision = decided("migrate", (2.0, 1.0, 1.0, 1.0))
    dear = MoveCosts(communicate=LinearCost(fixed=0.3, per_column=0.0))
    before = (2.0, 1.0, 1.0, 1.0)
    assert not measured_no_faster(decision, (1.2, 1.6, 1.6, 1.6), before, costs=dear)
    assert measured_no_faster(decision, (1.2, 1.8, 1.8, 1.8), before, costs=dear)
    assert not measured_no_faster(decision, (1.2, 1.8, 1.8, 1.8), before, costs=MoveCosts())
    assert measured_no_faster(decision, (1.2, 2.0, 1.8, 1.8), before, costs=MoveCosts())
