"""Jobs of one kind are solved as one, and nothing about the answer changes but its speed."""

import dataclasses

import numpy as np
import pytest
from ballast_policies.allocation.registry import allocate
from hypothesis import given
from hypothesis import strategies as st

from tests.policies.allocation.problems import pair, problem
from tests.support.examples import examples


def alike(draw, kinds, copies, *, pairs):
    """``copies[c]`` jobs of each of some kinds, with all pairs at the speeds of their kinds, or none."""
    T, capacity = draw.uniform(1, 10, (kinds, 2)), draw.integers(1, 4, 2)
    kind = np.repeat(np.arange(kinds), copies)
    together = draw.uniform(0.3, 1.0, (kinds, kinds, 2))
    p = problem(T[kind].tolist(), capacity.tolist())
    if not pairs:
        return p
    shared = []
    for a in range(len(kind)):
        for b in range(a + 1, len(kind)):
            rates = [
                (together[kind[a], kind[b], j] * T[kind[a], j], together[kind[b], kind[a], j] * T[kind[b], j])
                for j in range(2)
            ]
            shared.append(pair(a, b, *rates))
    return dataclasses.replace(p, pairs=tuple(shared))


def told_apart(p):
    """The same problem to 1e-9, with no two jobs alike, so that nothing merges."""
    jobs = tuple(
        dataclasses.replace(job, throughput={g: rate * (1 + 1e-10 * m) for g, rate in job.throughput.items()})
        for m, job in enumerate(p.jobs)
    )
    return dataclasses.replace(p, jobs=jobs)


@examples(60)
@given(
    seed=st.integers(0, 2**32 - 1),
    copies=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    pairs=st.booleans(),
    policy=st.sampled_from(["max-min-fairness", "water-filling", "max-throughput", "makespan"]),
)
def test_many_jobs_of_few_kinds_reach_the_optimum_of_the_jobs_one_by_one(seed, copies, pairs, policy):
    """With and without sharing, whatever the numbers of each kind."""
    p = alike(np.random.default_rng(seed), len(copies), copies, pairs=pairs)
    whole, single = (allocate(policy, q, space_sharing=True) for q in (p, told_apart(p)))
    assert whole.objective == pytest.approx(single.objective, rel=1e-6)
    assert whole.gap <= 1e-6


def test_jobs_of_one_kind_are_served_alike():
    """Seven equal jobs on four GPUs: each the same speed, also where they share in pairs."""
    p = alike(np.random.default_rng(3), 1, [7], pairs=True)
    speed = list(allocate("max-min-fairness", p, space_sharing=True).throughput.values())
    assert speed == pytest.approx([speed[0]] * 7, rel=1e-9)


def test_a_missing_pair_is_not_invented():
    """Of three equal jobs one may share with neither of the others; none gets a share with it."""
    p = problem([[4.0], [4.0], [4.0]], [1])
    p = dataclasses.replace(p, pairs=(pair(0, 1, (3.6, 3.6)),))
    answer = allocate("max-min-fairness", p, space_sharing=True)
    assert set(answer.pair_allocation) == {"job-0+job-1"}
    # Two at 90 % together for x of the time, the third alone for 1 - x: 0.9 x = 1 - x.
    assert answer.objective == pytest.approx(0.9 / 1.9, rel=1e-6)


def test_each_job_shares_with_few_others():
    """Forty equal jobs in all 780 pairs: a ring is enough."""
    p = alike(np.random.default_rng(5), 1, [40], pairs=True)
    p = dataclasses.replace(
        p,
        pairs=tuple(
            dataclasses.replace(one, throughput=dict.fromkeys(p.gpu_types, (0.9 * 4, 0.9 * 4)))
            for one in p.pairs
        ),
        jobs=tuple(dataclasses.replace(job, throughput=dict.fromkeys(p.gpu_types, 4.0)) for job in p.jobs),
    )
    answer = allocate("max-min-fairness", p, space_sharing=True)
    assert 0 < len(answer.pair_allocation) <= 40
