"""Elastic jobs under the operator's rules, simulated: what elasticity brings, and what never happens."""

import functools
import json

import pytest
from ballast_operator.cli.simulate.command import simulate as command
from ballast_policies.allocation.policy import SpaceSharing
from ballast_policies.allocation.registry import POLICIES
from ballast_policies.simulator.clock import SimulationError
from ballast_policies.simulator.elastic import OperatorRules, read_workload, simulate_rules
from click.testing import CliRunner

from tests.support.elastic_workloads import file
from tests.support.examples import first_daily

pytestmark = pytest.mark.slow

NAMES = [name for name, row in POLICIES.builtin.items() if row.space_sharing is not SpaceSharing.ALWAYS]


@functools.cache
def run(jobs, seed, *, policy="max-min-fairness", sizes="stated", every=100.0, **rules):
    workload = read_workload(file(jobs, seed=seed, every=every), sizes=sizes)
    return simulate_rules(workload, OperatorRules(policy=policy, **rules))


@pytest.mark.parametrize("policy", NAMES)
def test_every_job_ends_by_every_policy_and_none_is_faster_than_alone(policy):
    """Also GPUs never over capacity, which the simulation checks at each decision."""
    result = run(12, 1, policy=policy, every=60.0)
    assert len(result.jobs) == 12
    assert all(job.completion_time >= job.alone - 1e-6 for job in result.jobs)
    assert 0 < result.utilisation <= 1


@pytest.mark.parametrize("every", first_daily([100.0, 30.0, 1000.0]), ids=["busy", "contended", "quiet"])
@pytest.mark.parametrize("policy", ["max-min-fairness", "finish-time-fairness", "shortest-job-first"])
def test_jobs_that_may_change_their_size_end_sooner_on_average(policy, every):
    """Against the same jobs at their requested sizes, under the same rules and prices of a change."""
    elastic, fixed = (
        run(25, 0, policy=policy, every=every, sizes=sizes) for sizes in ("stated", "requested")
    )
    assert elastic.average_completion_time < 0.9 * fixed.average_completion_time


@pytest.mark.parametrize("every", [30.0, 100.0], ids=["contended", "busy"])
def test_by_completion_time_jobs_end_sooner_than_by_the_other_policies(every):
    """Their lengths are known; sizes, GPU types and restarts are weighed together."""
    chosen, *others = (
        run(25, 0, policy=policy, every=every).average_completion_time
        for policy in ("completion-time", "max-min-fairness", "shortest-job-first", "makespan")
    )
    assert chosen < min(others)


def test_no_single_size_for_all_jobs_is_better():
    """Nor the best of them, known only afterwards."""
    elastic = run(25, 0)
    fixed = [run(25, 0, sizes=size).average_completion_time for size in (1, 2, 4, 8)]
    assert elastic.average_completion_time < 0.95 * min(fixed)


def test_most_changes_of_size_are_live():
    """Jobs come and go all the time; few gangs are restarted for that."""
    result = run(60, 0)
    assert result.restarts_per_job < 0.6


def test_the_dearer_a_live_change_the_later_jobs_end():
    """Its pause is charged."""
    quick, slow = (run(30, 2, pause_seconds=pause) for pause in (1.0, 60.0))
    assert quick.average_completion_time < slow.average_completion_time


def two_jobs(**rules):
    """Seconds of a long job on four GPUs, and of a short one that comes 10 s after it; rounds of 30 s."""
    text = json.dumps(
        {
            "cluster": {"v100": {"nodes": 1, "gpus_per_node": 4}},
            "option_columns": ["gpus", "samples_per_s"],
            "job_columns": ["name", "arrival_s", "application", "batch_size", "work_samples"],
            "models": {
                "linear@1": {"restart_s": 2.0, "types": {"v100": {"options": [[1, 1.0], [2, 2.0], [4, 4.0]]}}}
            },
            "workloads": {"two": [["long", 0, "linear", 1, 600], ["short", 10, "linear", 1, 100]]},
        }
    )
    rules = {"policy": "max-min-fairness", "round_seconds": 30.0, "pause_seconds": 0.0, **rules}
    return [job.completion_time for job in simulate_rules(read_workload(text), OperatorRules(**rules)).jobs]


def test_a_gang_trains_at_its_old_size_until_its_new_ranks_are_there():
    """From two to four GPUs, once: half of the eight seconds are lost, by the gang that grows alone."""
    (long, short), (later, same) = two_jobs(), two_jobs(growth_seconds=8.0)
    assert later == pytest.approx(long + 8.0 * (1 - 2 / 4))
    assert same == pytest.approx(short)


def test_a_job_holds_its_gpus_for_a_moment_after_its_last_step():
    """It counts as done then; who waits for its GPUs has them as much later."""
    (long, short), (later, ended) = two_jobs(), two_jobs(end_seconds=4.0)
    assert ended == pytest.approx(short + 4.0)
    assert later == pytest.approx(long + 4.0 + 4.0 * (1 - 2 / 4))


def test_a_gang_that_has_changed_its_size_settles_before_it_grows():
    """20 pauses of 3 s after it has made room: the GPUs of a job that is done sooner are idle until then."""
    (long, _), (later, _) = two_jobs(pause_seconds=0.1), two_jobs(pause_seconds=3.0)
    assert later > long + 2 * 2.9


def test_one_job_alone_starts_when_it_arrives_and_runs_at_its_best():
    """No end of a round is waited for."""
    (job,) = run(1, 3).jobs
    assert job.restarts == 0
    assert job.completion_time == pytest.approx(job.alone)


def test_rounds_that_are_shorter_than_a_restart_are_refused():
    """Gangs that take turns would never train."""
    with pytest.raises(SimulationError, match=r"a restart takes up to 90 s.*--min-run-seconds above 90"):
        run(5, 0, round_seconds=60.0)
    assert run(5, 0, round_seconds=60.0, min_run_seconds=600.0).restarts_per_job >= 0


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    found = tmp_path_factory.mktemp("elastic") / "jobs.json"
    found.write_text(file(8, seed=2))
    return str(found)


def test_the_command_runs_any_policy_of_a_cluster_policy(path):
    """``ballast simulate --elastic FILE --rules ballast``."""
    options = ["--elastic", path, "--rules", "ballast", "--policy", "hierarchical", "--output", "json"]
    done = CliRunner().invoke(command, [*options, "--max-moves-per-hour", "2"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert (result["policy"], result["round_seconds"], result["jobs_measured"]) == ("hierarchical", 360.0, 8)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rules", "ballast", "--policy", "sia"], "'sia'"),
        (["--rules", "ballast", "--policy", "gandiva"], "always shares"),
        (["--rules", "published", "--policy", "sia"], "To fix: --rules ballast"),
        (["--policy", "max-min-fairness"], "or --rules ballast"),
        (["--policy", "sia", "--min-run-seconds", "60"], "--min-run-seconds"),
        (["--policy", "sia", "--launch-seconds", "60"], "--launch-seconds"),
        (["--rules", "ballast", "--policy", "makespan", "--pause-seconds", "nan"], "--pause-seconds: nan"),
        (["--rules", "ballast", "--policy", "makespan", "--growth-seconds", "-1"], "--growth-seconds: -1"),
        (["--policy", "sia", "--end-seconds", "1"], "--end-seconds"),
        (["--rules", "ballast", "--policy", "makespan", "--round", "-1"], "--round: -1"),
        (["--policy", "sia", "--sizes", "0"], "'0' is not stated, all, requested or a number of GPUs"),
        (["--policy", "sia", "--sizes", "four"], "'four' is not stated"),
        (["--rules", "ballast", "--policy", "makespan", "--max-moves-per-hour", "-1"], "is below 0"),
    ],
)
def test_options_that_have_no_meaning_are_refused(path, options, said):
    """With the option's name, exit code 2, and no traceback."""
    done = CliRunner().invoke(command, ["--elastic", path, *options])
    assert done.exit_code == 2, done.output
    assert said in " ".join(done.output.replace("│", " ").split())
