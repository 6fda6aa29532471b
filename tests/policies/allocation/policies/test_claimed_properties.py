"""Properties that the dissertation claims for its policies (section 5.4.4), on random instances."""

import dataclasses

import numpy as np
import pytest
from ballast_policies.allocation.registry import allocate
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.policies.allocation.problems import pair, problem, problems, random_problem
from tests.support.examples import examples


def speeds(answer, p):
    return np.array([answer.throughput[job.name] for job in p.jobs])


@examples(60)
@given(p=problems(max_jobs=6, all_run=True, single=True))
def test_sharing_incentive_no_job_is_slower_than_on_its_isolated_share(p):
    """With equal weights, max-min fairness gives every job at least 1/n of every type's worth."""
    p = dataclasses.replace(p, jobs=tuple(dataclasses.replace(job, weight=1.0) for job in p.jobs))
    fair, isolated = (speeds(allocate(policy, p), p) for policy in ("max-min-fairness", "isolated"))
    assert (fair >= isolated * (1 - 1e-7)).all()


@examples(60)
@given(p=problems(max_jobs=6, all_run=True, single=True))
def test_finish_time_fairness_delays_no_newcomer_beyond_its_weights_part(p):
    """Nobody has waited: all can have their isolated shares, so that rho is at most 1."""
    jobs = (dataclasses.replace(job, elapsed=0.0, isolated_elapsed=0.0) for job in p.jobs)
    p = dataclasses.replace(p, jobs=tuple(jobs))
    fair, isolated = (speeds(allocate(policy, p), p) for policy in ("finish-time-fairness", "isolated"))
    assert (fair >= isolated * (1 - 1e-7)).all()


@examples(30)
@given(p=problems(max_jobs=6, all_run=True, single=True))
def test_hardly_any_weight_makes_no_job_faster_by_finish_time_fairness(p):
    """A part that is rounded to none takes no time, and the job would be the latest of all."""
    few, equal = (
        dataclasses.replace(
            p,
            jobs=tuple(
                dataclasses.replace(job, weight=weight if job is p.jobs[0] else 1e6) for job in p.jobs
            ),
        )
        for weight in (1e-303, 1e6)
    )
    slow, fast = (allocate("finish-time-fairness", each) for each in (few, equal))
    # Where another job already runs all the time, some GPU may be left for this one.
    left = any(sum(slow.allocation[job.name].values()) > 1 - 1e-6 for job in p.jobs[1:])
    assert left or speeds(slow, p)[0] <= speeds(fast, p)[0] * (1 + 1e-6)


@examples(30)
@given(p=problems(max_jobs=6), weight=st.floats(1e-3, 1e3))
def test_equal_weights_are_as_none_to_finish_time_fairness(p, weight):
    """Bit for bit."""
    one, other = (
        dataclasses.replace(p, jobs=tuple(dataclasses.replace(job, weight=each) for job in p.jobs))
        for each in (1.0, weight)
    )
    answers = [allocate("finish-time-fairness", each) for each in (one, other)]
    assert answers[0].allocation == answers[1].allocation


@examples(40)
@given(
    seed=st.integers(0, 2**32 - 1), policy=st.sampled_from(["max-min-fairness", "makespan", "max-throughput"])
)
def test_colocation_sharing_gpus_never_makes_the_objective_worse(seed, policy):
    """What can be done alone can still be done where pairs may share."""
    p = random_problem(seed, 8, 3, gangs=(1, 2), pairs=0.5, zero=0.0)
    alone, together = (allocate(policy, p, space_sharing=sharing).objective for sharing in (False, True))
    if policy == "makespan":
        alone, together = -alone, -together
    assert together >= alone - 1e-7 * abs(alone)


def test_colocation_two_jobs_that_hardly_slow_each_other_down_share_one_gpu():
    """Each at 90 % of its speed beside the other beats taking turns, and the shares say so."""
    p = dataclasses.replace(problem([[10.0], [4.0]], [1]), pairs=(pair(0, 1, (9.0, 3.6)),))
    answer = allocate("max-min-fairness", p, space_sharing=True)
    assert answer.pair_allocation == {"job-0+job-1": {"type-0": pytest.approx(1.0)}}
    assert answer.objective == pytest.approx(0.9)


@pytest.mark.slow
@examples(25)
@given(
    p=problems(max_jobs=4, all_run=True, single=True),
    liar=st.integers(0, 3),
    factors=st.lists(st.floats(0.2, 5.0), min_size=4, max_size=4),
)
def test_strategy_proofness_a_job_that_reports_wrong_speeds_is_no_faster(p, liar, factors):
    """Under the partial allocation mechanism, whatever a job says of its speeds, the truth serves it best."""
    assume(liar < len(p.jobs))
    job = p.jobs[liar]
    told = {g: rate * f for (g, rate), f in zip(job.throughput.items(), factors, strict=False)}
    lying = dataclasses.replace(
        p, jobs=(*p.jobs[:liar], dataclasses.replace(job, throughput=told), *p.jobs[liar + 1 :])
    )
    shares = allocate("strategy-proof", lying).allocation[job.name]
    gained = sum(share * job.throughput[g] for g, share in shares.items())
    assert gained <= allocate("strategy-proof", p).throughput[job.name] * (1 + 1e-5)


@examples(40)
@given(p=problems(max_jobs=6), factor=st.floats(1.5, 4.0))
def test_more_weight_never_means_less_speed_under_water_filling(p, factor):
    """Raising one job's weight and nothing else."""
    heavier = dataclasses.replace(p.jobs[0], weight=p.jobs[0].weight * factor)
    before = allocate("water-filling", p).throughput[heavier.name]
    after = allocate("water-filling", dataclasses.replace(p, jobs=(heavier, *p.jobs[1:])))
    assert after.throughput[heavier.name] >= before * (1 - 1e-6)
