"""Small worlds whose outcome can be said beforehand."""

import functools
import itertools

import pytest
from ballast_lab.gavel.shares import GAVEL_RULES
from ballast_policies.simulator.plot import lanes
from ballast_policies.simulator.settings import SettingsError, SimulatedCluster
from ballast_policies.simulator.workloads import Workload, WorkloadError
from ballast_policies.throughput.table import JobType

from tests.support.simulations import ALL_RULES, job, simulated, simulation, table

run = functools.partial(simulated, prices={"fast": 2.0}, rules="gavel")
FAST = table({("a", 1): {"fast": 1.0}, ("b", 1): {"fast": 1.0}, ("a", 2): {"fast": 1.0}})


@pytest.mark.parametrize("rules", ALL_RULES)
def test_a_job_alone_takes_its_steps_over_its_throughput(rules):
    """720 steps at 1 step/s, 1 GPU at 2 USD/h."""
    result = run([job()], {"fast": 1}, FAST, rules=rules)
    assert result.average_completion_time == pytest.approx(720.0)
    assert result.makespan == pytest.approx(720.0)
    assert result.utilisation == pytest.approx(1.0)
    assert result.cost == pytest.approx(0.4)
    assert result.finish_time_fairness == pytest.approx(1.0)
    assert result.lease_extensions == 1


@pytest.mark.parametrize("rules", ALL_RULES)
def test_two_jobs_on_one_gpu_take_turns(rules):
    """Rounds alternate, so both of 720 s end in the last two rounds of four."""
    result = run([job(), job("b")], {"fast": 1}, FAST, rules=rules)
    finishes = sorted(row.finish for row in result.jobs)
    assert finishes == pytest.approx([1080.0, 1440.0])
    assert result.utilisation == pytest.approx(1.0)


def test_who_waits_for_the_next_allocation_gets_it_to_the_last_bit_of_the_clock():
    """The wait ends at a + 1920 s; for these a, a + 1920 - a is less than 1920 in floating point."""
    least = GAVEL_RULES.least_seconds_between_solves
    begins = [a for a in (1000.0 + 0.1 * i for i in range(100)) if (a + least) - a < least]
    assert begins
    for begin in begins[:5]:
        jobs = [job(steps=10.0), job("b", arrival=begin), job(arrival=begin + 721.0)]
        result = run(jobs, {"fast": 1}, FAST, rules="gavel")
        assert result.jobs[2].finish == pytest.approx(begin + least + 720.0)


def test_a_gang_waits_until_all_its_gpus_are_there_and_is_not_starved():
    """A gang of two and two ones on two GPUs: all are done when the work is."""
    result = run([job(), job("b"), job(gpus=2)], {"fast": 2}, FAST, rules="ballast")
    assert result.makespan == pytest.approx(1440.0)
    assert result.utilisation == pytest.approx(1.0)


def test_within_a_round_gavel_lets_idle_what_comes_free_and_the_operator_does_not():
    """The second job arrives at 10 s on an idle GPU."""
    jobs = [job(), job("b", arrival=10.0)]
    at_once = run(jobs, {"fast": 2}, FAST, rules="ballast")
    assert at_once.jobs[1].first_run == pytest.approx(10.0)
    next_round = run(jobs, {"fast": 2}, FAST, rules="gavel")
    assert next_round.jobs[1].first_run == pytest.approx(360.0)


def test_gavels_minimum_between_allocations_delays_a_newcomer():
    """The third allocation waits for 1920 s after the second, so its job does too."""
    jobs = [job(steps=7200.0), job("b", 7200.0, arrival=10.0), job("b", arrival=370.0)]
    result = run(jobs, {"fast": 3}, FAST, rules="gavel")
    assert result.jobs[1].first_run == pytest.approx(360.0)
    assert result.jobs[2].first_run == pytest.approx(360.0 + 6 * 360.0)


def test_jobs_run_where_they_gain_most():
    """Each of two types is fast for one of two jobs."""
    oracle = table({("a", 1): {"fast": 4.0, "slow": 1.0}, ("b", 1): {"fast": 1.0, "slow": 1.0}})
    result = run([job(), job("b")], {"fast": 1, "slow": 1}, oracle, rules="ballast")
    assert set(result.jobs[0].seconds_on) == {"fast"}
    assert set(result.jobs[1].seconds_on) == {"slow"}


def test_ideal_gives_exactly_the_shares():
    """Two equal jobs on one GPU progress at half speed side by side."""
    result = run([job(), job("b")], {"fast": 1}, FAST, ideal=True)
    assert [row.finish for row in result.jobs] == pytest.approx([1440.0, 1440.0])
    assert result.utilisation == pytest.approx(1.0)


SEEN = []
"""What the policy below was told."""


def notes(cluster):
    """Half of the GPU for each of two jobs."""
    SEEN.extend(zip(cluster.jobs, cluster.isolated_elapsed.tolist(), strict=True))
    return cluster.capacity / cluster.capacity.sum() / 2 * (cluster.speeds > 0)


def test_a_policy_of_ones_own_is_told_how_long_jobs_would_have_taken_on_isolated_shares():
    """A job that ran alone has done in its first round what takes two on half of the GPU."""
    SEEN.clear()
    run([job(), job("b")], {"fast": 1}, FAST, rules="ballast", policy=f"{__name__}:notes")
    assert max(seconds for _, seconds in SEEN) == pytest.approx(720.0)


def test_rho_is_the_completion_time_over_that_on_an_isolated_part():
    """Finish-time fairness: alone on two GPUs, of which half the time of each would be its part of 1/1."""
    oracle = table({("a", 1): {"fast": 4.0, "slow": 2.0}})
    result = run([job(steps=3600.0)], {"fast": 1, "slow": 1}, oracle, rules="ballast")
    assert result.jobs[0].completion_time == pytest.approx(900.0)
    # X_isolated is half of the time on each type: 3 steps/s, 1200 s.
    assert result.finish_time_fairness == pytest.approx(0.75)


def test_the_isolated_part_of_a_job_is_that_of_its_weight():
    """Of two GPUs 3/4 and 1/4: 3600 steps would take 900 s, since no job has two, and 1800 s."""
    jobs = [job(steps=3600.0, weight=3.0), job(steps=3600.0, weight=1.0)]
    result = run(jobs, {"fast": 2}, table({("a", 1): {"fast": 4.0}}), rules="ballast")
    assert [row.rho for row in result.jobs] == pytest.approx([1.0, 0.5])


@pytest.mark.parametrize("rules", ALL_RULES)
def test_a_gang_that_is_not_measured_is_drawn_on_all_of_its_gpus(rules):
    """Two beside the one of the job that is."""
    jobs = [job(gpus=2), job("b")]
    result = run(jobs, {"fast": 3}, FAST, rules=rules, measure=(1, 2), record_timeline=True)
    assert sorted((at.row, at.gpus) for at, _ in lanes(result)) == [(0, 2), (1, 1)]


def test_a_late_job_misses_its_deadline():
    """A deadline of 1.2 x the time alone; the second of two jobs in turn takes 2 x."""
    jobs = [job(deadline_factor=1.2), job("b", deadline_factor=1.2), job("b", steps=36.0)]
    result = run(jobs, {"fast": 1}, FAST, rules="ballast")
    assert (result.deadlines, result.deadline_violations) == (2, 2)
    alone = run(jobs[:1], {"fast": 1}, FAST, rules="ballast")
    assert (alone.deadlines, alone.deadline_violations) == (1, 0)
    elsewhere = table({("a", 1): {"v100": 0.0, "slow": 1.0}, ("b", 1): {"v100": 1.0, "slow": 1.0}})
    never_on_v100 = run([*jobs[:1], jobs[2]], {"v100": 1, "slow": 1}, elsewhere)
    assert (never_on_v100.deadlines, never_on_v100.deadline_violations) == (1, 0)


@pytest.mark.parametrize("rules", ALL_RULES)
def test_work_and_time_are_conserved(rules):
    """GPU seconds booked on jobs are the GPU seconds that were busy, and all steps are done."""
    oracle = table(
        {
            ("a", 1): {"fast": 4.0, "slow": 1.0},
            ("b", 1): {"fast": 2.0, "slow": 1.5},
            ("a", 2): {"fast": 7.0, "slow": 0.0},
        }
    )
    jobs = [job("ab"[i % 2], 3000.0 + 700 * i, arrival=90.0 * i) for i in range(12)]
    jobs.append(job(steps=20000.0, gpus=2, arrival=1100.0))
    result = run(jobs, {"fast": 2, "slow": 3}, oracle, rules=rules)
    on_jobs = sum(row.gpus * sum(row.seconds_on.values()) for row in result.jobs)
    assert on_jobs == pytest.approx(result.utilisation * 5 * result.duration)
    for row in result.jobs:
        done = sum(
            oracle.alone(JobType(name=row.type, gpus=row.gpus), kind) * seconds
            for kind, seconds in row.seconds_on.items()
        )
        assert done == pytest.approx(row.steps, rel=0.01)


@pytest.mark.parametrize("rules", ["ballast", "whole-rounds"])
def test_an_endless_workload_ends_when_the_measured_jobs_are_done(rules):
    """Jobs keep arriving until then; the averages are over the window alone."""

    class Endless:
        def __iter__(self):
            return (job(steps=360.0, arrival=600.0 * i) for i in itertools.count())

    workload = Workload(name="endless", jobs=Endless(), endless=True)
    run_it = simulation(policy="max-min-fairness", measure=(3, 5), rules=rules)
    result = run_it(workload, SimulatedCluster(gpus={"fast": 1}), FAST)
    assert result.jobs_measured == 2
    assert result.average_completion_time == pytest.approx(360.0)
    assert result.duration == pytest.approx(4 * 600.0 + 360.0)


@pytest.mark.parametrize("rules", ["ballast", "gavel"])
def test_what_cannot_be_simulated_is_said(rules):
    """A workload without an end or a window, one beyond it, a job that fits nowhere or has no end."""
    with pytest.raises(SettingsError, match="measure: the workload is endless"):
        simulation(rules, policy="max-min-fairness")(
            Workload(name="endless", jobs=(job(),), endless=True), SimulatedCluster(gpus={"fast": 1}), FAST
        )
    with pytest.raises(SettingsError, match="goes beyond the 1 jobs"):
        run([job()], {"fast": 1}, FAST, rules=rules, measure=(0, 5))
    with pytest.raises(WorkloadError, match="fits on no GPU type"):
        run([job(gpus=2)], {"fast": 1}, FAST, rules=rules)
    with pytest.raises(WorkloadError, match=r"1e\+18 steps take .* s alone on its fastest GPU type"):
        run([job(steps=1e18)], {"fast": 1}, FAST, rules=rules)
    with pytest.raises(WorkloadError, match=r"arrives at 1e\+20 s. To fix: 1e\+09 s at most"):
        run([job(arrival=1e20)], {"fast": 1}, FAST, rules=rules)
    with pytest.raises(SettingsError, match="gpus: there is none"):
        SimulatedCluster(gpus={"fast": 0})


@pytest.mark.parametrize("rules", ["ballast", "gavel"])
def test_progress_counts_the_measured_jobs(rules):
    """The last call says that all are done."""
    seen = []
    simulation(rules, policy="max-min-fairness")(
        Workload(name="test", jobs=(job(), job("b"))),
        SimulatedCluster(gpus={"fast": 1}),
        FAST,
        progress=lambda moment: seen.append((moment.done, moment.total)),
    )
    assert seen[-1] == (2, 2)
    assert seen == sorted(seen)


@pytest.mark.parametrize("rules", ALL_RULES)
def test_progress_counts_the_jobs_that_wait(rules):
    """Three jobs of half an hour, one GPU: one runs, the others wait, and fewer as jobs are done."""
    seen = []
    simulation(rules, policy="fifo")(
        Workload(name="test", jobs=[job(steps=1800.0) for _ in range(3)]),
        SimulatedCluster(gpus={"fast": 1}),
        FAST,
        progress=lambda moment: seen.append((moment.done, moment.present, moment.waiting)),
    )
    assert {(done, present) for done, present, _ in seen[1:]} == {(0, 3), (1, 2), (2, 1), (3, 0)}
    assert {waiting for _, present, waiting in seen if present == 3} == {2}
    assert seen[-1] == (3, 0, 0)


@pytest.mark.parametrize("rules", ALL_RULES)
def test_a_job_slower_than_a_step_a_round_ends(rules):
    """0.001 steps/s are 0.36 steps in a round of 360 s: five steps take 5,000 s under every set of rules."""
    slow = table({("a", 1): {"v100": 0.001}})
    result = run([job(steps=5.0)], {"v100": 1}, slow, rules=rules, round_seconds=360.0)
    assert result.jobs[0].finish == pytest.approx(5000.0)


@pytest.mark.parametrize("rules", ALL_RULES)
def test_slow_and_fast_jobs_end_beside_each_other(rules):
    """A mixture on too few GPUs, down to a millionth of a step a round."""
    rates = {("a", 1): {"v100": 0.001}, ("b", 1): {"v100": 3e-9}, ("c", 2): {"v100": 10.0}}
    jobs = [job("a", 2.0), job("b", 1e-5, arrival=100.0), job("c", 720_000.0, arrival=50.0, gpus=2)]
    result = run(jobs, {"v100": 2}, table(rates), rules=rules, round_seconds=360.0)
    assert all(found.finish is not None for found in result.jobs)


TABLE = table({("job", 1): {"v100": 1.0}})
SETTINGS = {"policy": "max-min-fairness", "round_seconds": 10.0}


def finishes(steps, *, gpus=1, arrivals=None, **settings):
    jobs = list(map(functools.partial(job, "job"), steps, arrivals or [0.0] * len(steps)))
    found = []
    for arrays in (False, True):
        result = simulated(jobs, {"v100": gpus}, TABLE, **SETTINGS, **settings, arrays=arrays)
        found.append([one["finish"] for one in result.to_json(per_job=True)["jobs"]])
    assert found[0] == pytest.approx(found[1], rel=1e-12)
    return found[0]


def test_a_gang_that_keeps_its_gpus_pays_its_launch_once():
    """However many rounds it runs, and whatever leaving costs."""
    assert finishes([35.0], launch_seconds=4.0, stop_seconds=2.0) == [39.0]


def test_gangs_that_take_turns_pay_for_each_turn():
    """By hand: 9 + 7 steps in two turns; then 6 of one (3 s of change), then 8 of the other (1 s)."""
    assert finishes([15.0, 15.0], launch_seconds=1.0, stop_seconds=2.0) == [29.0, 38.0]


def test_a_gang_that_finds_idle_gpus_does_not_wait_for_others_to_leave():
    """Who arrives in the middle of a round pays its launch alone."""
    assert finishes([20.0, 20.0], gpus=2, arrivals=[0.0, 3.0], launch_seconds=1.0, stop_seconds=5.0) == [
        21,
        24,
    ]


def test_a_gang_that_is_stopped_trains_on_for_the_notice():
    """By hand: half a second less is left after each of two turns that end with the other's."""
    assert finishes([15.0, 15.0], launch_seconds=1.0, stop_seconds=2.0, notice_seconds=0.5) == [28.5, 37.0]


def test_a_gang_whose_rest_takes_less_than_the_notice_is_done_with_it():
    """It is not launched again for the last step."""
    assert finishes([9.25, 15.0], launch_seconds=1.0, stop_seconds=2.0, notice_seconds=0.5) == [10.25, 28.0]


def test_without_costs_nothing_changes():
    """Zero is as if there were no such setting."""
    assert finishes([15.0, 15.0], launch_seconds=0.0, stop_seconds=0.0) == finishes([15.0, 15.0])


@pytest.mark.parametrize("settings", [{"ideal": True}, {"rules": "gavel"}])
def test_costs_of_starts_are_refused_where_they_would_not_count(settings):
    """Gavel's rules and ideal shares have none."""
    with pytest.raises(SettingsError, match=r"launch_seconds: 1 s.*To fix"):
        simulation(**SETTINGS, launch_seconds=1.0, **settings)


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_impossible_costs_are_named(seconds):
    """With the option's name."""
    with pytest.raises(SettingsError, match="stop_seconds"):
        simulation(**SETTINGS, stop_seconds=seconds)
