"""Jobs that run alike: what one has measured counts for the next."""

import hashlib
import json
from typing import Any

from ballast_policies.contract import Plan
from ballast_policies.rounds import mixed_name
from ballast_policies.throughput.placed import placed_name

from ballast_operator.api.job_allocation import JobAllocation
from ballast_operator.views.spec import JobSpec


def kind_of(spec: JobSpec) -> str:
    """Equal for jobs that run alike: a model with its batches, or a command of an image."""
    if spec.is_script:
        return _digest(["script", *spec.own_command])
    pipeline = spec.config_fields["pipeline"]
    batches = {
        key: pipeline.get(key) for key in ("globalBatchSize", "microbatches", "schedule", "stagesPerRank")
    }
    parts = [spec.config_fields["model"], batches, spec.config_fields.get("dynamics")]
    return _digest(parts)


def _digest(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def variant_of(spec: JobSpec) -> str:
    """As :func:`kind_of`; jobs that state other speeds are told apart."""
    if not spec.throughput:
        return kind_of(spec)
    stated_speeds = json.dumps(
        [[t, sorted(by_stages.items())] for t, by_stages in sorted(spec.throughput.items())]
    )
    return f"{kind_of(spec)}-{hashlib.sha256(stated_speeds.encode()).hexdigest()[:8]}"


def measured_on(allocation: JobAllocation, plan: Plan) -> str:
    """Under which name the gang's speed is remembered: its GPU type with the number of its nodes.

    The speed of a gang in several pools counts for none of their types: it has those of its parts' counts.
    """
    if allocation.parts:
        return mixed_name(allocation.by_pool)
    node_of = allocation.node_of
    return placed_name(allocation.gpu_type, len({node_of[pod] for pod in plan.pods if pod in node_of}))
