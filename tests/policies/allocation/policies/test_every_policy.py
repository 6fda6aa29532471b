"""What holds for every policy on every problem, standard or random."""

import dataclasses

import numpy as np
import pytest
from ballast_policies.allocation.instance import instance
from ballast_policies.allocation.problem import Entity, ProblemError
from ballast_policies.allocation.registry import POLICIES, allocate, greedy, solve
from ballast_policies.allocation.solvers import methods
from hypothesis import given
from hypothesis import strategies as st

from tests.policies.allocation.problems import STANDARD, pair, problem, problems, random_problem
from tests.support.examples import examples, first_daily

MANY = 20
"""Jobs: more of them are not for the fast tests."""
BOUNDED = [name for name, policy in POLICIES.builtin.items() if policy.proves_gap]


def feasible(p, answer):
    """No job has more than all of its time, no type gives more than it has, no job runs where it cannot."""
    time = {job.name: sum(answer.allocation[job.name].values()) for job in p.jobs}
    gpus = {job.name: job.gpus for job in p.jobs}
    used = {g: sum(job.gpus * answer.allocation[job.name][g] for job in p.jobs) for g in p.gpu_types}
    for name, row in answer.pair_allocation.items():
        first, second = name.split("+")
        for g, share in row.items():
            assert share >= 0
            time[first] += share
            time[second] += share
            used[g] += gpus[first] * share
    for job in p.jobs:
        row = answer.allocation[job.name]
        assert time[job.name] <= 1 + 1e-9
        assert all(share >= 0 for share in row.values())
        assert all(
            share == 0 for g, share in row.items() if job.throughput[g] == 0 or job.gpus > p.capacity[g]
        )
    for g in p.gpu_types:
        assert used[g] <= p.capacity[g] * (1 + 1e-9)


def consistent(p, answer):
    """Throughputs and levels are those of the shares, with the real rates."""
    pairs = {"+".join(pair.jobs): pair for pair in p.pairs}
    speed = {
        job.name: sum(x * job.throughput[g] for g, x in answer.allocation[job.name].items()) for job in p.jobs
    }
    for name, row in answer.pair_allocation.items():
        for side, job in enumerate(pairs[name].jobs):
            speed[job] += sum(x * pairs[name].throughput[g][side] for g, x in row.items())
    assert answer.throughput == pytest.approx(speed, rel=1e-9, abs=1e-12)
    total = sum(p.capacity.values())
    for job in p.jobs:
        fits = {g: rate for g, rate in job.throughput.items() if job.gpus <= p.capacity[g]}
        equal = sum(rate * p.capacity[g] for g, rate in fits.items()) / total if total else 0.0
        want = job.gpus * speed[job.name] / (job.weight * equal) if equal else 0.0
        assert answer.levels[job.name] == pytest.approx(want, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("agnostic", first_daily([False, True]), ids=["aware", "agnostic"])
@pytest.mark.parametrize("policy", POLICIES.builtin)
@pytest.mark.parametrize(
    ("name", "sharing"),
    [
        pytest.param(
            name,
            sharing,
            id=f"{name}-{'sharing' if sharing else 'alone'}",
            marks=pytest.mark.slow if len(p.jobs) > MANY else (),
        )
        for name, p in STANDARD.items()
        for sharing in (False, True)
        if p.pairs or not sharing
    ],
)
def test_standard_instances_are_answered_within_all_limits(name, policy, sharing, agnostic):
    """Feasible, consistent, and with a certified gap where the policy has an optimum."""
    p = STANDARD[name]
    answer = allocate(policy, p, agnostic=agnostic, space_sharing=sharing)
    feasible(p, answer)
    consistent(p, answer)
    assert not np.isnan(answer.objective)
    if policy in BOUNDED:
        assert answer.status == "optimal"
        assert answer.gap <= 1e-6


@pytest.mark.slow
@examples(150)
@given(p=problems(), policy=st.sampled_from([*POLICIES.builtin, "greedy"]), agnostic=st.booleans())
def test_every_allocation_is_feasible_and_its_gap_closed(p, policy, agnostic):
    """On random problems with gangs, weights, unusable types and types without GPUs.

    The bound comes from weak duality, so a wrong optimum could not hide behind it.
    """
    answer = greedy(p) if policy == "greedy" else allocate(policy, p, agnostic=agnostic)
    feasible(p, answer)
    consistent(p, answer)
    if policy in BOUNDED:
        assert answer.gap <= 1e-6
        assert answer.status == "optimal"


@pytest.mark.parametrize(
    ("policy", "by_types"),
    [
        *((name, False) for name in BOUNDED),
        *((name, True) for name in ("water-filling", "hierarchical")),
    ],
)
@pytest.mark.parametrize("contention", first_daily([8.0, 2.0, 0.6], 2))
def test_a_shadow_price_is_what_a_little_more_of_a_type_adds_to_the_objective(
    policy, by_types, contention, monkeypatch
):
    """In the objective's unit, at the same equal shares; of a makespan the seconds that it saves."""
    monkeypatch.setattr(methods, "STAGES", 0 if by_types else 10**9)
    real = instance(random_problem(3, 25, 3, gangs=(1, 2), contention=contention, entities=3))
    answer = solve(policy, real)
    for j, price in enumerate([] if answer.shadow_prices is None else answer.shadow_prices):
        sides = []
        for step in (-1e-5, 1e-5):
            capacity = real.capacity * np.where(np.arange(3) == j, 1 + step, 1.0)
            other = solve(policy, dataclasses.replace(real, capacity=capacity)).objective
            sides.append(abs(other - answer.objective) / (1e-5 * real.capacity[j]))
        rounding = 1e-4 * answer.objective / real.capacity[j]
        assert min(sides) * (1 - 1e-3) - rounding <= price <= max(sides) * (1 + 1e-3) + rounding


def test_teams_that_rise_in_later_stages_have_no_shadow_prices():
    """Of the first stage's end they would be those of another level; of a team that is full they are 0."""
    teams = {"one": Entity(), "two": Entity()}
    rates = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    rising = problem(rates, [1, 1, 1], entities=teams, entity=["one", "one", "two", "two"])
    full = problem([[4.0], [1.0]], [5], entities=teams, entity=["one", "two"])
    assert not allocate("hierarchical", rising).shadow_prices
    assert allocate("hierarchical", full).shadow_prices == {"type-0": 0.0}


@pytest.mark.parametrize("policy", POLICIES.builtin)
def test_the_same_problem_has_the_same_answer(policy):
    """Bit for bit, so that two replicas decide alike and a run can be repeated."""
    p = random_problem(7, 30, 3, entities=3, pairs=0.2)
    first, second = (allocate(policy, p, space_sharing=True) for _ in range(2))
    assert dataclasses.replace(first, solve_seconds=0) == dataclasses.replace(second, solve_seconds=0)


@pytest.mark.parametrize("policy", POLICIES.builtin)
def test_no_jobs_is_an_empty_answer(policy):
    """A cluster without work is not an error."""
    answer = allocate(policy, problem([], [2, 1]))
    assert answer.allocation == {}
    assert answer.objective == 0.0


@pytest.mark.parametrize("policy", POLICIES.builtin)
def test_units_of_a_jobs_steps_do_not_matter_to_fair_policies(policy):
    """Counting a job's steps in thousands changes no share, except where steps themselves are the aim."""
    if policy in ("max-throughput", "max-throughput-per-dollar"):
        pytest.skip("these add up steps of different jobs, as the dissertation does")
    T, steps = np.array([[40.0, 10], [12, 4], [100, 50]]), np.array([1e4, 3e4, 2e4])
    unit = np.array([1.0, 1e3, 1e-3])
    plain = allocate(policy, problem(T.tolist(), [1, 1], steps=steps.tolist(), prices=[3, 1]))
    scaled = problem((T * unit[:, None]).tolist(), [1, 1], steps=(steps * unit).tolist(), prices=[3, 1])
    other = allocate(policy, scaled)
    for job, row in plain.allocation.items():
        assert other.allocation[job] == pytest.approx(row, abs=1e-5)


def test_an_unknown_policy_is_refused_with_the_names_there_are():
    """The message lists what could have been meant."""
    with pytest.raises(ProblemError, match=r"'fairest' is not one of .*max-min-fairness"):
        allocate("fairest", problem([[1.0]], [1]))


@pytest.mark.parametrize("steps", [1.0, 1e-2, 1e-4])
def test_a_job_that_is_almost_done_gets_its_time_beside_jobs_of_months(steps):
    """A share of 1e-9 or less is still more than none: the makespan is finite, and proven."""
    T, long = [[10.0 + m, 1.0 + m / 7] for m in range(30)], [1e6 * (m + 1) for m in range(30)]
    others = allocate("makespan", problem(T, [1, 1], steps=long))
    answer = allocate("makespan", problem([*T, [100.0, 50.0]], [1, 1], steps=[*long, steps]))
    assert answer.throughput["job-30"] > 0
    assert answer.status == "optimal"
    assert answer.objective == pytest.approx(others.objective, rel=1e-6)


@pytest.mark.parametrize("policy", POLICIES.builtin)
def test_steps_that_a_job_does_not_state_count_as_an_hour_on_its_fastest_type(policy):
    """Nothing but a name and speeds is needed."""
    T, capacity = [[4.0, 1.0], [2.0, 3.0]], [1, 1]
    stated = allocate(policy, problem(T, capacity, steps=[4 * 3600.0, 3 * 3600.0], prices=[2, 1]))
    silent = allocate(policy, problem(T, capacity, steps=[None, 3 * 3600.0], prices=[2, 1]))
    assert silent.objective == pytest.approx(stated.objective, rel=1e-12)
    assert silent.allocation == stated.allocation


@pytest.mark.parametrize(
    ("given", "counts"), [({}, [1.0, 1.0, 1.0]), ({"type-0": 1.0, "type-2": 3.0}, [1.0, 2.0, 3.0])]
)
@pytest.mark.parametrize("policy", ["max-throughput-per-dollar", "min-cost", "min-cost-slo"])
def test_a_missing_price_counts_as_the_mean_of_the_others(policy, given, counts):
    """And as 1 where no type has one."""
    p = problem([[4.0, 2.0, 1.0], [1.0, 3.0, 2.0]], [1, 1, 1])
    silent = allocate(policy, dataclasses.replace(p, prices=given))
    stated = allocate(policy, dataclasses.replace(p, prices={f"type-{j}": c for j, c in enumerate(counts)}))
    assert silent.objective == pytest.approx(stated.objective, rel=1e-12)


def test_the_agnostic_alloxs_objective_is_in_real_seconds():
    """Blind to types it may send the long job to the slow GPU; what that costs is told as it is."""
    p = problem([[1.0, 0.5], [1.0, 0.1]], [1, 1], steps=[100.0, 100.0])
    assert allocate("allox", p).objective == pytest.approx((200 + 100) / 2)
    blind = allocate("allox", p, agnostic=True)
    seconds = [100 / blind.throughput[job.name] for job in p.jobs]
    assert blind.objective == pytest.approx(sum(seconds) / 2)


def test_pairs_that_cannot_help_are_left_out():
    """A pair that does no more than taking turns would is never a column; one that does is."""
    p = problem([[10.0, 10], [4.0, 4]], [1, 1])
    p = dataclasses.replace(p, pairs=(pair(0, 1, (5, 2), (8, 3)),))
    columns = instance(p, space_sharing=True).columns
    assert columns.kind[columns.second >= 0].tolist() == [1]


def test_speeds_that_differ_by_millions_are_no_obstacle_to_finish_time_fairness():
    """Steps that take no time beside the time waited: the rest is then left as it is, not refused."""
    p = problem(
        [[4.9e7, 2.6e5], [559.0303745163907, 3.6129114546223176]],
        [4, 8],
        gpus=[2, 4],
        steps=[101300.63647800339, 0.19649893489368214],
        elapsed=[6463.129038671675, 8411.568243026597],
        isolated=[9934.934227892752, 4289.958072546792],
    )
    answer = allocate("finish-time-fairness", p)
    assert answer.gap <= 1e-6


def test_a_job_of_a_millisecond_ends_beside_one_of_months():
    """Its demand is below what a solver tells from none, but it has some time, and the makespan is finite."""
    T = [[54.71], [596.7], [43160.0], [2.204e6], [8.802e8]]
    p = problem(T, [6], gpus=[1, 4, 1, 2, 1], steps=[0.03181, 8.473e9, 1.199e11, 7.796e10, 2.121e9])
    answer = allocate("makespan", p)
    assert answer.objective == pytest.approx(8.473e9 / 596.7, rel=1e-6)
    assert answer.gap <= 1e-6
    assert answer.throughput["job-0"] > 0


def test_finish_time_fairness_of_a_job_whose_rest_is_nothing_beside_its_past():
    """Seconds left that rounding loses beside those elapsed: full speed is what the job needs at most."""
    p = problem([[1.0, 1e12, 2.0]], [1, 1, 8], steps=[4.8], elapsed=[1e15], isolated=[1e15])
    answer = allocate("finish-time-fairness", p)
    assert answer.objective == pytest.approx(1.0)
    assert answer.throughput["job-0"] == pytest.approx(1e12)


def test_a_level_far_below_full_speed_is_met_or_said_not_to_be():
    """A gap is a part of the level itself: one that stays at 0 is not `optimal`, however little is missed."""
    T = [[3.0, 3.0, 1.0], [3.0, 3.0, 0.0], [0.0, 3.0, 3.0], [3.0, 3.0, 3.0]]
    p = problem(T, [1, 4, 1], gpus=[1, 2, 4, 4], weights=[0.05, 7e-7, 4.2e7, 3.5e7])
    answer = allocate("water-filling", p)
    assert answer.levels["job-1"] == pytest.approx(7.8e-8, rel=0.02) or answer.status == "gap"


def test_a_demand_met_on_a_type_a_billion_times_slower_can_be_met_again():
    """HiGHS takes such speeds for 0 by itself, and the next stage then has demands that nothing meets."""
    p = problem([[0.0044, 5.5e6]] * 5, [100, 2], gpus=[1, 4, 2, 4, 1], weights=[2e-7, 18, 0.2, 8e-8, 0.05])
    assert allocate("water-filling", p).status == "optimal"


def test_a_job_with_a_tiny_weight_keeps_its_least_part_of_its_fair_share():
    """What it takes from jobs of millions times its weight is lost in their rounding; 1/e is proven."""
    T = [[2.0, 3.0, 3.0], [3.0, 3.0, 0.0], [1.0, 2.0, 0.0], [1.0, 3.0, 2.0], [2.0, 3.0, 1.0]]
    weights = [9790755.93495159, 2.18e-7, 7622795.906095014, 0.004742, 0.0287]
    p = problem(T, [100, 8, 8], gpus=[1, 8, 1, 4, 1], weights=weights)
    assert allocate("strategy-proof", p).throughput["job-1"] > 0.1


def test_jobs_whose_fair_share_is_rounded_to_nothing_have_shares_that_are_numbers():
    """Beside a weight of a hundred million million times theirs they wait; no share is NaN."""
    p = problem([[1.0], [1.0], [2.0], [2.4e-8]], [1], weights=[1e-9, 3.4e-3, 1e-9, 5.9e5])
    answer = allocate("strategy-proof", p)
    assert all(0 <= rate <= 2 for rate in answer.throughput.values())
    assert answer.status == "gap"
