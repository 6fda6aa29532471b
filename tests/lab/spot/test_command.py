"""``ballast simulate --prices FOLDER`` as a user calls it."""

import json

import pytest
from ballast_operator.cli.simulate.command import simulate
from click.testing import CliRunner

SMALL = ("--policy", "min-cost-slo", "--static", "4", "--generate", "single", "--deadlines", "--no-oracle")


def call(*arguments):
    return CliRunner().invoke(simulate, arguments, catch_exceptions=False)


@pytest.mark.slow
def test_json_has_every_figure_under_its_name():
    """The keys are an interface; programs read them."""
    done = call(*SMALL, "--prices", "excerpt", "--output", "json", "--jobs")
    assert done.exit_code == 0
    result = json.loads(done.stdout)
    assert set(result) == {
        "policy", "start", "end", "jobs_measured", "cost_usd", "on_demand_usd", "oracle_usd", "saved_part",
        "over_oracle", "steps", "steps_done_twice", "steps_done_twice_part", "preemptions", "moves",
        "startup_usd", "egress_usd", "gpu_hours", "average_jct_hours", "deadlines", "by_offer",
        "preemptions_per_hour", "outliers", "ignored", "jobs",
    }  # fmt: skip
    assert 0 < result["cost_usd"] < result["on_demand_usd"]
    assert result["oracle_usd"] is None
    assert result["deadlines"] == {"jobs": 4, "feasible": 4, "met": 4, "missed_though_feasible": 0}
    assert sum(row["cost_usd"] for row in result["jobs"]) == pytest.approx(result["cost_usd"])


@pytest.mark.slow
def test_text_is_a_table():
    done = call(*SMALL, "--prices", "excerpt", "--jobs")
    assert "on demand only" in done.stdout
    assert "job-3" in done.stdout


def test_a_folder_of_ones_own(tmp_path):
    """One zone, one price: the cost can be computed by hand."""
    row = {
        "AvailabilityZone": "us-east-1a",
        "InstanceType": "p3.2xlarge",
        "SpotPrice": "1.0",
        "Timestamp": "2021-01-01T00:00:00Z",
    }
    (tmp_path / "p3.json").write_text(json.dumps({"SpotPriceHistory": [row]}))
    done = call(*SMALL, "--prices", str(tmp_path), "--output", "json")
    result = json.loads(done.stdout)
    assert result["cost_usd"] == pytest.approx(result["gpu_hours"])
    assert list(result["by_offer"]) == ["aws/us-east-1a/p3.2xlarge/spot"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--prices", "nowhere", "--static", "1"), "nowhere is no folder"),
        (("--prices", "excerpt", "--static", "1", "--ideal"), "--ideal: not with --prices FOLDER"),
        (("--prices", "excerpt", "--static", "1", "--rules", "ballast"), "--rules: not with --prices FOLDER"),
        (("--prices", "excerpt", "--static", "1", "--until", "9"), "--until: not with --prices FOLDER"),
        (("--prices", "excerpt", "--static", "1", "--start", "now"), "--start: the time 'now'"),
        (
            ("--prices", "excerpt", "--static", "1", "--start", "2021-03-01T00:00:00Z"),
            "--start: 2021-03-01T00:00:00Z is not within the prices, which are from 2020-",
        ),
        (
            ("--prices", "excerpt", "--static", "1", "--start", "2019-03-01T00:00:00Z"),
            "--start: 2019-03-01T00:00:00Z is not within the prices",
        ),
        (("--prices", "excerpt", "--static", "1", "--round", "1"), "--round: 1 is not from 60"),
        (("--prices", "excerpt", "--generate", "single", "--rate", "1"), "--measure 0:100"),
        (("--prices", "excerpt", "--static", "5", "--measure", "3:2"), "--measure: 3:2 holds no job"),
        (
            ("--prices", "excerpt", "--static", "5", "--measure", "0:9"),
            "0:9 goes beyond the 5 jobs of static",
        ),
        (("--prices", "excerpt", "--static", "0"), "--static: 0 jobs"),
        (("--prices", "excerpt", "--generate", "single", "--rate", "0"), "--rate: 0 must"),
        (("--prices", "excerpt"), "no jobs are given"),
        (
            ("--static", "1", "--cluster", "v100=1", "--hysteresis", "3"),
            "--hysteresis: only with --prices FOLDER",
        ),
        (("--prices", "v100", "--static", "1", "--cluster", "v100=1"), "v100 is no folder"),
    ],
)
def test_a_wrong_call_is_refused_with_the_reason(arguments, reason):
    done = call("--policy", "min-cost", *arguments)
    assert done.exit_code == 2
    assert reason in " ".join(done.stderr.split())


def test_other_policies_are_refused():
    """Fairness among jobs has no meaning where everybody rents machines of their own."""
    done = call("--policy", "max-min-fairness", "--prices", "excerpt", "--static", "1")
    assert done.exit_code == 2
    assert "min-cost-slo" in done.stderr
