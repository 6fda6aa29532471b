"""Between the API's models and the values that steps work on: the one place where both are known."""

import functools
import json
from typing import Any

from ballast_operator.api import training_job_status as api
from ballast_operator.api.base import Condition as ApiCondition
from ballast_operator.api.conditions import JobState
from ballast_operator.api.read import InvalidObject, read_training_job
from ballast_operator.api.training_job import TrainingJob, TrainingJobSpec
from ballast_operator.kube.kinds import Object
from ballast_operator.views.spec import JobSpec
from ballast_operator.views.status import Cause, Condition, Ending, Isolated, JobAllocation, JobStatus, Slot


def read_spec(item: Object) -> tuple[JobSpec | None, str]:
    """(spec, why it cannot be used): exactly one of them says something."""
    try:
        job = read_training_job({**item, "status": {}})
    except InvalidObject as error:
        return None, str(error)
    return _spec(job, job.spec), ""


def _spec(job: TrainingJob, spec: TrainingJobSpec) -> JobSpec:
    throughput: dict[str, dict[int, float]] = {}
    for known in spec.throughput:
        throughput.setdefault(known.gpu_type, {})[known.stages] = known.steps_per_second
    return JobSpec(
        config=job.trainer_config(),
        total_steps=spec.total_steps,
        layers=spec.model.layers,
        min_stages=spec.pipeline.min_stages,
        max_stages=spec.pipeline.max_stages,
        schedule=spec.pipeline.schedule,
        microbatches=spec.pipeline.microbatches,
        stages_per_rank=spec.pipeline.parts_per_rank,
        repack_enabled=spec.repack.enabled,
        repack_min_stages=spec.repack.min_stages,
        repack_target_stages=spec.repack.target_stages,
        repack_max_slowdown=spec.repack.max_slowdown,
        gpu_types=spec.gpu_types,
        throughput=throughput,
        weight=spec.weight,
        suspend=spec.suspend,
        grow=spec.grow,
        backoff_limit=spec.backoff_limit,
        ttl_seconds=spec.ttl_seconds_after_finished,
        checkpoint_path=spec.checkpoint.path,
        template=spec.template.as_object(),
        entity=spec.entity,
        deadline=spec.deadline,
    )


def read_status(item: Object) -> JobStatus:
    """The status of a TrainingJob.

    Raises:
        ValueError: it is not one that any release has written; nothing may be decided from it.
    """
    return _read_status(json.dumps(item.get("status") or {}, sort_keys=True))


@functools.lru_cache(maxsize=4096)
def _read_status(text: str) -> JobStatus:
    status = api.TrainingJobStatus.model_validate_json(text)
    return JobStatus(
        observed_generation=status.observed_generation,
        conditions=tuple(
            Condition(
                type=c.type,
                status=c.status == "True",
                reason=c.reason,
                message=c.message,
                since=c.last_transition_time,
                generation=c.observed_generation,
            )
            for c in status.conditions
        ),
        allocation=_held(status.allocation),
        launches=status.launches,
        restarts={Cause(cause): count for cause, count in status.restarts.items()},
        progress=status.progress.to_dict() if status.progress is not None else None,
        rebalances=tuple(entry.to_dict() for entry in status.rebalances),
        repacks=tuple(entry.to_dict() for entry in status.repacks),
        last_decision=status.last_decision.to_dict() if status.last_decision is not None else None,
        cost=status.cost_so_far or 0.0,
        cost_at=status.cost_at,
        isolated=None
        if status.isolated is None
        else Isolated(seconds=status.isolated.seconds, step=status.isolated.step),
        suspended_since=status.suspended_since,
        suspended_seconds=status.suspended_seconds or 0.0,
        next_launch_at=status.next_launch_at,
        finished_at=status.finished_at,
    )


def _held(allocation: api.JobAllocation | None) -> JobAllocation | None:
    # The operator writes pods and nodes together. An allocation without them holds nothing.
    if allocation is None or not allocation.pods or len(allocation.pods) != len(allocation.nodes):
        return None
    ending = allocation.ending
    return JobAllocation(
        launch=allocation.launch,
        gpu_type=allocation.gpu_type,
        pool=allocation.pool,
        slots=tuple(
            Slot(pod=pod, node=node) for pod, node in zip(allocation.pods, allocation.nodes, strict=True)
        ),
        plan_id=allocation.plan_id,
        since=allocation.since,
        joining=allocation.joining,
        joining_since=allocation.joining_since,
        first_newcomer=allocation.first_newcomer,
        ending=None
        if ending is None
        else Ending(cause=Cause(ending.cause), message=ending.message, since=ending.since),
    )


def write_status(status: JobStatus) -> dict[str, Any]:
    """The status as the API has it.

    Raises:
        pydantic.ValidationError: a value is outside its schema; a bug of a step.
    """
    held, last = status.allocation, status.last_decision
    allocation: api.JobAllocation | None = None
    if held is not None:
        allocation = api.JobAllocation(
            gpu_type=held.gpu_type,
            pool=held.pool,
            gpus=len(held.slots),
            pods=held.pods,
            nodes=held.nodes,
            plan_id=held.plan_id,
            launch=held.launch,
            since=held.since,
            joining=held.joining,
            joining_since=held.joining_since,
            first_newcomer=held.first_newcomer,
            ending=None
            if held.ending is None
            else api.Ending(
                cause=held.ending.cause, message=held.ending.message[:4096], since=held.ending.since
            ),
        )
    model = api.TrainingJobStatus(
        observed_generation=status.observed_generation,
        state=summary_state(status),
        conditions=tuple(
            ApiCondition(
                type=c.type,
                status="True" if c.status else "False",
                reason=c.reason,
                message=c.message[:32768],
                last_transition_time=c.since,
                observed_generation=c.generation,
            )
            for c in status.conditions
        ),
        allocation=allocation,
        progress=_parsed(api.Progress, status.progress),
        rebalances=tuple(_parsed(api.Rebalancing, entry) for entry in status.rebalances),
        repacks=tuple(_parsed(api.Repacking, entry) for entry in status.repacks),
        launches=status.launches,
        restarts={cause.value: count for cause, count in status.restarts.items()},
        last_decision=_parsed(api.Decision, last),
        cost_so_far=status.cost,
        cost_at=status.cost_at,
        isolated=None
        if status.isolated is None
        else api.Isolated(seconds=status.isolated.seconds, step=status.isolated.step),
        suspended_since=status.suspended_since,
        suspended_seconds=status.suspended_seconds or None,
        next_launch_at=status.next_launch_at,
        finished_at=status.finished_at,
    )
    return model.to_dict()


def _parsed(model: Any, value: Any) -> Any:
    return None if value is None else model.model_validate_json(json.dumps(value))


def summary_state(status: JobStatus) -> JobState:
    """One word for people, from conditions and the gang."""
    if status.is_true("Succeeded"):
        return JobState.SUCCEEDED
    if status.is_true("Failed"):
        return JobState.FAILED
    if status.allocation is None:
        admitted = status.condition("Admitted")
        suspended = admitted is not None and admitted.reason == "Suspended"
        return JobState.SUSPENDED if suspended else JobState.WAITING
    if status.allocation.ending is not None:
        return JobState.STOPPING
    if not status.is_true("Running"):
        return JobState.STARTING
    repacked = status.condition("Repacked")
    if repacked is not None and not repacked.status and repacked.reason == "Repacking":
        return JobState.REPACKING
    return JobState.RUNNING
