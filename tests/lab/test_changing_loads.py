"""The six kinds of dynamic models as loads, and what balancing them can win."""

import itertools

import numpy as np
import pytest
from ballast_lab.changing_loads import LOADS
from ballast_policies.planning.balancers.exact import exact_partition
from ballast_policies.planning.diffusion import diffuse
from ballast_policies.planning.dynamics import DYNAMICS, gradual_sparsity
from ballast_policies.planning.partition import even_partition
from ballast_policies.planning.schedules.builders.synchronous import one_forward_one_backward
from ballast_policies.planning.schedules.costs import StageCosts
from ballast_policies.planning.schedules.simulate import simulate


def test_gradual_sparsity_starts_and_ends_where_it_should():
    """S(t0) = Si, S(t0 + n dt) = Sf, monotone, 87.5 % of the pruning in the first half; clamped outside."""
    assert gradual_sparsity(0, initial=0.2, final=0.9) == pytest.approx(0.2)
    assert gradual_sparsity(1, initial=0.2, final=0.9) == 0.9
    assert gradual_sparsity(0.5) == pytest.approx(0.875 * 0.9)
    assert gradual_sparsity(-1) == gradual_sparsity(0) and gradual_sparsity(2) == 0.9
    steps = [gradual_sparsity(t) for t in np.linspace(0, 1, 50)]
    assert steps == sorted(steps)


@pytest.mark.parametrize("kind", sorted(DYNAMICS))
def test_loads_begin_even_and_change(kind):
    """At progress 0 every layer costs 1; later none is free, and the same seed gives the same loads."""
    generate = LOADS[kind]
    assert np.allclose(generate(24, 0.0, np.random.default_rng(0)), 1.0)
    later = generate(24, 1.0, np.random.default_rng(0))
    assert later.shape == (24,) and (later > 0).all() and not np.allclose(later, 1.0)
    assert np.array_equal(later, generate(24, 1.0, np.random.default_rng(0)))


@pytest.mark.slow
def test_th_rebalancing_beats_the_even_split_in_at_least_four_of_six_cases():
    """Simulated 1F1B, 4 ranks: 1.1 x or more, exactly and by diffusion; within the ceiling (mean of 5)."""
    layers, ranks, m = 32, 4, 16
    schedule = one_forward_one_backward(ranks, m)

    def step(loads):
        costs = StageCosts(forward=tuple(loads / 3), backward=tuple(loads * 2 / 3))
        return simulate(schedule, costs).makespan

    gains = {kind: [] for kind in LOADS}
    for kind, seed in itertools.product(LOADS, range(5)):
        seconds = LOADS[kind](layers, 1.0, np.random.default_rng(seed))
        even = even_partition(layers, ranks)
        before = even.loads(seconds)
        found = []
        for partition in (exact_partition(seconds, ranks), (even, *diffuse(even, seconds))[-1]):
            after = partition.loads(seconds)
            found.append(step(before) / step(after))
            assert 1 - 1e-12 <= found[-1] <= before.max() / after.max() + 1e-9
        gains[kind].append(min(found))
    assert sum(np.mean(each) >= 1.1 for each in gains.values()) >= 4, gains
