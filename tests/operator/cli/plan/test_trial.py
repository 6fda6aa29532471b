"""``ballast plan --trial``: the best plans are run, and the measured best comes first."""

import json
import sys

import pytest
import yaml
from ballast_operator.cli.main import main
from ballast_operator.cli.plan import trial
from ballast_trainer.launch import ValidatedJob
from click.testing import CliRunner

pytestmark = pytest.mark.slow

PYTHON = sys.executable
PROFILE = "layers: [{repeat: 4, forwardSeconds: 0.1, backwardSeconds: 0.2, heldBytes: 10, outputBytes: 1}]"
CLUSTER = "gpus: [{type: a, count: 2}]\nbandwidth: {insideServer: 1.0e+9, betweenServers: 1.0e+9}"
JOB = """
totalSteps: 400
model: {name: gpt, layers: 4, args: {dim: 16}}
pipeline: {microbatches: 4, globalBatchSize: 4, schedule: GPipe}
checkpoint: {path: /nowhere, everySteps: 1}
"""
TRAINER = """#!{python}
import json, sys, yaml
path = sys.argv[sys.argv.index("--config") + 1]
job = yaml.safe_load(open(path))
print(json.dumps({{"job": job, "ranks": sys.argv[sys.argv.index("--ranks") + 1]}}), file=open({log!r}, "a"))
microbatches = job["pipeline"]["microbatches"]
if microbatches == {fails}:
    sys.exit("out of memory")
for step in range(job["totalSteps"]):
    print(json.dumps({{"step": step, "step_seconds": 100.0 if step < 2 else 1.0 * microbatches}}))
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the command in a Python without a trainer beside it; JSON where asked for."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))

    def runner(*options):
        for name, text in (("profile.yaml", PROFILE), ("cluster.yaml", CLUSTER), ("job.yaml", JOB)):
            (tmp_path / name).write_text(text)
        arguments = ["plan", str(tmp_path / "profile.yaml"), str(tmp_path / "cluster.yaml")]
        arguments += ["--config", str(tmp_path / "job.yaml"), "--batch-size", "4", *options]
        return CliRunner().invoke(main, arguments)

    return runner


@pytest.fixture
def trainer(tmp_path):
    """A trainer whose steps take as many seconds as they have microbatches; what it was asked for."""
    python, log = sys.executable, tmp_path / "asked"

    def install(fails=0):
        path = tmp_path / "ballast-train"
        path.write_text(TRAINER.format(python=python, log=str(log), fails=fails))
        path.chmod(0o755)

    install.asked = lambda: [json.loads(line) for line in log.read_text().splitlines()]
    return install


def test_the_measured_best_of_plans_predicted_alike_comes_first(trainer, run):
    """Its job is the one that is printed; the trainer had each plan's pipeline, and wrote no checkpoint."""
    trainer()
    done = run("--planner", "best", "--trial", "3", "--output", "json")
    assert done.exit_code == 0, done.output
    plans = json.loads(done.output)["plans"]
    measured = [plan["trial"]["measuredSeconds"] for plan in plans]
    assert measured == sorted(measured) == [plan["microbatches"] for plan in plans]
    assert measured[0] < measured[-1]
    for asked in trainer.asked():
        assert asked["ranks"] == "2"
        assert asked["job"]["pipeline"]["schedule"] == "1F1B"
        assert "checkpoint" not in asked["job"]
        assert ValidatedJob.from_mapping(asked["job"]).config.pipeline.schedule == "1F1B"
    patched = yaml.safe_load(run("--planner", "best", "--trial", "3", "--output", "yaml").output)
    assert patched["spec"] == plans[0]["job"]


def test_a_plan_that_does_not_run_comes_last_and_says_why(trainer, run):
    """Also in the table, where predicted stands beside measured."""
    trainer(fails=2)
    done = run("--planner", "best", "--trial", "3")
    assert done.exit_code == 0, done.output
    assert "s/step measured" in done.output
    assert "Not measured: ballast-train ended with 1: out of memory" in done.output


def test_without_a_trainer_or_a_plan_that_runs_it_says_so(trainer, run):
    """What to install; what the trainer printed last; which planner lists plans."""
    assert "pip install ballast-trainer" in run("--planner", "best", "--trial", "1").output
    trainer(fails=4)
    assert "none of 1 plans ran: ballast-train ended with 1: out of memory" in run("--trial", "1").output
    assert "--planner best" in run("--trial", "1", "--schedule", "GPipe").output
    assert "--trial needs --config" in run().output


@pytest.mark.parametrize("field", ["pipeline", "parallelism", "training"])
def test_a_configuration_with_no_fields_where_a_plan_has_some_is_refused(run, monkeypatch, field):
    """With the file, the field and its value."""
    monkeypatch.setattr(sys.modules[__name__], "JOB", f"{field}: 5")
    done = run("--planner", "best", "--trial", "1")
    assert done.exit_code == 1
    assert f"job.yaml: {field}: 5 is no object of fields" in done.output


def test_a_trainer_that_hangs_is_killed_with_its_ranks(tmp_path, run, monkeypatch):
    """They hear no request to leave, and hold the pipe that the command reads."""
    rank = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100000)"
    path = tmp_path / "ballast-train"
    path.write_text(
        f"#!{PYTHON}\nimport subprocess, sys\nsubprocess.Popen([{PYTHON!r}, '-c', {rank!r}]).wait()\n"
    )
    path.chmod(0o755)
    monkeypatch.setattr(trial, "_MOST_SECONDS", 5.0)
    assert "none of 1 plans ran: ballast-train ended with no result after 5 s" in run("--trial", "1").output


@pytest.mark.nightly
def test_the_trainer_runs_a_plan(tmp_path):
    """On two local ranks: it takes the job that the plan gives it, and is measured."""
    for name, text in (("p.yaml", PROFILE), ("c.yaml", CLUSTER), ("job.yaml", JOB)):
        (tmp_path / name).write_text(text)
    files = [str(tmp_path / name) for name in ("p.yaml", "c.yaml")]
    options = ["--planner", "best", "--batch-size", "4", "--trial", "1", "--trial-steps", "1"]
    config = ["--config", str(tmp_path / "job.yaml"), "--output", "json"]
    done = CliRunner().invoke(main, ["plan", *files, *options, *config])
    assert done.exit_code == 0, done.output
    (plan,) = [plan for plan in json.loads(done.output)["plans"] if plan.get("trial")]
    assert plan["trial"]["measuredSeconds"] > 0
