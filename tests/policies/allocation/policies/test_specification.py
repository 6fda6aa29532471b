"""Every policy with a program in cvxpy reaches its optimum, on random instances of several families."""

import dataclasses

import numpy as np
import pytest
from ballast_policies.allocation import registry
from ballast_policies.allocation.custom import solve
from ballast_policies.allocation.instance import from_arrays
from ballast_policies.allocation.solvers.nash import nash_shares
from ballast_policies.allocation.specification import SPECIFICATIONS
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.support.examples import examples

pytestmark = pytest.mark.slow

FAMILIES = ("uniform", "heavy tails", "identical jobs", "tight gangs", "weights", "few usable types")
SHARES = ("isolated", "proportional")
LEVELS = ("water-filling", "hierarchical", "min-cost")
OPTIMA = [name for name in SPECIFICATIONS if name not in (*SHARES, *LEVELS, "strategy-proof")]


def drawn(family, seed):
    """Up to six jobs on up to three types; each can run somewhere, and isolated shares keep its deadline."""
    draw = np.random.default_rng(seed)
    n, k = int(draw.integers(1, 7)), int(draw.integers(1, 4))
    T = draw.uniform(1.0, 10.0, (n, k))
    if family == "heavy tails":
        T *= np.exp(1.5 * draw.standard_normal((n, 1)))
    if family == "identical jobs":
        T[:] = T[0]
    if family == "few usable types":
        T[(draw.random((n, k)) < 0.6) & (np.arange(k) != draw.integers(0, k, (n, 1)))] = 0.0
    gangs = family == "tight gangs"
    gpus = draw.choice([1.0, 2.0, 4.0], n) if gangs else np.ones(n)
    capacity = draw.integers(4 if gangs else 1, 6, k).astype(float)
    steps = T.max(axis=1) * draw.uniform(600.0, 7200.0, n)
    isolated = capacity / (n * gpus[:, None])
    isolated /= np.maximum(1.0, isolated.sum(axis=1, keepdims=True))
    return dataclasses.replace(
        from_arrays(
            gpu_types=[f"type-{j}" for j in range(k)],
            capacity=capacity,
            throughput=T,
            gpus=gpus,
        ),
        weights=draw.uniform(0.3, 3.0, n) if family in ("weights", "heavy tails") else np.ones(n),
        steps_remaining=steps,
        elapsed=draw.uniform(0.0, 3600.0, n),
        isolated_elapsed=draw.uniform(0.0, 3600.0, n),
        entity_of=[draw.choice(["red", "blue", None]) if family == "weights" else None for _ in range(n)],
        budgets=np.where(draw.random(n) < 0.5, draw.uniform(0.1, 6.0, n), np.nan),
        budget=float(draw.uniform(0.3, 12.0)) if draw.random() < 0.5 else np.inf,
        deadlines=steps / (T * isolated).sum(axis=1) * draw.uniform(1.0, 3.0, n),
        usd_per_hour={f"type-{j}": float(draw.uniform(0.5, 4.0)) for j in range(k)},
    )


@pytest.mark.parametrize("policy", OPTIMA)
@examples(25)
@given(family=st.sampled_from(FAMILIES), seed=st.integers(0, 2**32 - 1))
def test_the_optimum_is_that_of_the_specification(policy, family, seed):
    """To a relative 1e-6; the specification is solved by HiGHS or Clarabel, as a user's function is."""
    # Gangs of AlloX start in the order of the queues: its mean is then that of no program.
    assume(policy != "allox" or family != "tight gangs")
    instance = drawn(family, seed)
    want = solve(SPECIFICATIONS[policy], instance).objective
    assert registry.solve(policy, instance).objective == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("policy", LEVELS)
@examples(15)
@given(family=st.sampled_from(FAMILIES), seed=st.integers(0, 2**32 - 1))
def test_levels_are_those_of_the_sequence_of_programs(policy, family, seed):
    """Sorted, so that the least counts first; solvers stop within 1e-7 of a limit."""
    instance = drawn(family, seed)
    found, want = (
        np.sort(instance.levels(instance.throughput(answer.x)))
        for answer in (
            registry.solve(policy, instance),
            solve(SPECIFICATIONS[policy], instance),
        )
    )
    assert found == pytest.approx(want, rel=1e-6)


@examples(15)
@given(family=st.sampled_from(FAMILIES), seed=st.integers(0, 2**32 - 1))
def test_the_fair_shares_of_strategy_proof_have_the_specifications_welfare(family, seed):
    """The parts that jobs give up of them are tested in ``test_against_textbook``."""
    instance = drawn(family, seed)
    want = solve(SPECIFICATIONS["strategy-proof"], instance).objective
    speeds = instance.throughput(nash_shares(instance).x) / instance.fastest
    assert float(instance.weights @ np.log(speeds)) == pytest.approx(want, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("policy", SHARES)
@examples(25)
@given(family=st.sampled_from(FAMILIES), seed=st.integers(0, 2**32 - 1))
def test_shares_without_a_program_are_those_of_the_specification(policy, family, seed):
    instance = drawn(family, seed)
    want = solve(SPECIFICATIONS[policy], instance)
    assert registry.solve(policy, instance).x == pytest.approx(want.x, rel=1e-9, abs=1e-12)
