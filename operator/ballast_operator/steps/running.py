"""A gang that has its plan: follow its reports."""

import datetime
import math
from typing import TypeVar

from ballast_policies.contract.errors import ContractError
from ballast_policies.contract.job.job import JobConfig
from ballast_policies.contract.messages import ExitReason, Report, lease_name, plan_config_map_name
from ballast_policies.contract.plan import Directive
from ballast_policies.rounds.values import counted

from ballast_operator.api.conditions import JobCondition, JobReason
from ballast_operator.api.job_allocation import LaunchDegrees
from ballast_operator.api.training_job_status import (
    MeasuredOnType,
    Progress,
    Rebalancing,
    TrainingJobStatus,
)
from ballast_operator.desired import access_objects, lease_object
from ballast_operator.kube.kinds import LEASE
from ballast_operator.steps.accounting import (
    accrue_cost,
    accrue_isolated_time,
    accrue_lost_steps,
    accrue_pause,
)
from ballast_operator.steps.context import (
    Action,
    Apply,
    ReconcileContext,
    WritePlan,
    seconds_since,
    with_condition,
)
from ballast_operator.steps.gang import with_trial

CLIENT_SECONDS = 30.0
"""Seconds after the plan's writing until a script that has not acknowledged it has no client."""


def with_refused_messages(context: ReconcileContext, status: TrainingJobStatus) -> TrainingJobStatus:
    """The status with the condition MessagesReadable; without it as long as no message was refused."""
    lease, known = context.view.lease, status.condition(JobCondition.MESSAGES_READABLE)
    if lease is not None and lease.refused:
        message = f"{lease.refused}; the last good message of this kind stays in force"
        return with_condition(
            context, status, JobCondition.MESSAGES_READABLE, False, JobReason.MESSAGE_REFUSED, message[:1024]
        )
    if known is None or known.is_true or lease is None:
        return status
    message = "the trainer's messages are readable again"
    return with_condition(
        context, status, JobCondition.MESSAGES_READABLE, True, JobReason.ALL_MESSAGES_READ, message
    )


def with_reporting(context: ReconcileContext, status: TrainingJobStatus) -> TrainingJobStatus:
    """The status of a running script with the condition Reporting: what is lost without the client."""
    view, allocation = context.view, context.allocation
    if view.has_spoken:
        message = "the command reports progress and speed, and is asked to save before it is stopped"
        return with_condition(
            context, status, JobCondition.REPORTING, True, JobReason.CLIENT_CONNECTED, message
        )
    # What has reported in an earlier launch has the time that a trainer has.
    known = status.is_true(JobCondition.REPORTING)
    limit = context.settings.start_seconds if known else CLIENT_SECONDS
    if view.plan_written is None or seconds_since(context, view.plan_written) < limit:
        return status
    speed = "as stated in spec.throughput"
    if allocation.gpu_type not in context.spec.throughput:
        speed = f"as assumed, since spec.throughput does not have {allocation.gpu_type}"
    message = (
        "the command has not used the client library: its progress, loss and speed are not known, its speed "
        f"counts {speed}, and it gets SIGTERM alone before it is stopped. "
        "To fix: add the client's lines to it (docs/tasks/run-any-script.md)"
    )
    return with_condition(context, status, JobCondition.REPORTING, False, JobReason.NO_CLIENT, message)


N = TypeVar("N", int, float)

LONGEST_ETA_SECONDS = 100 * 365 * 86_400.0
"""Seconds of a job up to which its end is forecast."""

KEPT_REBALANCES = 20
"""Entries that ``status.rebalances`` keeps, newest last."""


def track_progress(context: ReconcileContext) -> TrainingJobStatus:
    """The status brought up to the newest report."""
    view, status = context.view, context.view.status
    allocation, lease = context.allocation, view.lease
    report = lease.report if lease is not None else None
    if view.acknowledged:
        where = " and ".join(f"{part.gpu_type} of pool {part.pool}" for part in allocation.by_pool)
        message = counted(len(context.plan.ranks), "rank", "run" if view.is_script else "train")
        message += (" the template's command" if view.is_script else "") + f" on {where}"
        known = status.condition(JobCondition.RUNNING)
        if report is not None and report.not_saved and view.has_spoken:
            # The first reason stays: a text that changed with each try would be a write each.
            said = known.message if known is not None else ""
            new = f"{message}; {report.not_saved}"[:1024]
            message = said if said.startswith(f"{message}; ") else new
        begins = not status.is_true(JobCondition.RUNNING)
        if begins:
            status = accrue_cost(context, status)  # up to here it was starting
        status = with_condition(
            context, status, JobCondition.RUNNING, True, JobReason.ALL_RANKS_TRAIN, message
        )
        if begins and status.is_true(JobCondition.PREEMPTED):
            status = with_condition(
                context, status, JobCondition.PREEMPTED, False, JobReason.RESUMED, message
            )
    if view.is_script:
        status = with_reporting(context, status)
        if not view.has_spoken:
            return accrue_cost(context, status) if view.acknowledged else status
    plan = view.launched_plan
    if report is None or plan is None or report.epoch > plan.epoch or not view.has_spoken:
        return status
    status = _rebalanced(context, status, report)
    status = with_trial(context, status, report)
    status = _with_measured_layers(context, status, report)
    status = accrue_lost_steps(status, report)
    speed = context.assignment.isolated_speed if context.assignment is not None else 0.0
    status = status.replace(
        progress=progress(context, report),
        isolated=accrue_isolated_time(status.isolated, report, speed),
    )
    return accrue_cost(context, status)


def with_saved_step(context: ReconcileContext, status: TrainingJobStatus) -> TrainingJobStatus:
    """The status of a launch that ends with the step that its ranks have saved, which no report told of."""
    if status.allocation is None or status.allocation.ending is None or status.progress is None:
        return status
    said = [pod.message for pod in context.view.gang if pod.message is not None]
    steps = [found.step or 0 for found in said if found.reason is ExitReason.STOPPED]
    step = min(max(steps, default=0), context.spec.config.total_steps)
    if step <= max(status.progress.step, status.progress.checkpoint_step or 0):
        return status
    percent = 100 * step // max(1, context.spec.config.total_steps)
    return status.replace(progress=status.progress.replace(step=step, checkpoint_step=step, percent=percent))


def progress(context: ReconcileContext, report: Report) -> Progress:
    """``status.progress`` from a report."""
    total, step = context.spec.config.total_steps, max(0, report.step)
    eta = None
    rate = report.steps_per_second or 0.0
    if total > report.step and (total - report.step) < rate * LONGEST_ETA_SECONDS:
        left = datetime.timedelta(seconds=round((total - report.step) / rate))
        eta = (context.now + left).replace(microsecond=0)
    known = context.view.status.progress
    validation_loss = _shown(report.validation_loss)
    validation_step = _within(report.validation_step, 0, step)
    if validation_loss is None and known is not None:
        # A new launch has not evaluated yet.
        validation_loss, validation_step = known.validation_loss, known.validation_step
    return Progress(
        step=step,
        steps_per_second=_shown(_within(report.steps_per_second, 0.0, math.inf)),
        loss=_shown(report.loss),
        imbalance=_shown(_within(report.imbalance, 0.0, math.inf)),
        bubble=_within(report.bubble, 0.0, 1.0),
        checkpoint_step=_within(report.checkpoint_step, 0, report.step),
        checkpoint_every_steps=_within(report.checkpoint_every_steps, 1, 2**31 - 1),
        checkpoint_seconds=_within(report.checkpoint_seconds, 0.0, math.inf),
        checkpoint_write_seconds=_within(report.checkpoint_write_seconds, 0.0, math.inf),
        bad_samples=_within(report.bad_samples, 0, 2**53) or None,
        flops_per_second=_within(report.flops_per_second, 0.0, math.inf),
        part_of_peak=_within(report.part_of_peak, 0.0, math.inf),
        goodput=_within(report.goodput, 0.0, 1.0),
        percent=min(100, 100 * step // total) if total else None,
        emulated_slowdown=_within(report.emulated, 1.0, math.inf),
        eta=eta,
        validation_loss=validation_loss,
        validation_step=validation_step,
    )


def _within(value: N | None, least: N, most: N) -> N | None:
    """The trainer's number, limited to the range that the API allows: rounding may have left it."""
    if value is None or not math.isfinite(value):
        return None
    return max(least, min(most, value))


def _shown(measured: float | None) -> float | None:
    """A measured number by six digits: `kubectl get` prints what is stored."""
    return float(f"{measured:.6g}") if measured is not None and math.isfinite(measured) else None


def _rebalanced(context: ReconcileContext, status: TrainingJobStatus, report: Report) -> TrainingJobStatus:
    if not report.rebalances or report.last_rebalance_step is None:
        return status
    launch, step = context.view.launch, max(0, report.last_rebalance_step)
    last = status.rebalances[-1] if status.rebalances else None
    same = last is not None and (last.launch, last.step) == (launch, step)
    earlier = status.rebalances[:-1] if same else status.rebalances
    # A later report may add to the entry what was not measured before.
    known = (
        last
        if last is not None and same
        else Rebalancing(time=context.now.replace(microsecond=0), launch=launch, step=step)
    )
    measured = {
        "imbalance_before": _within(report.imbalance_before, 0.0, math.inf),
        "imbalance_after": _within(report.imbalance_after, 0.0, math.inf),
        "pause_ms": _within(report.rebalance_pause_ms, 0.0, math.inf),
    }
    entry = known.replace(**{name: value for name, value in measured.items() if value is not None})
    if entry == last:
        return status
    status = status.replace(rebalances=(*earlier, entry)[-KEPT_REBALANCES:])
    status = accrue_pause(status, (entry.pause_ms or 0.0) - (known.pause_ms or 0.0))
    message = f"layers moved at step {report.last_rebalance_step}"
    if report.imbalance_before is not None and report.imbalance_after is not None:
        message += f": imbalance {report.imbalance_before:.3f} -> {report.imbalance_after:.3f}"
    return with_condition(context, status, JobCondition.REBALANCED, True, JobReason.LAYERS_MOVED, message)


MEASURED_STEPS = 10
"""Steps of a launch until what it has measured of its layers counts."""

MEASURED_AGAIN = datetime.timedelta(minutes=10)
"""Time between two measurements of a job that count: whatever it reports, it is planned no more often."""

MEASURED_KEPT = 8
"""GPU types and tensor degrees of a job, the newest."""


def _with_measured_layers(
    context: ReconcileContext, status: TrainingJobStatus, report: Report
) -> TrainingJobStatus:
    """The status of a job with ``planner``, with what it has measured of its layers where that is news."""
    spec, allocation, question = context.spec, context.allocation, context.spec.question
    degrees, known = allocation.degrees, spec.measured_alike(status.measured_layers)
    if question is None or degrees is None or report.epoch != context.plan.epoch:
        return status
    if report.tried and report.kept is None:
        return status  # what its ranks repeat may be another candidate's
    if report.step - max(report.resumed_from_step or 0, report.last_rebalance_step or 0) < MEASURED_STEPS:
        return status
    if known and abs(context.now - known[-1].at) < MEASURED_AGAIN:
        return status
    updates = report.layer_optimizer_seconds or (0.0,) * len(report.layer_seconds)
    if len(updates) != len(report.layer_seconds):
        return status
    seconds = [max(0.0, both - update) for both, update in zip(report.layer_seconds, updates, strict=True)]
    by_type = question.news(_types_of_layers(context, report, degrees), degrees, seconds)
    if not by_type or not _launched_alike(context):
        return status
    at = context.now.replace(microsecond=0)
    found = [
        MeasuredOnType(gpu_type=gpu_type, tensor=degrees.tensor, ratios=ratios, at=at, of=spec.measured_as)
        for gpu_type, ratios in by_type.items()
    ]
    others = [one for one in known if one.tensor != degrees.tensor or one.gpu_type not in by_type]
    return status.replace(measured_layers=(*others, *found)[-MEASURED_KEPT:])


def _types_of_layers(context: ReconcileContext, report: Report, degrees: LaunchDegrees) -> list[str]:
    """The GPU type on which each layer is, by the report's stages, or else the plan's; empty: not known."""
    by_rank = [part.gpu_type for part in context.allocation.by_pool for _ in range(part.gpus)]
    by_position = by_rank[:: degrees.gpus_per_stage]
    stages = sorted(report.stages or context.plan.stages, key=lambda stage: stage.first_layer)
    ends = [stage.end_layer for stage in stages]
    if [stage.first_layer for stage in stages] != [0, *ends][: len(ends)]:
        return []
    if not ends or ends[-1] != sum(degrees.layers) or max(s.rank for s in stages) >= len(by_position):
        return []
    return [by_position[stage.rank] for stage in stages for _ in range(stage.first_layer, stage.end_layer)]


def _launched_alike(context: ReconcileContext) -> bool:
    """True if its layers take as long as those of the spec: it may have been edited for the next launch."""
    try:
        launched = JobConfig.from_json(context.view.plan_config)
    except ContractError:  # someone has changed the ConfigMap
        return False
    config = context.spec.config
    return (
        launched.model == config.model
        and launched.dynamics == config.dynamics
        and launched.training.precision == config.training.precision
        and launched.pipeline.global_batch_size == config.pipeline.global_batch_size
    )


def next_look(context: ReconcileContext) -> float:
    """Seconds until a gang that trains, or whose ranks meet, is looked at again."""
    view, settings = context.view, context.settings
    if view.acknowledged or view.plan_written is None:
        return settings.heartbeat_seconds
    if view.launched_plan is not None and view.launched_plan.directive is not Directive.RUN:
        return settings.heartbeat_seconds
    return max(1.0, settings.start_seconds - seconds_since(context, view.plan_written))


LOOK_SECONDS = 15.0
"""Seconds between looks at a gang that trains, whatever it tells."""


def recreate_owned_objects(context: ReconcileContext) -> tuple[tuple[Action, ...], tuple[str, ...]]:
    """Lease and plan where they are gone; the service account and its role where the trainer is silent.

    A plan that a wrong clock has written in the future, too: its acknowledgement would not be due for long.

    Returns:
        The actions, and the names of objects that somebody has deleted or changed.
    """
    view = context.view
    written = view.plan_written
    late = written is not None and -seconds_since(context, written) > context.settings.restart_max_seconds
    actions: list[Action] = []
    undone: list[str] = []
    if view.lease is None:
        undone.append(f"Lease {lease_name(view.name)}")
        actions.append(Apply(LEASE, lease_object(view, context.settings.heartbeat_seconds)))
    elif view.listens and view.lease.quiet_seconds >= max(LOOK_SECONDS, 2 * context.settings.renew_seconds):
        actions += [Apply(kind, body) for kind, body in access_objects(view)]
    if not view.plan_intact:
        undone.append(f"ConfigMap {plan_config_map_name(view.name)}")
    if late or not view.plan_intact:
        actions.append(WritePlan(context.plan))
    return tuple(actions), tuple(undone)
