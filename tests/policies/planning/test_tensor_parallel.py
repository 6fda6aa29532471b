"""ZERO-resizing and SEMI-migration: the decisions, against their equations and brute force."""

from math import ceil

import numpy as np
import pytest
from ballast_policies.planning.tensor_parallel.resizing import (
    keep_list,
    layer_ratio,
    resize_ratios,
    updated_variation,
)
from ballast_policies.planning.tensor_parallel.semi import (
    LinearCost,
    MoveCosts,
    decide_semi,
    fit_cost,
    helper_columns,
    mean_is_stale,
    migrated_share,
    migrating_stragglers,
    migration_gain,
    stragglers,
)
from hypothesis import given
from hypothesis import strategies as st


def test_resizing_ratio_is_the_excess_over_the_mean_in_units_of_the_products():
    """T = [2, 1, 1, 1], M = 1.5: gamma = 0.5 for the straggler, 0 for the others; it then meets the mean."""
    T, M = [2.0, 1.0, 1.0, 1.0], [1.5, 0.75, 0.75, 0.75]
    ratios = resize_ratios(T, M)
    assert ratios == (0.5, 0.0, 0.0, 0.0)
    assert T[0] - M[0] * ratios[0] == pytest.approx(np.mean(T))


@given(T=st.lists(st.floats(0.5, 2.0), min_size=2, max_size=8), share=st.floats(0.8, 1.0))
def test_after_resizing_every_straggler_is_within_5_percent_of_the_mean_or_at_the_limit(T, share):
    """Unless the ratio is clipped to 0.9."""
    M = [share * t for t in T]
    ratios = resize_ratios(T, M)
    for before, products, ratio in zip(T, M, ratios, strict=True):
        assert 0 <= ratio <= 0.9
        if before > np.mean(T) and ratio < 0.9:
            assert before - products * ratio == pytest.approx(np.mean(T), rel=0.05)


def test_resizing_ratio_needs_product_seconds():
    """A zero would divide."""
    with pytest.raises(ValueError, match="all above 0"):
        resize_ratios([1.0, 2.0], [1.0, 0.0])


def test_resizing_exchanges_the_mean_again_after_a_ten_percent_change():
    """Both ways, not below."""
    assert not mean_is_stale(1.0, 1.09)
    assert mean_is_stale(1.0, 1.11)
    assert mean_is_stale(1.0, 0.85)


def test_resizing_keep_list_has_the_columns_that_changed_most():
    """L (1 - gamma) of them, ascending; ties to the lower column; all of them at gamma 0."""
    variation = np.array([0.1, 0.9, 0.5, 0.5, 0.2, 0.7])
    assert keep_list(variation, 0.5).tolist() == [1, 2, 5]
    assert keep_list(variation, 0.0).tolist() == list(range(6))


@given(
    variation=st.lists(st.floats(0, 1), min_size=1, max_size=40),
    ratio=st.floats(0, 0.9),
    alpha=st.floats(0.1, 1.0),
)
def test_resizing_differentiated_ratio_is_at_least_alpha_gamma(variation, ratio, alpha):
    """max(1 - #(delta > theta) / L, alpha gamma), so all layers together leave out enough."""
    delta = np.array(variation)
    got = layer_ratio(delta, ratio, iterations=100, decay=alpha)
    unchanged = (delta <= 0.1).mean()
    assert got == pytest.approx(min(0.9, max(unchanged, alpha * ratio)))
    assert got >= alpha * ratio - 1e-12


def epochs(rule, *, columns=40, ratio=0.75, patience=None, runs=60):
    """Longest time that any column was left out, under a rule for its variation."""
    base = np.random.default_rng(0).uniform(0.5, 1.5, columns)
    refined = np.zeros(columns)
    variation, absent, longest = base.copy(), np.zeros(columns, dtype=int), 0
    for _ in range(runs):
        kept = keep_list(variation, ratio, pruned_epochs=absent, patience=patience)
        absent += 1
        absent[kept] = 0
        refined[kept] += 1
        longest = max(longest, int(absent.max()))
        variation = rule(variation, base, refined, kept)
    return longest


def test_resizing_preserved_statistics_end_the_loop_of_repruning():
    """Where columns settle as they are refined, all come back; with fresh statistics some never do."""

    def preserved(variation, base, refined, kept):
        return updated_variation(variation, base * 0.8**refined, kept)

    def fresh(variation, base, refined, kept):
        measured = np.zeros(len(base))
        measured[kept] = (base * 0.8**refined)[kept]
        return measured

    assert epochs(preserved) < 20
    assert epochs(fresh) == 60


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75, 0.9])
def test_resizing_patience_bounds_the_absence_of_a_column_while_others_keep_changing(ratio):
    """No column is left out longer than patience + ceil(1 / (1 - gamma)); the published rule has no bound."""

    def stationary(variation, base, refined, kept):
        return updated_variation(variation, base, kept)

    assert epochs(stationary, ratio=ratio) == 60
    assert epochs(stationary, ratio=ratio, patience=3) <= 3 + ceil(1 / (1 - ratio))


@given(migrated=st.integers(0, 50), ranks=st.integers(2, 9), data=st.data())
def test_migration_helpers_compute_each_migrated_column_once(migrated, ranks, data):
    """With x stragglers, which do not help each other, ranges of the other e - x ranks partition them."""
    migrating = data.draw(st.sets(st.integers(0, ranks - 1), min_size=1, max_size=ranks - 1))
    for straggler in migrating:
        shares = [
            helper_columns(
                migrated, ranks=ranks, straggler=straggler, rank=rank, migrating=migrating - {straggler}
            )
            for rank in range(ranks)
        ]
        assert sorted(column for share in shares for column in share) == list(range(migrated))
        assert all(len(shares[rank]) == 0 for rank in migrating)
        assert max(map(len, shares)) <= -(-migrated // (ranks - len(migrating)))


def test_migration_the_papers_example():
    """Figure 4: of 3 tasks task 1 is late with 2 columns; task 2 computes the first, task 3 the second."""
    shares = [helper_columns(2, ranks=3, straggler=0, rank=rank) for rank in range(3)]
    assert shares == [range(0), range(1), range(1, 2)]


@pytest.mark.parametrize(("ranks", "reason"), [(1, "at least 2"), (2, "none is left")])
def test_migration_somebody_must_be_left_to_help(ranks, reason):
    """Refused in a group of one, and where all ranks migrate."""
    with pytest.raises(ValueError, match=reason):
        helper_columns(2, ranks=ranks, straggler=0, rank=0, migrating=range(ranks))


@given(
    columns=st.floats(1, 1000),
    ranks=st.integers(2, 8),
    costs=st.lists(st.floats(1e-4, 1.0), min_size=3, max_size=3),
    fixed=st.tuples(st.floats(0, 5), st.floats(0, 5)),
)
def test_semi_beta_of_linear_costs_is_the_closed_form(columns, ranks, costs, fixed):
    """(O1 + a L g - c0) / (L g (a + c + d / (e - 1))), clipped to [0, 1]."""
    a, c, d = costs
    beta = migrated_share(
        columns,
        ranks=ranks,
        resize_fixed=fixed[0],
        resize=LinearCost(per_column=a),
        communicate=LinearCost(fixed=fixed[1], per_column=c),
        compute=LinearCost(per_column=d),
    )
    closed = (fixed[0] + a * columns - fixed[1]) / (columns * (a + c + d / (ranks - 1)))
    assert beta == pytest.approx(min(1.0, max(0.0, closed)), abs=1e-9)


@given(
    T=st.lists(st.floats(1.0, 9.0), min_size=2, max_size=8),
    per_column=st.floats(0, 0.05),
)
def test_semi_x_is_the_largest_that_pays(T, per_column):
    """Equal to trying every x; at least one rank is left to help."""
    columns, communicate = [100] * len(T), LinearCost(per_column=per_column)
    x = migrating_stragglers(T, columns, communicate=communicate)
    late = len(stragglers(T))
    paying = [
        k
        for k in range(1, min(late, len(T) - 1) + 1)
        if migration_gain(T, columns, k, communicate=communicate) > 0
    ]
    assert x == max(paying, default=0)
    assert x < len(T)


def test_semi_the_gain_is_not_monotone():
    """Two ranks equally late: one alone would be helped by the other, which is no help."""
    free = LinearCost(per_column=0.0)
    T, columns = [10.0, 9.9, 1.0, 1.0], [100] * 4
    first, second = (migration_gain(T, columns, x, communicate=free) for x in (1, 2))
    assert first < second


def test_stragglers_need_more_than_noise():
    """A tolerance of 5 % makes no rank late over 2 % of noise; slowest first beyond."""
    random = np.random.default_rng(0)
    for _ in range(100):
        assert stragglers(random.uniform(1.0, 1.02, 8)) == ()
    assert stragglers([1.0, 1.5, 1.02, 3.0]) == (3, 1)


def costs_of(*, per_column):
    """Resizing costs little, sending columns what is asked for."""
    return MoveCosts(resize=LinearCost(per_column=0.01), communicate=LinearCost(per_column=per_column))


def test_semi_of_one_straggler_splits_its_excess_between_both_ways():
    """All of the excess is dealt with; dear communication prunes more."""
    T, M, L = [3.0, 1.0, 1.0, 1.0], [2.9, 0.9, 0.9, 0.9], [100] * 4
    cheap, dear = (decide_semi(T, M, L, costs=costs_of(per_column=cost)) for cost in (0.0, 0.05))
    for decision in (cheap, dear):
        assert decision.stragglers == (0,)
        assert decision.migrated[0] + decision.pruned[0] == round(100 * (3.0 - 1.0) / 2.9)
        assert decision.migrated[1:] == decision.pruned[1:] == (0, 0, 0)
    assert dear.migrated[0] < cheap.migrated[0]
    assert "migrate" in dear.why


def test_semi_of_several_stragglers_migrates_the_slowest_and_resizes_the_rest():
    """As equation 3 splits them."""
    T = [8.0, 1.0, 6.0, 1.0, 4.0, 1.0, 2.0, 1.0]
    decision = decide_semi(T, T, [100] * 8, costs=costs_of(per_column=0.003))
    assert decision.stragglers == (0, 2, 4, 6)
    assert [rank for rank in range(8) if decision.migrated[rank]] == [0, 2, 4]
    assert [rank for rank in range(8) if decision.pruned[rank]] == [6]


def test_cost_curves_are_fitted_from_measurements():
    """A line through them, never falling."""
    line = fit_cost([0, 10, 20], [1.0, 2.0, 3.0])
    assert line(30) == pytest.approx(4.0)
    assert fit_cost([0, 10], [2.0, 1.0]).per_column == 0.0
    with pytest.raises(ValueError, match="two different"):
        fit_cost([5, 5], [1.0, 1.1])
