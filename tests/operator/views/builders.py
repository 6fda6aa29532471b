"""Views to start from."""

import dataclasses
import datetime
from typing import Any

from ballast_operator.api.job_allocation import JobAllocation
from ballast_operator.api.node_pool import NodePool
from ballast_operator.api.training_job import TrainingJobSpec
from ballast_operator.api.training_job_status import TrainingJobStatus
from ballast_operator.views.assignment import PoolInfo
from ballast_operator.views.job import JobView
from ballast_operator.views.pod import PodView
from ballast_operator.views.spec import JobSpec
from ballast_policies.contract.job.job import JobConfig
from ballast_policies.contract.messages import Rank
from ballast_policies.contract.plan import Directive, Plan

NOW = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)


def a_config(**changes: Any) -> JobConfig:
    """A configuration for at most four stages; ``changes`` are its fields as a TrainingJob has them."""
    values: dict[str, Any] = {
        "totalSteps": 100,
        "model": {"name": "gpt", "layers": 8},
        "pipeline": {"maxStages": 4},
        "repack": {"enabled": True},
        "checkpoint": {"path": "/checkpoints"},
    }
    return JobConfig.from_mapping({**values, **changes})


def a_spec(**changes: Any) -> JobSpec:
    """``changes``: of the spec, or of what its user asked for."""
    fields = {field.name for field in dataclasses.fields(JobSpec)}
    asked = {name: value for name, value in changes.items() if name not in fields}
    assert asked.keys() <= TrainingJobSpec.model_fields.keys()
    values: dict[str, Any] = {
        "asked": TrainingJobSpec.model_construct(**asked),
        "config": a_config(),
        "template": {"spec": {"containers": [{"name": "trainer", "image": "trainer:1"}]}},
    }
    return JobSpec(**{**values, **{name: changes[name] for name in changes if name in fields}})


def a_pool(price: float = 0.0, **changes: Any) -> PoolInfo:
    pool = NodePool(name="p", node_selector={"a": "b"}, gpu_type="v100", price_per_gpu_hour=price)
    return PoolInfo(pool=pool, **changes)


def a_plan(pods: tuple[str, ...], **changes: Any) -> Plan:
    ranks = tuple(
        Rank(rank=rank, pod=pod, address=f"127.0.1.{rank}", gpu_type="v100") for rank, pod in enumerate(pods)
    )
    return Plan(
        **{"job": "job", "epoch": 1, "launch": 1, "directive": Directive.RUN, "ranks": ranks, **changes}
    )


def a_view(*, pods: tuple[str, ...], plan: Plan | None, spec: JobSpec, **changes: Any) -> JobView:
    allocation = JobAllocation(
        launch=1,
        gpu_type="v100",
        pool="v100",
        gpus=len(pods),
        pods=pods,
        nodes=("n",) * len(pods),
        plan_id="p",
        since=NOW,
    )
    views = tuple(
        PodView(
            name=pod,
            uid=f"uid-{pod}",
            launch=1,
            rank=rank,
            node="n",
            phase="Running",
            address=f"127.0.1.{rank}",
        )
        for rank, pod in enumerate(pods)
    )
    values: dict[str, Any] = {
        "key": ("team", "job"),
        "uid": "uid-job",
        "generation": 1,
        "spec": spec,
        "status": TrainingJobStatus(allocation=allocation, launches=1),
        "pods": views,
        "plan": plan,
        "plan_written": NOW,
    }
    return JobView(**{**values, **changes})
