"""``ballast simulate`` as a user calls it."""

import json
import re
import sys

import pytest
from ballast_operator.cli.simulate.command import simulate
from click.testing import CliRunner

from tests.support.examples import first_fast

SMALL = ("--policy", "max-min-fairness", "--trace", "small_test", "--cluster", "v100=2,p100=2")


def call(*arguments):
    return CliRunner().invoke(simulate, arguments, catch_exceptions=False)


def test_json_has_every_figure_under_its_name():
    """The keys are an interface; programs read them."""
    done = call(*SMALL, "--output", "json")
    assert done.exit_code == 0
    result = json.loads(done.stdout)
    assert set(result) == {
        "workload",
        "policy",
        "agnostic",
        "space_sharing",
        "ideal",
        "rules",
        "round_seconds",
        "cluster",
        "jobs_measured",
        "average_jct_hours",
        "jct_percentiles_hours",
        "average_jct_hours_by_weight",
        "makespan_hours",
        "utilisation",
        "spread_fraction",
        "finish_time_fairness",
        "cost_usd",
        "slos",
        "slo_violations",
        "lease_extensions",
        "lease_extension_fraction",
        "rounds",
        "solves",
        "solve_seconds",
        "duration_hours",
    }
    assert result["jobs_measured"] == 20
    assert 0 < result["average_jct_hours"] <= result["makespan_hours"]
    assert len(result["finish_time_fairness"]["per_job"]) == 20


def test_pairs_that_a_policy_never_makes_are_refused():
    done = call("--policy", "allox", *SMALL[2:], "--space-sharing")
    assert done.exit_code == 2 and "--space-sharing: allox puts no two jobs" in done.output


def test_a_row_for_each_job_on_request():
    """With arrival, finish, GPUs and cost."""
    result = json.loads(call(*SMALL, "--output", "json", "--jobs").stdout)
    assert len(result["jobs"]) == 20
    for row in result["jobs"]:
        assert row["finish"] == pytest.approx(row["arrival"] + row["completion_time"])
        assert row["cost"] > 0


def test_text_is_a_table():
    """For people: averages with units, and the jobs below on request."""
    done = call(*SMALL, "--jobs")
    assert "average completion time" in done.stdout
    assert "utilisation" in done.stdout
    assert "job-19" in done.stdout


@pytest.mark.slow
def test_the_same_seed_is_the_same_result():
    """Another seed is another workload."""
    arguments = ["--policy", "makespan", "--static", "10", "--cluster", "v100=8,k80=8", "--output", "json"]

    def makespan(seed):
        return json.loads(call(*arguments, "--seed", seed).stdout)["makespan_hours"]

    assert makespan("3") == makespan("3")
    assert makespan("3") != makespan("4")


@pytest.mark.slow
def test_generated_jobs_arrive_until_the_measured_ones_are_done():
    """A window of an endless workload."""
    done = call(
        *("--policy", "max-min-fairness", "--generate", "multiple", "--rate", "1", "--measure", "10:20"),
        *("--cluster", "v100=36,p100=36,k80=36", "--weights", "--deadlines", "--output", "json"),
    )
    result = json.loads(done.stdout)
    assert result["jobs_measured"] == 10
    assert result["slos"] == 10


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["png", "html"])
def test_a_plot_is_written(tmp_path, suffix):
    """A picture, or a page that needs nothing else."""
    file = tmp_path / f"run.{suffix}"
    done = call(*SMALL, "--plot", str(file))
    assert done.exit_code == 0
    content = file.read_bytes()
    if suffix == "png":
        assert content.startswith(b"\x89PNG")
    else:
        page = content.decode()
        assert page.count("<rect") >= 20
        assert "http" not in page


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--policy", "max-min"], "policy: 'max-min' is not one of max-min-fairness"),
        (["--trace", "gone"], "trace gone cannot be read"),
        (["--cluster", "v100"], "--cluster: 'v100' is not TYPE=NUMBER"),
        (["--cluster", "v100=two"], "'two' of v100 is not a number"),
        (["--cluster", "v100=2,v100=3"], "v100 is named twice"),
        (["--cluster", "v100=0"], "--cluster: there is none"),
        (["--cluster", "h100=4"], "GPU type 'h100' is not in Gavel's simulation throughputs"),
        (["--throughputs", "gone.json"], "--throughputs: gone.json cannot be read"),
        (["--round", "0"], "--round: 0 s is not between 1 and 1e+09 s"),
        (["--rules", "ballast", "--launch-seconds", "1e300"], "--launch-seconds: 1e+300 s is not between 0"),
        (["--measure", "5"], "--measure: '5' is not FIRST:END"),
        (["--measure", "9:3"], "--measure: 9:3 holds no job"),
        (["--measure", "0:99"], "goes beyond the 20 jobs of small_test.trace"),
        (["--generate", "single"], "--trace excludes --generate"),
        (["--cluster", f"v100={10**20}"], f"--cluster: v100={10**20} must be 0 to 10000000"),
        (["--prices", "v100=-1"], "--prices: v100=-1.0 must be at least 0"),
        (["--prices", "h100=1"], "--prices: h100 is not one of "),
        (["--sizes", "all"], "--sizes: only with --elastic"),
        (["--until", "5"], "--until: only with --elastic"),
        (["--until", "nan"], "'--until': nan is no finite number"),
        (["--job-table", "published"], "a trace has its own"),
        (["--plot", "run.pdf"], "--plot: run.pdf ends neither in .png nor in .html"),
        (["--plot", "/no/such/folder/run.png"], "'--plot': there is no folder"),
        (["--rate", "3"], "--rate: only jobs of --generate"),
        (["--deadlines"], "a trace has its own"),
        (["--trace", sys.executable], "not UTF-8"),
        (["--gpus-per-node", "v100=0"], "--gpus-per-node: v100=0 must be at least 1"),
    ],
)
def test_what_is_wrong_is_named_with_exit_code_2(arguments, what):
    """Option, value and reason."""
    done = call(*SMALL, *arguments)
    assert done.exit_code == 2
    assert what in " ".join(done.stderr.split())


def test_a_workload_must_be_named():
    """None of the three, or a rate missing."""
    base = ("--policy", "makespan", "--cluster", "v100=1")
    assert "no jobs are given" in call(*base).stderr
    assert "--generate needs --rate" in call(*base, "--generate", "single").stderr


@pytest.mark.slow
def test_the_job_table_of_the_published_curves_is_another_workload():
    """The same seed, other types for the gangs; unknown ones are refused."""
    arguments = ["--policy", "fifo", "--static", "20", "--cluster", "v100=16,k80=16", "--output", "json"]

    def types(table):
        done = call(*arguments, "--jobs", "--job-table", table, "--rules", "published")
        return [row["type"] for row in json.loads(done.stdout)["jobs"]]

    assert types("gavel") != types("published")
    assert call(*arguments, "--job-table", "mine").exit_code == 2


OVERLOADED = ("--policy", "fifo", "--generate", "single", "--rate", "20", "--measure", "0:5")


@pytest.mark.slow
@pytest.mark.parametrize("output", first_fast(["text", "json"]))
def test_an_overloaded_cluster_is_said_before_the_run(output):
    """One line on stderr with demand, GPUs and the rate that would fit; stdout is the result's alone."""
    done = call(*OVERLOADED, "--cluster", "v100=36", "--rules", "whole-rounds", "--output", output)
    assert done.exit_code == 0
    (line,) = done.stderr.splitlines()
    assert line.startswith("warning: 20 jobs/h ask on average for ")
    assert "times these 36 GPUs" in line
    assert "To fix: --rate below 2." in line
    assert "warning" not in done.stdout
    if output == "json":
        assert json.loads(done.stdout)["jobs_measured"] == 5


@pytest.mark.slow
def test_a_cluster_that_is_large_enough_is_not_warned_about():
    """Nor is one whose jobs are all there from the start: they end."""
    assert call(*OVERLOADED, "--cluster", "v100=800", "--rules", "whole-rounds").stderr == ""
    static = ("--policy", "fifo", "--static", "9", "--cluster", "v100=8", "--rules", "whole-rounds")
    assert call(*static).stderr == ""


@pytest.mark.slow
def test_the_progress_line_says_how_many_jobs_wait(monkeypatch):
    """On a terminal; the queue of an overloaded cluster can be seen growing."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    done = call(*OVERLOADED, "--cluster", "v100=2", "--rules", "whole-rounds")
    assert re.search(r"hour \d+, [1-9]\d* of \d+ jobs wait", done.stderr)
