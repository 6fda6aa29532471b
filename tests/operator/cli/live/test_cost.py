"""``ballast cost`` prints what :mod:`ballast_operator.report.costs` found."""

import csv
import datetime
import io
import json

import pytest
from ballast_operator.cli.live import cost as command
from ballast_operator.report.costs import costs
from click.testing import CliRunner

NOW = datetime.datetime(2026, 1, 1, 2, tzinfo=datetime.UTC)
POLICY = {
    "metadata": {"name": "default"},
    "spec": {
        "nodePools": [
            {"name": "spot", "gpuType": "v100", "capacityType": "spot", "pricePerGpuHour": 1.0},
            {"name": "sure", "gpuType": "v100", "pricePerGpuHour": 3.0},
            {"name": "old", "gpuType": "k80", "pricePerGpuHour": 0.5},
        ]
    },
    "status": {
        "billAt": "2026-01-01T01:00:00Z",
        "capacity": [
            {"pool": "spot", "gpus": 4},
            {"pool": "sure", "gpus": 2},
            {"pool": "old", "gpus": 2},
        ],
        "bill": [
            {"pool": "spot", "gpuType": "v100", "since": "2026-01-01T00:00:00Z", "gpus": 4, "gpusHeld": 2,
             "pricePerGpuHour": 1.0, "cost": 4.0, "heldCost": 2.0},
        ],
    },
}  # fmt: skip
JOB = {
    "metadata": {"namespace": "team", "name": "one"},
    "spec": {
        "totalSteps": 1000,
        "entity": "vision",
        "throughput": [
            {"gpuType": "v100", "stages": 2, "stepsPerSecond": 0.1},
            {"gpuType": "k80", "stages": 2, "stepsPerSecond": 0.01},
        ],
    },
    "status": {
        "state": "Running",
        "costSoFar": 2.0,
        "costAt": "2026-01-01T01:00:00Z",
        "poolCosts": [
            {"pool": "spot", "gpuType": "v100", "gpuSeconds": 7200.0, "cost": 2.0, "startupCost": 0.1}
        ],
        "allocation": {
            "pool": "spot",
            "gpuType": "v100",
            "gpus": 2,
            "since": "2026-01-01T00:00:00Z",
            "pods": ["one-1-0", "one-1-1"],
            "nodes": ["a", "b"],
        },
        "progress": {"step": 640, "stepsPerSecond": 0.1},
        "lostSteps": 10,
        "lostCost": 0.05,
        "gpuTime": {"held": 7200.0, "startup": 720.0, "lostSteps": 360.0, "idle": 720.0, "goodput": 0.75},
    },
}


@pytest.fixture
def call(monkeypatch):
    """The command, with a cluster of values."""

    def asked(kubeconfig, question, *, namespace):
        return costs([JOB], [POLICY], now=NOW, all_jobs=not namespace)

    monkeypatch.setattr(command, "asked", asked)
    return lambda *arguments: CliRunner().invoke(command.cost, arguments, catch_exceptions=False)


def test_json_has_every_figure_under_its_name(call):
    """The keys are an interface; the amounts can be computed by hand."""
    found = json.loads(call("--output", "json").stdout)
    assert set(found) == {"at", "jobs", "teams", "pools", "total", "left_out"}
    (job,) = found["jobs"]
    assert job["cost"] == pytest.approx(4.0)  # 2 so far, 2 GPUs for another hour
    assert job["projected"] == pytest.approx(4.0 + 3600 * 2 / 3600)  # 360 steps at 0.1/s
    assert job["on_demand_cost"] == pytest.approx(12.0)
    # 8 GPUs: 4 at 1, 2 at 3, 2 at 0.5; 0.75 x 0.1 + 0.25 x 0.01 steps/s
    assert job["type_blind_cost"] == pytest.approx(640 / 0.0775 * 2 * (4 + 6 + 1) / 8 / 3600)
    assert job["goodput"] == 0.75
    assert job["badput"] == {
        "startup": 0.1, "lostSteps": 0.05, "moves": 0.0, "checkpoint": 0.0, "straggling": 0.0, "idle": 0.1,
    }  # fmt: skip
    assert [line["goodput"] for line in (*found["teams"], *found["pools"])] == [0.75, 0.75]
    (pool,) = found["pools"]
    assert (pool["bill"], pool["jobs"], pool["idle"]) == (8.0, 4.0, 4.0)
    assert pool["deleted_jobs"] == pytest.approx(0.0)
    assert found["total"] == {
        "bill": 8.0, "jobs": 4.0, "deleted_jobs": 0.0, "idle": 4.0, "startup": 0.1, "lost_steps": 0.05,
        "data": 0.0,
        "goodput": 0.75,
        "saved_against_on_demand": pytest.approx(8.0),
        "saved_against_type_blind": pytest.approx(job["type_blind_cost"] - 4.0),
    }  # fmt: skip
    assert set(json.loads(call("--output", "json", "--by", "team").stdout)) == {"at", "teams"}


def test_data_as_a_newer_release_has_it_is_left_out_of_the_forecast():
    """The command, and the page, show what they can read of the job."""
    where = {"region": "us", "readPerStep": "1Gi", "newer": 1}
    found = costs([{**JOB, "spec": {**JOB["spec"], "dataLocation": where}}, JOB], [POLICY], now=NOW)
    assert found.jobs[0] == found.jobs[1]


@pytest.mark.parametrize("price", [1.0, 0.0])
def test_gpu_hours_are_up_to_now_whatever_they_cost(price):
    """Two were written; two GPUs are held for another hour since."""
    pools = [{**pool, "pricePerGpuHour": price} for pool in POLICY["spec"]["nodePools"]]
    (job,) = costs([JOB], [{"metadata": POLICY["metadata"], "spec": {"nodePools": pools}}], now=NOW).jobs
    assert (job.gpu_hours, job.cost) == pytest.approx((4.0, 2.0 + 2 * price))
    assert (job.gpu_hours_by_pool, job.by_pool) == ({"spot": 4.0}, {"spot": 2.0 + 2 * price})


@pytest.mark.parametrize("by", ["job", "team", "pool"])
def test_csv_is_one_table_with_the_names_of_its_columns(call, by):
    rows = list(csv.DictReader(io.StringIO(call("--output", "csv", "--by", by).stdout)))
    assert len(rows) == 1
    assert rows[0][by] in ("one", "vision", "spot")


def test_text_has_all_three_tables(call):
    text = call().stdout
    for part in ("team/one", "vision", "bill = jobs + deleted jobs + idle"):
        assert part in text


def test_pools_belong_to_no_namespace(call):
    """So that a namespace's jobs are not taken for all of them."""
    assert call("--namespace", "team", "--by", "pool").exit_code == 2
    assert json.loads(call("--namespace", "team", "--output", "json").stdout)["pools"] == []


def test_the_plot_has_pools_teams_and_jobs_and_escapes_their_names(monkeypatch, tmp_path):
    """One page; a file of another kind is refused before anything is read."""
    evil = {**JOB, "metadata": {"namespace": "team", "name": "<script>"}}
    found = costs([JOB, evil], [POLICY], now=NOW)
    monkeypatch.setattr(command, "asked", lambda *_, **__: found)
    file = tmp_path / "costs.html"
    done = CliRunner().invoke(command.cost, ["--plot", str(file), "--output", "json"])
    assert done.exit_code == 0, done.output
    page = file.read_text()
    assert "spot (v100), idle" in page
    assert "team/one, start-up: 0.10" in page
    assert "vision" in page
    assert "<script>" not in page
    refused = CliRunner().invoke(command.cost, ["--plot", str(tmp_path / "costs.gif")])
    assert refused.exit_code == 2
    assert "does not end in .html" in refused.output


def test_a_team_has_what_its_budget_is_compared_with():
    """Deleted jobs included, also where all are; of this month where the budget is monthly."""
    team = {"team": "vision", "since": "2025-12-01T00:00:00Z", "cost": 9.0, "month": "2026-01",
            "monthCost": 4.0, "costPerHour": 1.0}  # fmt: skip
    for period, spent in (("Total", 10.0), ("Month", 5.0)):
        budgets = {"vision": {"amount": 20.0, "period": period}}
        policy = {
            **POLICY,
            "spec": {**POLICY["spec"], "budgets": budgets},
            "status": {**POLICY["status"], "teams": [team]},
        }
        for jobs in ([JOB], []):
            (line,) = costs(jobs, [policy], now=NOW).teams
            assert (line.jobs, line.spent, line.budget) == (len(jobs), pytest.approx(spent), 20.0)
    (line,) = costs([JOB], [POLICY], now=NOW).teams
    assert (line.spent, line.budget) == (None, None)
