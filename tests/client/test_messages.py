"""The client's own spelling of the contract is the contract's; its checkpoints."""

import math

import pytest
from ballast_client import Checkpoints, messages
from ballast_client.channels import FILES
from ballast_policies.contract import messages as contract
from ballast_policies.contract.messages import (
    Ack,
    ExitCode,
    Rank,
    Report,
    TerminationMessage,
    read_finished_step,
)
from ballast_policies.contract.plan import Directive, Plan


def a_plan(directive=Directive.RUN, epoch=3):
    rank = Rank(rank=0, pod="job-1-0", address="127.0.0.1", gpu_type="v100")
    return Plan(job="job", epoch=epoch, launch=1, directive=directive, ranks=(rank,), reason="why")


def test_what_rank_0_says_is_read_by_the_operator():
    """Report, acknowledgement, last step and termination message."""
    text = messages.report(epoch=2, step=7, loss=0.5, rate=1.5, saved=5, resumed=None)
    report = Report.from_json(text)
    assert (report.step, report.steps_per_second, report.checkpoint_step) == (7, 1.5, 5)
    assert Ack.from_json(messages.ack(epoch=2, step=7, saved=5)).checkpoint_step == 5
    ended = TerminationMessage.from_json(messages.termination(message="x" * 5000, step=7))
    assert (ended.reason, ended.step) == ("CheckpointedAndStopped", 7)
    assert read_finished_step("7") == 7


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_left_out(loss):
    """The operator would refuse the whole report."""
    text = messages.report(epoch=1, step=1, loss=loss, rate=None, saved=None, resumed=None)
    assert Report.from_json(text).loss is None


def test_what_the_operator_says_is_read_by_the_client():
    """A run, and the order to save and stop."""
    assert messages.read_plan(a_plan().to_json()) == messages.Plan(3, False, frozenset({"job-1-0"}), "why")
    assert messages.read_plan(a_plan(Directive.CHECKPOINT_AND_STOP).to_json()).stops


@pytest.mark.parametrize("text", ["", "{", "[]", '{"epoch": 1}', '{"epoch": {}, "ranks": 3}', "[" * 100_000])
def test_what_is_no_plan_is_refused(text):
    with pytest.raises(ValueError, match="not a plan"):
        messages.read_plan(text)


def test_names_are_those_of_the_contract():
    """Annotations, keys, the exit code."""
    assert messages.PLAN_KEY == contract.PLAN_KEY
    assert set(FILES) == {
        contract.REPORT_ANNOTATION,
        contract.PROPOSAL_ANNOTATION,
        contract.ACK_ANNOTATION,
        contract.FINISHED_ANNOTATION,
        contract.END_REASON_ANNOTATION,
    }
    assert messages.STOP == Directive.CHECKPOINT_AND_STOP
    assert messages.STOPPED_EXIT_CODE == ExitCode.STOPPED


def test_the_newest_is_found_and_older_ones_go(tmp_path):
    """By number, not by name: step-10 is newer than step-9."""
    checkpoints = Checkpoints(tmp_path / "c", keep=2)
    assert checkpoints.newest() is None
    with pytest.raises(ValueError, match="keep=0: the newest checkpoint is always kept"):
        Checkpoints(tmp_path, keep=0)
    for step in (8, 9, 10):
        checkpoints.save(step, lambda path, step=step: path.write_text(str(step)))
    step, path = checkpoints.newest()
    assert (step, path.read_text()) == (10, "10")
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["step-10", "step-9"]
    # One that begins anew in the same folder has what it has saved.
    assert checkpoints.save(5, lambda path: path.write_text("5")).read_text() == "5"


def test_a_checkpoint_that_is_not_whole_does_not_count(tmp_path):
    """Neither where the process was killed while it wrote, nor where writing failed."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, lambda path: path.mkdir())

    def fails(path):
        path.mkdir()
        (path / "weights").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        checkpoints.save(2, fails)
    assert checkpoints.newest()[0] == 1
    checkpoints.save(3, lambda path: path.write_text("whole"))
    assert checkpoints.newest()[1].read_text() == "whole"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-3"]


def test_a_function_that_writes_elsewhere_is_told(tmp_path):
    """Otherwise the job would resume from nothing."""
    with pytest.raises(FileNotFoundError, match="To fix: write the checkpoint to the path"):
        Checkpoints(tmp_path).save(1, lambda path: None)
