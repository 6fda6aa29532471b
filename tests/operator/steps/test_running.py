"""What a running gang reports becomes its status, and what it is told."""

import dataclasses

import pytest
from ballast_operator.api.conditions import JobCondition
from ballast_operator.api.job_allocation import AllocationPart
from ballast_operator.steps.context import WritePlan, refusal
from ballast_operator.steps.decide import failures_per_hour, take_step
from ballast_operator.steps.running import (
    progress,
    with_refused_messages,
    with_reporting,
    with_saved_step,
)
from ballast_operator.views.assignment import PoolInfo
from ballast_operator.views.lease import LeaseView
from ballast_policies.contract.messages import Ack, ExitReason, Stage, TerminationMessage
from ballast_policies.contract.plan import Directive
from ballast_policies.protocol.observed import Cause

from tests.operator.steps.contexts import (
    PODS,
    PROPOSAL,
    a_context,
    a_report,
    a_running_view,
    after,
    keep,
)
from tests.operator.views.builders import a_config, a_plan, a_pool

ACKNOWLEDGED = Ack(epoch=1, step=0)


def reporting(**changes):
    return a_running_view(lease=LeaseView(ack=ACKNOWLEDGED, report=a_report(**changes)))


def test_progress_has_the_report_the_percentage_and_the_expected_end():
    """50 of 100 steps at 5 steps/s: ten seconds to go."""
    report = a_report(imbalance=0.25, checkpoint_step=40, flops_per_second=2e12, part_of_peak=0.4)
    found = progress(a_context(seconds=10), report)
    assert (found.step, found.percent, found.eta) == (50, 50, after(20))
    assert (found.steps_per_second, found.loss, found.imbalance) == (5.0, 2.0, 0.25)
    assert found.checkpoint_step == 40
    assert (found.flops_per_second, found.part_of_peak) == (2e12, 0.4)


def test_checkpoints_that_fail_are_told_by_the_condition_until_one_is_written():
    """By the first reason alone: whatever the trainer writes, it makes one write."""
    messages, view = [], reporting()
    for why in ("step 5 is not saved, there is none: No space left", "step 6 is not saved", "x" * 4096, ""):
        view = dataclasses.replace(reporting(not_saved=why), status=view.status)
        view = dataclasses.replace(view, status=take_step(a_context(view)).status)
        messages.append(view.status.condition(JobCondition.RUNNING).message)
    plain = messages[-1]
    assert messages[:-1] == [f"{plain}; step 5 is not saved, there is none: No space left"] * 3
    view = dataclasses.replace(reporting(not_saved="x" * 4096), status=view.status)
    assert len(take_step(a_context(view)).status.condition(JobCondition.RUNNING).message) == 1024


@pytest.mark.parametrize(
    ("reason", "step", "saved"), [(ExitReason.STOPPED, 57, 57), (ExitReason.STOPPED_UNSAVED, 50, 40)]
)
def test_the_step_of_a_launch_that_ends_counts_where_its_ranks_have_saved_it(reason, step, saved):
    """Storage that refuses it leaves the checkpoint of before, whatever step the ranks had reached."""
    first = take_step(a_context(reporting(checkpoint_step=40))).status
    ending = first.replace(allocation=first.allocation.replace(ending=Cause.PREEMPTED))
    said = TerminationMessage(reason=reason, message="told to stop", step=57)
    view = a_running_view(status=ending)
    gang = tuple(dataclasses.replace(pod, phase="Failed", exit_code=75, message=said) for pod in view.gang)
    context = a_context(dataclasses.replace(view, pods=gang), seconds=5)
    found = with_saved_step(context, ending).progress
    assert (found.step, found.checkpoint_step) == (step, saved)


def test_the_validation_loss_stays_until_the_next_evaluation():
    """Reports of a new launch have none until it evaluates."""
    first = take_step(a_context(reporting(validation_loss=1.5, validation_step=40))).status
    assert (first.progress.validation_loss, first.progress.validation_step) == (1.5, 40)
    second = take_step(a_context(dataclasses.replace(reporting(), status=first), seconds=5)).status
    assert (second.progress.validation_loss, second.progress.validation_step) == (1.5, 40)


@pytest.mark.parametrize(
    ("report", "want"),
    [
        ({"loss": float("nan")}, {"loss": None}),
        ({"loss": 2.3456789012}, {"loss": 2.34568}),
        (
            {"steps_per_second": 0.123456789, "imbalance": 0.0123456789},
            {"steps_per_second": 0.123457, "imbalance": 0.0123457},
        ),
        ({"bubble": 1.0000001}, {"bubble": 1.0}),
        ({"validation_loss": float("inf"), "validation_step": 50}, {"validation_loss": None}),
        ({"checkpoint_step": 51}, {"checkpoint_step": 50}),
        ({"step": -1}, {"step": 0}),
        ({"steps_per_second": 0.0}, {"eta": None}),
    ],
    ids=[
        "loss is not a number",
        "loss of more digits than are shown",
        "speed and imbalance of more digits than are shown",
        "rounded above 1",
        "validation loss is infinite",
        "checkpoint ahead",
        "negative step",
        "at a standstill",
    ],
)
def test_a_reported_number_outside_its_range_is_brought_into_it(report, want):
    """The status is valid whatever the trainer reports, even what no report can be read with."""
    found = progress(a_context(), a_report().model_copy(update=report))
    assert {name: getattr(found, name) for name in want} == want


def test_a_rebalance_is_listed_once_and_completed_by_later_reports():
    """The imbalance after it is measured later; the entry keeps its time."""
    first = reporting(rebalances=1, last_rebalance_step=40, imbalance_before=0.5)
    status = take_step(a_context(first, seconds=5)).status
    second = reporting(rebalances=1, last_rebalance_step=40, imbalance_before=0.5, imbalance_after=0.1)
    result = take_step(a_context(dataclasses.replace(second, status=status), seconds=9))
    (entry,) = result.status.rebalances
    assert (entry.step, entry.time) == (40, after(5))
    assert (entry.imbalance_before, entry.imbalance_after) == (0.5, 0.1)
    assert "imbalance 0.500 -> 0.100" in result.status.condition("Rebalanced").message


def test_a_report_of_a_later_epoch_than_the_plan_is_left_alone():
    """It belongs to a plan that this pass does not see yet."""
    assert take_step(a_context(reporting(epoch=2))).status.progress is None


def test_a_proposal_is_answered_before_the_gang_grows():
    """A shrink that is proposed and GPUs that are offered in the same pass: the shrink is planned."""
    view = a_running_view(lease=LeaseView(ack=ACKNOWLEDGED, proposal=PROPOSAL))
    (action,) = take_step(a_context(view, assignment=keep(extra_nodes=("m",)))).actions
    assert isinstance(action, WritePlan) and action.plan.directive is Directive.SHRINK


def test_ranks_that_exit_with_success_before_the_last_step_end_the_launch():
    """A user error, once the last step has had time to be announced."""
    view = a_running_view(lease=LeaseView(ack=ACKNOWLEDGED, quiet_seconds=11.0))
    view = dataclasses.replace(
        view, pods=tuple(dataclasses.replace(pod, phase="Succeeded", exit_code=0) for pod in view.pods)
    )
    ending = take_step(a_context(view)).status.allocation.ending
    assert ending.cause is Cause.USER_ERROR and "names no last step" in ending.message


CASES = {
    "as it should be": ({}, {}, ""),
    "repacking is not wanted": ({"enabled": False}, {}, "spec.repack.enabled is false"),
    "too few stay": ({"minStages": 3}, {}, "keeps 2 pods, below spec.repack.minStages=3"),
    "as many stay as are wanted": ({"targetStages": 2}, {}, ""),
    "others stay than are wanted": ({"targetStages": 3}, {}, "keeps 2 pods, spec.repack.targetStages=3"),
    "it would be too slow": (
        {},
        {"step_seconds_after": 1.2},
        "above the 1.1 s that spec.repack.maxSlowdown=0.1 allows",
    ),
    "rank 0 would go": (
        {},
        {"kept_pods": (PODS[1], PODS[0])},
        "rank 0 must stay job-1-0, the proposal moves it to job-1-1",
    ),
    "a pod is forgotten": ({}, {"released_pods": (PODS[2],)}, "the plan's pods are"),
    "a stranger is named": ({}, {"released_pods": (PODS[2], "other-1-0")}, "other-1-0"),
    "a stage on a rank that goes": (
        {},
        {"stages": (Stage(rank=2, first_layer=0, end_layer=8),)},
        "a stage is on rank 2, but the proposal keeps 2 ranks",
    ),
}


@pytest.mark.parametrize(("repack", "changes", "want_words"), CASES.values(), ids=CASES.keys())
def test_a_proposal_is_checked_against_the_spec_and_the_plan(repack, changes, want_words):
    """The refusal has the numbers; an empty one accepts."""
    spec = {"config": a_config(repack={"enabled": True, **repack})}
    said = refusal(a_context(spec=spec), PROPOSAL.replace(**changes))
    assert want_words in said if want_words else said == ""


READABLE, REPORTING = JobCondition.MESSAGES_READABLE, JobCondition.REPORTING


def refusing(text):
    return LeaseView(ack=Ack(epoch=1, step=0), refused=text)


def test_a_long_refusal_fits_into_a_condition():
    """The API server takes 32 KiB; people read a line."""
    context = a_context(a_running_view(lease=refusing("x" * 5000)))
    assert len(with_refused_messages(context, context.view.status).condition(READABLE).message) == 1024


def test_a_script_with_the_client_reports():
    """From its first acknowledgement on."""
    context = a_context(a_running_view(epoch=1))
    assert with_reporting(context, context.view.status).is_true(REPORTING)


SPOT, ON_DEMAND = a_pool(losses_per_hour=0.25), a_pool()


def rate(first: PoolInfo, second: PoolInfo | None = None) -> float | None:
    """Of a gang on four nodes, two of them in the second pool."""
    view = a_running_view()
    allocation = view.status.allocation.with_pods(dict(zip(PODS, "abcd", strict=True)))
    pools = {allocation.pool: first}
    if second is not None:
        parts = (
            AllocationPart(pool=allocation.pool, gpu_type=allocation.gpu_type, pods=PODS[:2]),
            AllocationPart(pool="second", gpu_type="k80", pods=PODS[2:]),
        )
        allocation, pools = allocation.replace(parts=parts), {**pools, "second": second}
    view = dataclasses.replace(view, status=view.status.replace(allocation=allocation))
    return failures_per_hour(a_context(view, pools=pools), a_plan(PODS))


@pytest.mark.parametrize(
    ("pools", "want"),
    [
        ((SPOT,), 1.0),
        ((ON_DEMAND,), None),
        ((SPOT, ON_DEMAND), 0.5),
        ((ON_DEMAND, SPOT), 0.5),
        ((SPOT, a_pool(losses_per_hour=1.0)), 2.5),
        ((ON_DEMAND, ON_DEMAND), None),
    ],
)
def test_each_node_counts_at_the_rate_of_its_own_pool(pools, want):
    """A gang in several pools loses only machines of those that may be taken away."""
    assert rate(*pools) == want
