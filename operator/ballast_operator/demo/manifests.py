"""The demo's manifests (policy and jobs), and the allocation of these jobs by the policy."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from ballast_policies.allocation.problem import Allocation, Job, Problem
from ballast_policies.allocation.registry import allocate


def demo_manifests() -> Path:
    """The folder of the demo's manifests."""
    return Path(__file__).with_name("examples")


def read_manifests(folder: Path) -> list[dict[str, Any]]:
    """All objects of all files, in the order of the files' names."""
    return [
        manifest
        for path in sorted(folder.glob("*.yaml"))
        for manifest in yaml.safe_load_all(path.read_text())
    ]


def compare_with_agnostic(
    manifests: Sequence[Mapping[str, Any]], pool_gpus: Mapping[str, int]
) -> tuple[Allocation, Allocation]:
    """The policy's allocation of the jobs, and its heterogeneity-agnostic allocation.

    The ``manifests`` are one ClusterPolicy and the TrainingJobs, which know their throughput; ``pool_gpus``:
    pool -> GPUs.
    """
    (policy,) = [m for m in manifests if m["kind"] == "ClusterPolicy"]
    capacity: dict[str, int] = {}
    for pool in policy["spec"]["nodePools"]:
        capacity[pool["gpuType"]] = capacity.get(pool["gpuType"], 0) + pool_gpus.get(pool["name"], 0)
    jobs = tuple(_job(m["metadata"]["name"], m["spec"]) for m in manifests if m["kind"] == "TrainingJob")
    problem = Problem(gpu_types=tuple(capacity), capacity=capacity, jobs=jobs)
    name = policy["spec"]["objective"]["policy"]
    return allocate(name, problem), allocate(name, problem, agnostic=True)


def _job(name: str, spec: Mapping[str, Any]) -> Job:
    stages = spec["pipeline"]["maxStages"]
    allowed = spec.get("gpuTypes") or [known["gpuType"] for known in spec["throughput"]]
    return Job(
        name=name,
        gpus=stages,
        weight=spec.get("weight", 1.0),
        throughput={
            known["gpuType"]: known["stepsPerSecond"]
            for known in spec["throughput"]
            if known["stages"] == stages and known["gpuType"] in allowed
        },
    )
