"""``ballast whatif --prices excerpt``: what the cluster's jobs would have cost in the clouds of the logs."""

import datetime
import json

import pytest
from ballast_lab.commands import whatif_prices
from ballast_lab.spot.cluster_jobs import replayed_jobs
from ballast_operator.cli.live.whatif import whatif
from click.testing import CliRunner

NOW = datetime.datetime.now(datetime.UTC)
SPEEDS = [
    {"gpuType": "k80", "stages": 1, "stepsPerSecond": 1.0},
    {"gpuType": "v100", "stages": 1, "stepsPerSecond": 4.0},
]


def item(name: str, *, days_ago: float = 2.0, spec: dict | None = None, status: dict | None = None) -> dict:
    created = (NOW - datetime.timedelta(days=days_ago)).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "metadata": {"name": name, "namespace": "team", "creationTimestamp": created},
        "spec": {"totalSteps": 36_000, "throughput": SPEEDS, **(spec or {})},
        "status": status or {},
    }


def run(monkeypatch, items: list[dict], *options: str):
    async def read(kubeconfig):
        return items

    monkeypatch.setattr(whatif_prices, "_read", read)
    return CliRunner().invoke(whatif, ["--prices", "excerpt", *options])


@pytest.mark.slow
def test_the_jobs_of_a_month_are_replayed_with_all_their_steps(monkeypatch):
    """Older ones and those without a speed are not; the JSON has what the cluster has paid."""
    items = [
        item("new", status={"costSoFar": 7.5, "state": "Running"}),
        item("done", days_ago=20, status={"costSoFar": 2.5, "state": "Succeeded"}),
        item("old", days_ago=40),
        item("unknown", spec={"throughput": []}),
    ]
    done = run(monkeypatch, items, "--output", "json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert [job["job"] for job in found["jobs"]] == ["team/done", "team/new"]
    assert (found["cluster_cost_so_far"], found["cluster_jobs_finished"]) == (10.0, 1)
    (left_out,) = found["left_out"]
    assert left_out.startswith("team/unknown: no speed of it is known on k80")
    assert 0 < found["cost_usd"] < found["on_demand_usd"]
    assert found["steps"] == 72_000
    text = run(monkeypatch, items).output
    assert "2 jobs of the last 30 days, 1 of them finished; on the cluster they have cost 10.00" in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--policy", "makespan"), "'makespan' does not choose among prices"),
        (("--add", "v100=1"), "not with --prices FOLDER"),
        (("--start", "soon"), "--start"),
        (("--days", "0"), "--days"),
    ],
)
def test_what_has_no_meaning_in_a_replay_is_refused(monkeypatch, options, words):
    done = run(monkeypatch, [item("new")], *options)
    assert done.exit_code == 2
    assert words in done.output


def test_nothing_to_replay_says_why(monkeypatch):
    """An empty cluster, and one whose jobs are old."""
    assert "no job was created in the last 30 days" in run(monkeypatch, []).output
    assert "last 3 days" in run(monkeypatch, [item("old", days_ago=9)], "--days", "3").output


def test_a_measured_speed_counts_where_the_job_runs():
    """With what is stated for the same size of the gang; a deadline counts from the job's creation."""
    status = {
        "allocation": {"gpuType": "v100", "gpus": 2},
        "progress": {"stepsPerSecond": 9.0},
    }
    until = (NOW + datetime.timedelta(days=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
    two = [{"gpuType": "k80", "stages": 2, "stepsPerSecond": 1.5}]
    spec = {"throughput": [*SPEEDS, *two], "deadline": until}
    (job,) = replayed_jobs([item("a", spec=spec, status=status)], ["k80", "v100"], days=30, now=NOW).jobs
    assert (job.gpus, job.speeds) == (2, {"k80": 1.5, "v100": 9.0})
    assert job.deadline_seconds == pytest.approx(3 * 86_400, abs=2)
