"""Answers that Gavel's published code gets wrong, each by the defect that makes it so."""

import dataclasses

import numpy as np
import pytest
from ballast_policies.allocation.problem import Entity, Job, Pair, Problem
from ballast_policies.allocation.registry import allocate

from tests.policies.allocation.problems import problem, random_problem


@pytest.mark.parametrize("many", [8, 15, 25])
def test_a_small_level_does_not_end_the_filling_early(many):
    """Many jobs on one GPU of their own type, one job beside them that has a type to itself: it reaches 1.

    An absolute epsilon against a relative slack made the next stage infeasible from a level of 0.1 down,
    and the last job was left at 0.18 with 15 jobs.
    """
    rates = [[1.0, 0.0]] * many + [[1.0, 1.0]]
    answer = allocate("water-filling", problem(rates, [1, 1]))
    assert answer.throughput[f"job-{many}"] == pytest.approx(1.0, abs=1e-7)
    assert answer.throughput["job-0"] == pytest.approx(1.0 / many, rel=1e-6)


def test_a_team_of_many_jobs_is_not_capped_by_a_constant():
    """Entity weights split over many jobs: stages continue beyond the largest normalised throughput."""
    p = random_problem(3, 60, 3, gangs=(1,), contention=1.2, entities=5, zero=0.0)
    answer = allocate("hierarchical", p)
    used = {g: sum(answer.allocation[j.name][g] for j in p.jobs) for g in p.gpu_types}
    slow = [j for j in p.jobs if answer.throughput[j.name] < max(j.throughput.values()) * (1 - 1e-6)]
    # A job that is not at full speed finds no idle GPU: filling continued to the end.
    assert slow
    assert all(used[g] == pytest.approx(p.capacity[g], rel=1e-6) for g in p.gpu_types)


def test_a_gang_pays_for_all_of_its_gpus():
    """Throughput per dollar of a gang of four counts four GPUs' price."""
    p = problem([[4.0], [3.0]], [4], gpus=[4, 1], prices=[1.0])
    answer = allocate("max-throughput-per-dollar", p)
    assert answer.allocation["job-1"]["type-0"] == pytest.approx(1.0)
    assert answer.allocation["job-0"]["type-0"] == pytest.approx(0.75)


def test_one_deadline_out_of_reach_does_not_drop_the_others():
    """It is named; everybody else's is kept."""
    p = problem(
        [[1.0], [1.0], [1.0]], [2], steps=[100.0, 100.0, 100.0], prices=[1.0], deadline=[50.0, 110.0, 200.0]
    )
    answer = allocate("min-cost-slo", p)
    assert answer.unmet_deadlines == ("job-0",)
    assert answer.throughput["job-1"] * 110.0 >= 100.0 * (1 - 1e-8)
    assert answer.throughput["job-2"] * 200.0 >= 100.0 * (1 - 1e-8)


def test_a_deadline_in_the_past_is_lost_and_not_vacuous():
    """Steps over a negative time is no demand at all; the job is named instead."""
    p = problem([[1.0]], [1], steps=[100.0], prices=[1.0], deadline=[-5.0])
    assert allocate("min-cost-slo", p).unmet_deadlines == ("job-0",)


def test_a_makespan_of_seconds_is_found_exactly():
    """No smallest makespan of 100 s, no slack of 5 %."""
    p = problem([[10.0], [10.0]], [1], steps=[30.0, 70.0])
    assert allocate("makespan", p).objective == pytest.approx(10.0, rel=1e-9)


def test_weights_enter_where_stated_and_only_once():
    """Doubling all weights changes no share."""
    p = random_problem(5, 12, 3)
    doubled = dataclasses.replace(
        p, jobs=tuple(dataclasses.replace(job, weight=2 * job.weight) for job in p.jobs)
    )
    first, second = (allocate("max-min-fairness", q).allocation for q in (p, doubled))
    for name, row in first.items():
        assert second[name] == pytest.approx(row, abs=1e-6)


def test_pairs_of_gangs_of_different_sizes_leave_the_others_alone():
    """Gangs of two and of one in one problem with pairs: no crash, no wrong grouping, more than alone."""
    p = random_problem(11, 10, 3, gangs=(1, 2), pairs=0.6)
    answer = allocate("max-min-fairness", p, space_sharing=True)
    gpus = {job.name: job.gpus for job in p.jobs}
    assert all(gpus[a] == gpus[b] for a, b in (name.split("+") for name in answer.pair_allocation))
    assert answer.objective >= allocate("max-min-fairness", p).objective * (1 - 1e-9)


def test_fifo_puts_an_early_job_on_its_fastest_type():
    """Not on whichever type comes last in the alphabet."""
    p = problem([[5.0, 1.0], [1.0, 5.0]], [1, 1], elapsed=[10.0, 0.0])
    rows = allocate("fifo", p).allocation
    assert rows["job-0"]["type-0"] == pytest.approx(1.0)
    assert rows["job-1"]["type-1"] == pytest.approx(1.0)


def test_an_entity_first_in_first_out_serves_its_members_in_turn_beside_a_fair_one():
    """The fifo team's whole weight goes to its first member until that is at full speed."""
    p = dataclasses.replace(
        problem([[1.0]] * 4, [1], elapsed=[9.0, 1.0, 5.0, 5.0], entity=["a", "a", "b", "b"]),
        entities={"a": Entity(policy="fifo"), "b": Entity(policy="fairness")},
    )
    speed = allocate("hierarchical", p).throughput
    assert np.array([speed[f"job-{m}"] for m in range(4)]) == pytest.approx([0.5, 0.0, 0.25, 0.25], abs=1e-8)


@pytest.mark.parametrize("pairs", [(), (Pair(jobs=("alone", "first"), throughput={"a": (0.05, 3.5)}),)])
def test_a_turn_that_begins_by_rounding_is_no_gap(pairs):
    """The first of a queue is at full speed and takes the last GPU: the next is due 1e-16, which is 0."""
    jobs = (
        Job(name="alone", throughput={"a": 0.1}, weight=3.0),
        Job(name="first", throughput={"a": 7.0}, entity="queue"),
        Job(name="second", throughput={"a": 3.0}, gpus=2, weight=0.3, entity="queue"),
    )
    teams = {"queue": Entity(weight=0.7, policy="fifo")}
    p = Problem(gpu_types=("a",), capacity={"a": 2}, jobs=jobs, entities=teams, pairs=pairs)
    answer = allocate("hierarchical", p, space_sharing=bool(pairs))
    assert (answer.status, answer.fallbacks) == ("optimal", ())
    assert answer.throughput == pytest.approx({"alone": 0.1, "first": 7.0, "second": 0.0}, abs=1e-6)
