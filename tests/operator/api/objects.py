"""Objects to start from: valid ones, and what makes them invalid."""

import copy
import re
from typing import Any, NamedTuple


class Malformed(NamedTuple):
    """A field that is set to ``value``; ``named``: the field that the refusal names; None: the same."""

    scenario: str
    path: str
    value: Any
    words: str
    named: str | None = None

    @property
    def field(self) -> str:
        return re.sub(r"\.(\d+)", r"[\1]", self.path) if self.named is None else self.named


def table(*cases: tuple[Any, ...]) -> list[Malformed]:
    return [Malformed(*case) for case in cases]


JOB: dict[str, Any] = {
    "apiVersion": "ballast.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "translator"},
    "spec": {
        "totalSteps": 1000,
        "model": {"name": "gpt", "args": {"width": 64}, "layers": 8},
        "pipeline": {"minStages": 2, "maxStages": 4, "microbatches": 8, "globalBatchSize": 16},
        "dynamics": [{"kind": "pruning", "startStep": 10, "endStep": 500, "everySteps": 10, "target": 0.9}],
        "gpuTypes": ["v100", "p100"],
        "throughput": [{"gpuType": "v100", "stages": 4, "stepsPerSecond": 2.5}],
        "checkpoint": {"path": "/checkpoints"},
        "template": {"spec": {"containers": [{"name": "trainer", "image": "trainer:1"}]}},
    },
}

RESHAPED: dict[str, Any] = {
    **JOB,
    "spec": {
        **JOB["spec"],
        "pipeline": {**JOB["spec"]["pipeline"], "schedule": "Interleaved1F1B", "stagesPerRank": 2},
        "rebalance": {"balancer": "diffusion", "by": "parameters", "memoryBytes": 2**33},
        "repack": {"enabled": True, "targetStages": 3},
    },
}

SCRIPT: dict[str, Any] = {
    "apiVersion": "ballast.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "script"},
    "spec": {
        "totalSteps": 1000,
        "pipeline": {"minStages": 2, "maxStages": 32},
        "throughput": [
            {
                "gpuType": "v100",
                "stages": 4,
                "stepsPerSecond": 2.5,
                "spread": [{"nodes": 2, "stepsPerSecond": 1.5}],
            }
        ],
        "template": {
            "spec": {"containers": [{"name": "train", "image": "mine:1", "command": ["python", "train.py"]}]}
        },
    },
}
"""A job without a model: its template's own command."""

POLICY: dict[str, Any] = {
    "apiVersion": "ballast.dev/v1alpha1",
    "kind": "ClusterPolicy",
    "metadata": {"name": "default"},
    "spec": {
        "nodePools": [
            {"name": "fast", "nodeSelector": {"pool": "fast"}, "gpuType": "v100", "pricePerGpuHour": 2.5},
            {"name": "slow", "nodeSelector": {"pool": "slow"}, "gpuType": "p100", "capacityType": "spot"},
        ]
    },
}

REMOVED: Any = object()
"""As a value: take the field out."""


def changed(item: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with one field set, by its path (``spec.dynamics.0.kind``), or taken out."""
    result = copy.deepcopy(item)
    *parents, last = [int(part) if part.isdecimal() else part for part in path.split(".")]
    where: Any = result
    for part in parents:
        where = where.setdefault(part, {}) if isinstance(where, dict) else where[part]
    if value is REMOVED:
        del where[last]
    elif isinstance(where, list) and last == len(where):
        where.append(value)
    else:
        where[last] = value
    return result
