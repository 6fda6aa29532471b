"""Jobs of one kind are solved as one, and nothing about the answer changes but its speed."""

import dataclasses

import numpy as np
import pytest
from ballast_policies.allocation.registry import allocate
from hypothesis import given
from hypothesis import strategies as st

from tests.policies.allocation.problems import problem
from tests.support.examples import examples


@examples(60)
@given(
    seed=st.integers(0, 2**32 - 1),
    copies=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    policy=st.sampled_from(["max-min-fairness", "water-filling", "max-throughput", "makespan"]),
)
def test_many_jobs_of_few_kinds_reach_the_optimum_of_the_jobs_one_by_one(seed, copies, policy):
    """Whatever the numbers of each kind; one by one they differ by 1e-10, so that nothing merges."""
    draw = np.random.default_rng(seed)
    kind = np.repeat(np.arange(len(copies)), copies)
    p = problem(draw.uniform(1, 10, (len(copies), 2))[kind].tolist(), draw.integers(1, 4, 2).tolist())
    jobs = tuple(
        dataclasses.replace(job, throughput={g: rate * (1 + 1e-10 * m) for g, rate in job.throughput.items()})
        for m, job in enumerate(p.jobs)
    )
    whole, single = (allocate(policy, q) for q in (p, dataclasses.replace(p, jobs=jobs)))
    assert whole.objective == pytest.approx(single.objective, rel=1e-6)
    assert whole.gap <= 1e-6


def test_jobs_of_one_kind_are_served_alike():
    """Seven equal jobs on four GPUs: each the same speed."""
    speed = list(allocate("max-min-fairness", problem([[3.0, 5.0]] * 7, [3, 1])).throughput.values())
    assert speed == pytest.approx([speed[0]] * 7, rel=1e-9)
