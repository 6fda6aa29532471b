"""Elastic jobs, simulated: by policies of their own, and under the operator's rules."""

import functools
import json

import pytest
from ballast_operator.cli.simulate.command import simulate as command
from ballast_policies.allocation.policy import SpaceSharing
from ballast_policies.allocation.registry import POLICIES
from ballast_policies.contract.errors import ContractError
from ballast_policies.elastic.completion_time import ELASTIC_POLICIES
from ballast_policies.simulator.elastic import OperatorRules, simulate, simulate_rules
from ballast_policies.simulator.elastic_file import read_workload
from click.testing import CliRunner

from tests.support.distributions import install
from tests.support.elastic_workloads import file
from tests.support.examples import first_daily, first_fast

NAMES = [name for name, row in POLICIES.builtin.items() if row.space_sharing is not SpaceSharing.ALWAYS]


@functools.cache
def run(jobs, seed, *, policy="max-min-fairness", sizes="stated", every=100.0, **rules):
    """Under the operator's rules."""
    workload = read_workload(file(jobs, seed=seed, every=every), sizes=sizes)
    return simulate_rules(workload, OperatorRules(objective=policy, **rules))


def alone(jobs, seed, *, policy="completion-time", sizes="stated"):
    """By a policy of elastic jobs."""
    return simulate(read_workload(file(jobs, seed=seed), sizes=sizes), policy=policy)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A file of ten jobs."""
    found = tmp_path_factory.mktemp("elastic") / "jobs.json"
    found.write_text(file(10, seed=2))
    return str(found)


def called(path, *options):
    return CliRunner().invoke(command, ["--elastic", path, *options])


def none_is_faster_than_alone(result, jobs):
    """Also GPUs never over capacity, which the simulation checks at each decision."""
    assert len(result.jobs) == jobs
    assert all(job.completion_time >= job.alone - 1e-6 for job in result.jobs)
    assert 0 < result.utilisation <= 1


@pytest.mark.slow
@pytest.mark.parametrize("policy", ELASTIC_POLICIES)
@pytest.mark.parametrize("sizes", first_fast(["stated", "all", "requested"]))
def test_every_job_ends_and_none_is_faster_than_alone(policy, sizes):
    """Whatever sizes it may have."""
    none_is_faster_than_alone(alone(40, 1, policy=policy, sizes=sizes), 40)


@pytest.mark.slow
@pytest.mark.parametrize("policy", NAMES)
def test_every_job_ends_by_every_policy_and_none_is_faster_than_alone(policy):
    """Under the operator's rules."""
    none_is_faster_than_alone(run(12, 1, policy=policy, every=60.0), 12)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_choice_of_size_pays_on_average(seed):
    """``completion-time`` against the same jobs at their requested sizes, and against Sia's program."""
    chosen = alone(60, seed).average_completion_time
    assert chosen < alone(60, seed, sizes="requested").average_completion_time
    assert chosen < alone(60, seed, policy="sia").average_completion_time


def test_one_job_alone_runs_on_its_best_configuration():
    """From the first round after its arrival, its start included; by the operator at once."""
    (job,), (at_once,) = alone(1, 3).jobs, run(1, 3).jobs
    assert job.restarts == at_once.restarts == 0
    assert job.completion_time == pytest.approx(job.alone + (-job.arrival) % 60.0)
    assert at_once.completion_time == pytest.approx(at_once.alone)


def test_jobs_that_train_for_decades_take_turns_at_ends_of_rounds():
    """Rounds are counted right by a clock of numbers so large that quotients of them are rounded."""
    fields = json.loads(file(30, seed=3))
    fields["cluster"] = {"slow": {"nodes": 1, "gpus_per_node": 1}}
    for row in fields["workloads"]["random"]:
        row[-1] = 4e9
    result = simulate(read_workload(json.dumps(fields)), policy="completion-time", round_seconds=7.3)
    assert len(result.finished) == 30


def test_the_command_prints_averages_and_rows(path):
    """``ballast simulate --elastic FILE``."""
    done = called(path, "--policy", "completion-time", "--jobs", "--output", "json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["jobs_measured"] == len(result["jobs"]) == 10
    assert result["average_jct_hours"] == pytest.approx(result["average_jct_seconds"] / 3600)
    for percent, hours in result["jct_percentiles_hours"].items():
        sooner = sum(job["completion_time"] / 3600 < hours for job in result["jobs"])
        assert sooner == min(int(float(percent) / 100 * 10), 9)
    text = called(path, "--policy", "sia")
    assert text.exit_code == 0
    assert "average completion time" in text.stdout


@pytest.mark.slow
def test_the_command_runs_any_policy_of_a_cluster_policy(path):
    """``ballast simulate --elastic FILE --rules ballast``."""
    options = ["--rules", "ballast", "--policy", "hierarchical", "--output", "json"]
    done = called(path, *options, "--max-moves-per-hour", "2")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert (result["policy"], result["round_seconds"], result["jobs_measured"]) == ("hierarchical", 360.0, 10)


RULES = ["--rules", "ballast", "--policy", "makespan"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--policy", "max-min-fairness"], "chooses no sizes. To fix: one of completion-time, sia"),
        (["--policy", "max-min-fairness"], "or --rules ballast"),
        (["--policy", "sia", "--cluster", "v100=2"], "--cluster: not with --elastic"),
        (["--policy", "sia", "--static", "3"], "--static: not with --elastic"),
        (["--policy", "sia", "--seed", "0"], "--seed: not with --elastic"),
        (["--policy", "sia", "--throughputs", "simulation"], "--throughputs: not with --elastic"),
        (["--policy", "sia", "--workload", "x"], "there is no workload 'x'. To fix: one of random"),
        (["--policy", "sia", "--round", "0"], "--round: 0 s must be above 0"),
        (["--policy", "sia", "--min-run-seconds", "60"], "--min-run-seconds"),
        (["--policy", "sia", "--launch-seconds", "60"], "--launch-seconds"),
        (["--policy", "sia", "--stop-seconds", "0"], "--stop-seconds: not with --elastic"),
        (["--policy", "sia", "--end-seconds", "1"], "--end-seconds"),
        (["--policy", "sia", "--sizes", "0"], "'0' is not stated, all, requested or a number of GPUs"),
        (["--policy", "sia", "--sizes", "four"], "'four' is not stated"),
        (["--rules", "published", "--policy", "sia"], "To fix: --rules ballast"),
        (["--rules", "ballast", "--policy", "sia"], "'sia'"),
        (["--rules", "ballast", "--policy", "gandiva"], "always shares"),
        ([*RULES, "--pause-seconds", "nan"], "--pause-seconds: nan"),
        ([*RULES, "--growth-seconds", "-1"], "--growth-seconds: -1"),
        ([*RULES, "--round", "-1"], "--round: -1"),
        ([*RULES, "--max-moves-per-hour", "-1"], "is below 0"),
    ],
)
def test_an_option_without_a_meaning_is_refused(path, options, said):
    """By its name, with what to change, exit code 2, and no traceback."""
    done = called(path, *options)
    assert done.exit_code == 2, done.output
    assert said in " ".join(done.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda value: value.pop("cluster"), "cluster"),
        (lambda value: value["workloads"]["random"][0].__setitem__(5, -1), "workloads.random[0].work"),
        (lambda value: value["workloads"]["random"][0].__setitem__(5, 1e-320), "workloads.random[0].work"),
        (lambda value: value["workloads"]["random"][0].__setitem__(5, 1e300), "workloads.random[0].work"),
        (lambda value: value["workloads"]["random"][0].__setitem__(1, "soon"), "not a number"),
        (lambda value: value["workloads"]["random"][0].__setitem__(1, 1e300), "workloads.random[0].arrival"),
        (lambda value: value["workloads"]["random"][0].__setitem__(2, "audio"), "there is no model 'audio@"),
        (lambda value: value["workloads"]["random"].clear(), "there are no jobs"),
        (lambda value: value["workloads"]["random"].append(value["workloads"]["random"][0]), "named twice"),
        (lambda value: value["cluster"]["fast"].__setitem__("nodes", 0), "cluster.fast"),
        (lambda value: value.__setitem__("option_columns", ["gpus"]), "option_columns"),
        (
            lambda value: value["models"]["text@32"]["types"]["fast"]["options"][0].__setitem__(1, -3),
            "models.text@32.types.fast.options[0]",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_its_field(change, expected):
    value = json.loads(file(3, seed=2))
    change(value)
    with pytest.raises(ContractError, match=None) as refused:
        read_workload(json.dumps(value))
    assert expected in str(refused.value)


def spread_file(*rows):
    """Two nodes of four GPUs, of which two long jobs take three each, and a job of 400 samples."""
    return json.dumps(
        {
            "cluster": {"fast": {"nodes": 2, "gpus_per_node": 4}},
            "option_columns": ["gpus", "samples_per_s", "nodes"],
            "job_columns": ["name", "arrival_s", "application", "batch_size", "work_samples"],
            "models": {
                "long@1": {"restart_s": 1.0, "types": {"fast": {"options": [[3, 10.0, None]]}}},
                "pair@1": {"restart_s": 1.0, "types": {"fast": {"options": [[2, 5.0], *rows]}}},
            },
            "workloads": {
                "w": [
                    ["first", 0, "long", 1, 20_000],
                    ["second", 0, "long", 1, 20_000],
                    ["spread", 1, "pair", 1, 400],
                ]
            },
        }
    )


def test_a_gang_that_is_spread_runs_at_the_speed_that_the_file_states():
    """A GPU is free on each of two nodes: 5 samples/s on one, 2 over two; where nothing is stated, 5."""

    def seconds(*rows):
        workload = read_workload(spread_file(*rows))
        rules = OperatorRules(objective="max-min-fairness", round_seconds=3600.0)
        result = simulate_rules(workload, rules)
        return {job.name: job.completion_time for job in result.jobs}["spread"]

    assert seconds() == pytest.approx(1 + 400 / 5.0)
    assert seconds([2, 2.0, 2]) == pytest.approx(1 + 400 / 2.0)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ([2, 2.0, 3], "2 GPUs are on 1 to 2 nodes of fast"),
        ([1, 2.0, 2], "1 GPUs are on 1 to 1 nodes"),
        ([2, 2.0, 1.5], "nodes is 1.5"),
        (
            [2, 9.0, 2],
            "2 GPUs at 9 over 2 nodes or more; 5 is the speed on fewer. To fix: a row without nodes",
        ),
        ([4, 9.0, 2], "no row says the speed on fewer"),
    ],
)
def test_a_speed_spread_over_nodes_that_contradicts_the_file_is_refused(row, said):
    """Nodes that the GPUs cannot be on, and gangs that the network makes faster."""
    with pytest.raises(ContractError) as refused:
        read_workload(spread_file(row))
    assert said in str(refused.value)


def test_requested_sizes_need_a_requested_number():
    """A job without one is not taken for a job of one GPU."""
    value = json.loads(file(3, seed=2))
    value["job_columns"][4] = "note"
    read_workload(json.dumps(value))
    with pytest.raises(ContractError, match=r"random\[0\]: has no requested_gpus"):
        read_workload(json.dumps(value), sizes="requested")


def test_a_policy_of_another_distribution_is_simulated(path, tmp_path, monkeypatch):
    """Registered by an entry point, known to the command without a second edit."""
    row = (
        "from ballast_policies.elastic.completion_time import ELASTIC_POLICIES as POLICIES\n"
        "ROW = POLICIES['sia']\n"
    )
    install(
        tmp_path, "acme-sizes", ELASTIC_POLICIES.group, {"acme.sizes": "acme_sizes:ROW"}, {"acme_sizes": row}
    )
    monkeypatch.syspath_prepend(tmp_path)
    ELASTIC_POLICIES.rescan()
    try:
        done = called(path, "--policy", "acme.sizes")
        assert done.exit_code == 0, done.output
    finally:
        monkeypatch.undo()
        ELASTIC_POLICIES.rescan()


@pytest.mark.slow
@pytest.mark.parametrize("every", first_daily([100.0, 30.0, 1000.0]), ids=["busy", "contended", "quiet"])
@pytest.mark.parametrize("policy", ["max-min-fairness", "finish-time-fairness", "shortest-job-first"])
def test_jobs_that_may_change_their_size_end_sooner_on_average(policy, every):
    """Against the same jobs at their requested sizes, under the same rules and prices of a change."""
    elastic, fixed = (
        run(25, 0, policy=policy, every=every, sizes=sizes) for sizes in ("stated", "requested")
    )
    assert elastic.average_completion_time < 0.9 * fixed.average_completion_time


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 2])
def test_by_completion_time_jobs_end_sooner_than_by_the_other_policies(seed):
    """Their lengths are known; sizes, GPU types and restarts are weighed together."""
    chosen, *others = (
        run(25, seed, policy=policy, every=30.0).average_completion_time
        for policy in ("completion-time", "max-min-fairness", "shortest-job-first", "makespan")
    )
    assert chosen < min(others)


@pytest.mark.slow
def test_no_single_size_for_all_jobs_is_better():
    """Nor the best of them, known only afterwards."""
    elastic = run(25, 0)
    fixed = [run(25, 0, sizes=size).average_completion_time for size in (1, 2, 4, 8)]
    assert elastic.average_completion_time < 0.95 * min(fixed)


@pytest.mark.slow
def test_most_changes_of_size_are_live():
    """Jobs come and go all the time; few gangs are restarted for that."""
    result = run(60, 0)
    assert result.restarts_per_job < 0.6


@pytest.mark.slow
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
    rules = {"objective": "max-min-fairness", "round_seconds": 30.0, "pause_seconds": 0.0, **rules}
    return [job.completion_time for job in simulate_rules(read_workload(text), OperatorRules(**rules)).jobs]


@pytest.mark.slow
def test_a_gang_trains_at_its_old_size_until_its_new_ranks_are_there():
    """From two to four GPUs, once: half of the eight seconds are lost, by the gang that grows alone."""
    (long, short), (later, same) = two_jobs(), two_jobs(growth_seconds=8.0)
    assert later == pytest.approx(long + 8.0 * (1 - 2 / 4))
    assert same == pytest.approx(short)


@pytest.mark.slow
def test_a_job_holds_its_gpus_for_a_moment_after_its_last_step():
    """It counts as done then; who waits for its GPUs has them as much later."""
    (long, short), (later, ended) = two_jobs(), two_jobs(end_seconds=4.0)
    assert ended == pytest.approx(short + 4.0)
    assert later == pytest.approx(long + 4.0 + 4.0 * (1 - 2 / 4))


@pytest.mark.slow
def test_a_gang_that_has_changed_its_size_settles_before_it_grows():
    """20 pauses of 3 s after it has made room: the GPUs of a job that is done sooner are idle until then."""
    (long, _), (later, _) = two_jobs(pause_seconds=0.1), two_jobs(pause_seconds=3.0)
    assert later > long + 2 * 2.9


@pytest.mark.slow
def test_gangs_that_take_turns_in_rounds_shorter_than_a_restart_end():
    """A restart takes up to 90 s."""
    none_is_faster_than_alone(run(5, 0, round_seconds=60.0), 5)
