"""The client's own spelling of the contract is the contract's."""

import math

import pytest
from ballast_client import messages
from ballast_client.channels import FILES
from ballast_policies import contract
from ballast_policies.contract import Ack, Directive, ExitCode, Plan, Rank, Report, TerminationMessage
from ballast_policies.contract.messages import read_finished_step


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
    """With one kind of error."""
    with pytest.raises(ValueError, match="not a plan"):
        messages.read_plan(text)


def test_names_are_those_of_the_contract():
    """Annotations, keys, the exit code."""
    assert messages.PLAN_KEY == contract.PLAN_KEY
    assert set(FILES) == {
        contract.REPORT_ANNOTATION,
        contract.ACK_ANNOTATION,
        contract.FINISHED_ANNOTATION,
    }
    assert messages.STOP == Directive.CHECKPOINT_AND_STOP
    assert messages.STOPPED_EXIT_CODE == ExitCode.STOPPED
