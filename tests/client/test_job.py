"""A script with the client, its operator a directory."""

import itertools
import signal
import sys
import threading
from types import SimpleNamespace

import pytest
from ballast_client import Job, reporter
from ballast_client.api_server import ChannelError
from ballast_client.channels import Directory
from ballast_policies.contract.messages import Ack, ExitReason, Report, TerminationMessage
from ballast_policies.contract.plan import Directive

from tests.client.test_messages import a_plan
from tests.docs.blocks import blocks
from tests.support.waiting import WAIT_SECONDS, eventually


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(reporter, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(reporter, "RENEW_SECONDS", 0.02)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def operator(tmp_path):
    """The operator's side: a plan, and what rank 0 says."""
    (tmp_path / "plan.json").write_text(a_plan().to_json())
    return tmp_path


ENVIRONMENT = {
    "BALLAST_POD_NAME": "job-1-0",
    "BALLAST_CHECKPOINT_PATH": "{folder}/checkpoints",
    "BALLAST_TERMINATION_LOG": "{folder}/termination-log",
    "BALLAST_TOTAL_STEPS": "20",
    "BALLAST_CHECKPOINT_EVERY_STEPS": "5",
}


def a_job(folder, **environment):
    values = {name: value.format(folder=folder) for name, value in ENVIRONMENT.items()}
    return Job(channel=Directory(folder), environment={**values, **environment})


def wait_for(path, reader, reached):
    """What ``path`` says, once it is so."""

    def look():
        value = reader(path.read_text()) if path.exists() else None
        return value if value is not None and reached(value) else None

    return eventually(look, path.name)


def saving(path):
    path.write_text("weights")


def test_a_job_runs_to_its_end_and_says_so(operator):
    """All steps, a checkpoint every five, the last step by name."""
    job, loaded = a_job(operator), []
    for step in job.steps(load=loaded.append, save=saving):
        job.report(loss=20.0 - step)
    assert (operator / "finished-step").read_text() == "20"
    report = Report.from_json((operator / "report.json").read_text())
    assert (report.epoch, report.step, report.loss, report.checkpoint_step) == (3, 20, 1.0, 20)
    assert loaded == [] and job.checkpoints.newest()[0] == 20


@pytest.mark.parametrize("fails", [3, 10**9])
def test_that_a_job_is_done_is_said_again_where_it_was_not_heard(operator, monkeypatch, fails):
    """Else it would be launched once more, as one that failed; up to a limit."""
    monkeypatch.setattr(reporter, "FINISH_SECONDS", WAIT_SECONDS if fails == 3 else 0.05)

    class Away(Directory):
        left = 0

        def write(self, annotations, **how):
            if self.left:
                self.left -= 1
                raise ChannelError("503")
            super().write(annotations, **how)

    channel = Away(operator)
    job = Job(channel=channel, environment={"BALLAST_POD_NAME": "job-1-0"})
    channel.left = fails
    job.finish(20)
    assert (operator / "finished-step").exists() == (fails == 3)


def test_a_job_that_is_asked_to_stop_saves_leaves_and_resumes(operator):
    """The exit code says that it continues; the next launch begins with the step after."""
    job, done = a_job(operator), []
    with pytest.raises(SystemExit) as left:
        for step in job.steps(save=saving):
            done.append(step)
            if step == 7:
                wait_for(operator / "ack.json", Ack.from_json, lambda ack: ack.epoch == 3)
                stop = a_plan(Directive.CHECKPOINT_AND_STOP, epoch=4)
                (operator / "plan.json").write_text(stop.to_json())
                eventually(lambda: job.seconds_left is not None, "it is asked to stop")
    assert left.value.code == 75
    last = done[-1] + 1
    assert last < 20 and job.checkpoints.newest()[0] == last
    ack = Ack.from_json((operator / "ack.json").read_text())
    assert (ack.epoch, ack.checkpoint_step) == (4, last)
    ended = TerminationMessage.from_json((operator / "termination-log").read_text())
    assert (ended.reason, ended.step) == (ExitReason.STOPPED, last)

    (operator / "plan.json").write_text(a_plan(epoch=5).to_json())
    loaded = []
    more = list(a_job(operator).steps(load=loaded.append, save=saving))
    assert more == list(range(last, 20))
    assert [path.name for path in loaded] == [f"step-{last}"]
    assert Report.from_json((operator / "report.json").read_text()).resumed_from_step == last


def test_a_plan_of_another_launch_is_not_acknowledged(operator):
    """The ConfigMap still has the last launch's, which does not name this pod."""
    job = a_job(operator, BALLAST_POD_NAME="job-2-0")
    for _ in job.steps(save=saving):
        pass
    assert not (operator / "ack.json").exists()


def test_a_script_that_leaves_its_own_loop_exits_as_stopped(operator):
    """`if job.step(...): save(); break` in a with block."""
    (operator / "plan.json").write_text(a_plan(Directive.CHECKPOINT_AND_STOP).to_json())
    with pytest.raises(SystemExit) as left, a_job(operator) as job:
        step = 0
        while not job.step(step := step + 1):
            pass
    assert left.value.code == 75


def test_a_script_that_is_told_to_leave_in_its_last_step_is_done(operator):
    """It exits with 0: there is nothing to continue."""
    (operator / "plan.json").write_text(a_plan(Directive.CHECKPOINT_AND_STOP).to_json())
    with a_job(operator) as job:
        step = 0
        while not job.step(step := step + 1):
            pass
        job.finish(step)
    assert (operator / "finished-step").read_text() == str(step)


def test_lightning_is_told_to_leave_in_its_last_step_and_is_done(operator, monkeypatch):
    """It is not launched once more for no step."""
    monkeypatch.setitem(sys.modules, "lightning.pytorch", SimpleNamespace(Callback=object))
    monkeypatch.delitem(sys.modules, "ballast_client.lightning", raising=False)
    from ballast_client.lightning import BallastCallback

    (operator / "plan.json").write_text(a_plan(Directive.CHECKPOINT_AND_STOP).to_json())
    trainer = _InTheLastStep()
    ballast = BallastCallback(a_job(operator))
    ballast.on_train_start(trainer, None)
    while not ballast.job.leaving:
        trainer.global_step += 1
        ballast.on_train_batch_end(trainer, None, None, None, 0)
    ballast.on_train_end(trainer, None)
    assert (operator / "finished-step").read_text() == str(trainer.global_step)


class _InTheLastStep:
    """A trainer that says of each step that it is the last."""

    global_step = 0
    max_steps = property(lambda self: self.global_step)

    def save_checkpoint(self, path, weights_only):
        saving(path)


@pytest.mark.parametrize("error", [ChannelError("not now"), RuntimeError("can't start new thread")])
def test_an_outage_is_told_once_and_outlived(operator, caplog, error):
    """Not at each look; whatever it is, the job reports afterwards, or it would count as hung."""

    class Away(Directory):
        failures = 5

        def read(self, key):
            if self.failures:
                self.failures -= 1
                raise error
            return super().read(key)

    with Job(channel=Away(operator), environment={}) as job:
        job.step(7)
        wait_for(operator / "report.json", Report.from_json, lambda report: report.step == 7)
        job.finish(7)
    assert [record.message for record in caplog.records].count(
        f"the operator cannot be reached now: {error}"
    ) == 1


@pytest.mark.parametrize("plan", [b"{", b"\xff"])
def test_a_job_leaves_where_it_cannot_hear_of_the_operator(operator, plan):
    """A node may end while the API server is away."""
    (operator / "plan.json").write_bytes(plan)
    with a_job(operator) as job:
        signal.raise_signal(signal.SIGTERM)
        step = itertools.count(1)
        eventually(lambda: job.step(next(step)), "the last step is found")
        job.finish(next(step))


def test_a_signal_after_the_end_of_a_job_is_the_scripts_own(operator):
    """It may go on without the job, and ends as if there were none."""
    heard = []
    signal.signal(signal.SIGTERM, lambda *_: heard.append("own"))
    a_job(operator).finish(1)
    signal.raise_signal(signal.SIGTERM)
    assert heard == ["own"]


def test_a_job_that_resumes_reports_the_checkpoint_that_it_has(operator):
    """Until it saves the next one; a speed it has once it has made steps of its own."""
    job = a_job(operator)
    for begin in (60, 40):  # a script may train twice
        job.resumed(begin)
        job.step(begin + 1)
        wait_for(operator / "report.json", Report.from_json, lambda report, at=begin: report.step == at + 1)
    job.finish(41)
    report = Report.from_json((operator / "report.json").read_text())
    assert (report.checkpoint_step, report.resumed_from_step, report.steps_per_second) == (40, 40, None)


def test_speed_is_measured_over_the_last_steps(operator, monkeypatch):
    """Ten steps a second, after ten slow ones, by a clock of the test's."""
    now = [100.0]
    job = a_job(operator)
    monkeypatch.setattr(reporter, "monotonic", lambda: now[0])
    job.resumed(0)
    for step in range(1, 601):
        now[0] += 7.0 if step < 10 else 0.1
        job.step(step)
    wait_for(operator / "ack.json", Ack.from_json, lambda ack: ack.epoch == 3)
    job.finish(600)
    report = Report.from_json((operator / "report.json").read_text())
    assert report.steps_per_second == pytest.approx(10.0)


def test_a_script_that_makes_no_step_for_too_long_renews_its_lease_no_more(operator, monkeypatch):
    """So that it is restarted; with the next step it is alive again."""
    now = [100.0]
    monkeypatch.setattr(reporter, "monotonic", lambda: now[0])

    class Counted(Directory):
        reads = writes = 0

        def read(self, key):
            self.reads += 1
            return super().read(key)

        def write(self, annotations, **how):
            super().write(annotations, **how)
            self.writes += 1

    channel = Counted(operator)

    def writes_within_three_looks():
        looks, before = channel.reads + 3, channel.writes
        eventually(lambda: channel.reads >= looks, "the plan is read")
        return channel.writes - before

    job = Job(channel=channel, environment={"BALLAST_POD_NAME": "job-1-0"}, hang_seconds=60.0)
    job.step(1)
    for seconds, alive in ((159.0, True), (160.0, False), (500.0, False)):
        now[0] = seconds
        assert bool(writes_within_three_looks()) == alive
    job.step(2)
    assert writes_within_three_looks()
    job.finish(2)


def test_away_from_ballast_the_script_runs_as_it_is(tmp_path):
    """No threads, no files but its checkpoints."""
    threads = threading.enumerate()
    job = Job(environment={"BALLAST_CHECKPOINT_PATH": str(tmp_path)})
    assert list(job.steps(3, save=saving, every=2)) == [0, 1, 2]
    assert list(job.steps(5, load=lambda path: None, save=saving, every=2)) == [3, 4]
    assert set(threading.enumerate()) <= set(threads)  # those of a test before may end meanwhile
    assert {path.name.partition("-")[0] for path in tmp_path.iterdir()} == {"step"}
    with pytest.raises(ValueError, match="needs a total"):
        next(job.steps())
    with pytest.raises(ValueError, match="every=0: checkpoints are at least 1 step apart"):
        next(job.steps(3, save=saving, every=0))


def lines_of_the_page():
    """The lines that docs/tasks/run-any-script.md adds to a script."""
    (block,) = [block for block in blocks("python") if block.where.startswith("docs/tasks/run-any-script.md")]
    return block.text.replace("20_000", "30")


def steps_of(script):
    """The steps that ``script`` trains; its checkpoints hold a word."""
    made = []
    exec(
        script,
        {
            "train": lambda step: made.append(step) or 0.5,
            "load": lambda path: path.read_text(),
            "save": lambda path: path.write_text("weights"),
        },
    )
    return made


@pytest.mark.parametrize("installed", [True, False])
def test_a_script_with_the_lines_of_the_page_runs_away_from_ballast(installed, monkeypatch, tmp_path):
    """All of its steps, also where the client is not installed."""
    monkeypatch.chdir(tmp_path)
    if not installed:
        monkeypatch.setitem(sys.modules, "ballast_client", None)
    assert steps_of(lines_of_the_page()) == list(range(30))


def test_the_lines_of_the_page_make_the_steps_of_the_job(operator, monkeypatch):
    """In a pod ``spec.totalSteps`` counts, and checkpoints are saved as the job says."""
    for name, value in {**ENVIRONMENT, "BALLAST_CHANNEL": str(operator)}.items():
        monkeypatch.setenv(name, value.format(folder=operator))
    assert steps_of(lines_of_the_page()) == list(range(20))
    assert "step-20" in {path.name for path in (operator / "checkpoints").iterdir()}
