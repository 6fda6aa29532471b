"""Elastic jobs, simulated."""

import json

import pytest
from ballast_operator.cli.simulate.command import simulate as command
from ballast_policies.contract.errors import ContractError
from ballast_policies.elastic.completion_time import ELASTIC_POLICIES
from ballast_policies.simulator.elastic import read_workload, simulate
from click.testing import CliRunner

from tests.support.distributions import install
from tests.support.elastic_workloads import file
from tests.support.examples import first_fast


@pytest.mark.slow
@pytest.mark.parametrize("policy", ELASTIC_POLICIES)
@pytest.mark.parametrize("sizes", first_fast(["stated", "all", "requested"]))
def test_every_job_ends_and_none_is_faster_than_alone(policy, sizes):
    """Also GPUs never over capacity, which the engine checks at each decision."""
    workload = read_workload(file(40, seed=1), sizes=sizes)
    result = simulate(workload, policy=policy)
    assert [job.name for job in result.jobs] == [job.name for job in workload.jobs]
    assert all(job.completion_time >= job.alone - 1e-6 for job in result.jobs)
    assert 0 < result.utilisation <= 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_choice_of_size_pays_on_average(seed):
    """``completion-time`` against the same jobs at their requested sizes, and against Sia's program."""
    elastic = simulate(read_workload(file(60, seed=seed)), policy="completion-time")
    fixed = simulate(read_workload(file(60, seed=seed), sizes="requested"), policy="completion-time")
    sia = simulate(read_workload(file(60, seed=seed)), policy="sia")
    assert elastic.average_completion_time < fixed.average_completion_time
    assert elastic.average_completion_time < sia.average_completion_time


def test_one_job_alone_runs_on_its_best_configuration():
    """From the first round after its arrival, its start included."""
    workload = read_workload(file(1, seed=3))
    (job,) = simulate(workload, policy="completion-time").jobs
    assert job.restarts == 0
    assert job.completion_time == pytest.approx(job.alone + (-job.arrival) % 60.0)


@pytest.mark.slow
def test_the_same_file_gives_the_same_result():
    """No randomness, no clock."""
    runs = [simulate(read_workload(file(30, seed=5)), policy="completion-time").to_json() for _ in range(2)]
    assert runs[0] == runs[1]


def test_the_command_prints_averages_and_rows(tmp_path):
    """``ballast simulate --elastic FILE``."""
    path = tmp_path / "jobs.json"
    path.write_text(file(10, seed=2))
    done = CliRunner().invoke(
        command, ["--elastic", str(path), "--policy", "completion-time", "--jobs", "--output", "json"]
    )
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["jobs_measured"] == len(result["jobs"]) == 10
    assert result["average_jct_hours"] == pytest.approx(result["average_jct_seconds"] / 3600)
    text = CliRunner().invoke(command, ["--elastic", str(path), "--policy", "sia"])
    assert text.exit_code == 0
    assert "average completion time" in text.stdout


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--policy", "max-min-fairness"], "chooses no sizes. To fix: one of completion-time, sia"),
        (["--policy", "sia", "--cluster", "v100=2"], "--cluster: not with --elastic"),
        (["--policy", "sia", "--static", "3"], "--static: not with --elastic"),
        (["--policy", "sia", "--workload", "x"], "there is no workload 'x'. To fix: one of random"),
        (["--policy", "sia", "--round", "0"], "--round: 0 s must be above 0"),
    ],
)
def test_an_option_without_a_meaning_is_refused(options, expected, tmp_path):
    """By its name, with what to change."""
    path = tmp_path / "jobs.json"
    path.write_text(file(3, seed=2))
    done = CliRunner().invoke(command, ["--elastic", str(path), *options])
    assert done.exit_code == 2
    assert expected in done.stderr


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
    """Nothing is run."""
    value = json.loads(file(3, seed=2))
    change(value)
    with pytest.raises(ContractError, match=None) as refused:
        read_workload(json.dumps(value))
    assert expected in str(refused.value)


def test_requested_sizes_need_a_requested_number():
    """A job without one is not taken for a job of one GPU."""
    value = json.loads(file(3, seed=2))
    value["job_columns"][4] = "note"
    read_workload(json.dumps(value))
    with pytest.raises(ContractError, match=r"random\[0\]: has no requested_gpus"):
        read_workload(json.dumps(value), sizes="requested")


def test_a_policy_of_another_distribution_is_simulated(tmp_path, monkeypatch):
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
        path = tmp_path / "jobs.json"
        path.write_text(file(5, seed=1))
        done = CliRunner().invoke(command, ["--elastic", str(path), "--policy", "acme.sizes"])
        assert done.exit_code == 0, done.output
    finally:
        monkeypatch.undo()
        ELASTIC_POLICIES.rescan()
