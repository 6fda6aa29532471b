"""Memory of the operator's caches: 20,000 pods, 5,000 jobs and 1,000 nodes as the API server has them.

    python benchmarks/operator/memory.py

In one process without a cluster; each object comes in as JSON text, as from a watch. Resident memory with all
that the operator imports, and what the objects and the views of all jobs add.
"""

import argparse
import gc
import json
from pathlib import Path
from typing import Any

from ballast_operator.app import Operator
from ballast_operator.kube.caches import Caches
from ballast_operator.kube.kinds import CONFIG_MAP, JOB, LEASE, NODE, POD, Kind
from ballast_operator.observation.observer import Observer
from ballast_policies.contract.messages import (
    JOB_LABEL,
    LAUNCH_LABEL,
    PLAN_KEY,
    RANK_LABEL,
    Rank,
    lease_name,
    plan_config_map_name,
)
from ballast_policies.contract.plan import Directive, Plan
from emulated import objects

MANAGED = [
    {"manager": "ballast-operator", "operation": "Apply", "fieldsV1": {f"f:field-{n}": {} for n in range(60)}}
]
"""Bookkeeping of the API server, about as much as it keeps of a pod."""


def main() -> None:
    """Print resident MiB, step by step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pods", type=int, default=20_000)
    parser.add_argument("--jobs", type=int, default=5_000)
    parser.add_argument("--nodes", type=int, default=1_000)
    parser.add_argument("--output", choices=("table", "json"), default="table")
    given = parser.parse_args()
    figures = {"imported": resident_mib()}
    caches = Caches()
    observer = Observer(caches)
    for index in range(given.nodes):
        put(caches, NODE, objects.node(index))
    for index in range(given.jobs):
        item = objects.job(index)
        job = item["metadata"]["name"]
        ranks = [f"{job}-1-{number}" for number in range(-(-given.pods // given.jobs))]
        item["status"] = status(ranks)
        put(caches, JOB, item)
        put(caches, LEASE, part(lease_name(job), job))
        plan = part(plan_config_map_name(job), job) | {"data": {PLAN_KEY: a_plan(job, ranks).to_json()}}
        put(caches, CONFIG_MAP, plan)
    figures["jobs"] = resident_mib()
    for index in range(given.pods):
        put(caches, POD, pod(index, index % given.jobs, index // given.jobs))
    figures["pods"] = resident_mib()
    views = observer.jobs()
    figures["views"] = resident_mib()
    assert len(views) == given.jobs and len(caches[POD]) == given.pods
    rounded = {name: round(size, 1) for name, size in figures.items()}
    if given.output == "json":
        print(json.dumps({"operator": Operator.__module__, "pods": given.pods, "residentMiB": rounded}))
    else:
        print("\n".join(f"{name:10} {size:8.1f} MiB" for name, size in rounded.items()))


def put(caches: Caches, kind: Kind, item: dict[str, Any]) -> None:
    """Put an object in as the watch brings it."""
    metadata = item["metadata"]
    metadata |= {"uid": f"{kind.kind}-{metadata['name']}", "resourceVersion": "1", "generation": 1}
    metadata |= {"creationTimestamp": "2026-01-01T00:00:00Z", "managedFields": MANAGED}
    caches.watched(kind, "ADDED", json.loads(json.dumps(item)))


def part(name: str, job: str) -> dict[str, Any]:
    """An object that belongs to a job."""
    owner = {"kind": "TrainingJob", "name": job, "uid": f"TrainingJob-{job}", "controller": True}
    labels = {JOB_LABEL: job, "app.kubernetes.io/managed-by": "ballast-operator"}
    return {"metadata": {"name": name, "namespace": "default", "labels": labels, "ownerReferences": [owner]}}


def status(pods: list[str]) -> dict[str, Any]:
    """Status of a job that trains."""
    return {
        "launches": 1,
        "allocation": {
            "launch": 1,
            "gpuType": "v100",
            "pool": "v100",
            "gpus": len(pods),
            "pods": pods,
            "nodes": [f"v100-{number:05d}" for number in range(len(pods))],
            "planId": "x",
            "since": "2026-01-01T00:00:00Z",
        },
    }


def a_plan(job: str, pods: list[str]) -> Plan:
    """The first plan of a launch."""
    ranks = [
        Rank(rank=number, pod=name, address=f"10.0.0.{number}", gpu_type="v100")
        for number, name in enumerate(pods)
    ]
    return Plan(job=job, epoch=1, launch=1, directive=Directive.RUN, ranks=tuple(ranks))


def pod(index: int, job: int, number: int) -> dict[str, Any]:
    """A trainer pod that runs, as the API server has it."""
    rank = str(number)
    name = objects.job(job)["metadata"]["name"]
    item = part(f"{name}-1-{rank}", name)
    item["metadata"]["labels"] |= {LAUNCH_LABEL: "1", RANK_LABEL: rank}
    environment = [{"name": f"BALLAST_{n}", "value": f"value-{n}"} for n in range(10)]
    resources = {part: {objects.GPU: "1", "cpu": "4", "memory": "32Gi"} for part in ("limits", "requests")}
    item["spec"] = {
        "nodeName": f"v100-{index % 1000:05d}",
        "serviceAccountName": f"{name}-trainer",
        "containers": [
            {
                "name": "trainer",
                "image": "ballast.example/trainer:1",
                "env": environment,
                "resources": resources,
            }
        ],
        "tolerations": [{"key": f"node.kubernetes.io/{n}", "operator": "Exists"} for n in range(3)],
        "volumes": [{"name": "token", "projected": {"sources": [{}, {}, {}]}}],
    }
    item["status"] = {
        "phase": "Running",
        "podIP": f"10.{index >> 16}.{index >> 8 & 255}.{index & 255}",
        "conditions": [
            {"type": kind, "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
            for kind in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
        ],
        "containerStatuses": [
            {"name": "trainer", "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}
        ],
    }
    return item


def resident_mib() -> float:
    """Resident memory of this process now."""
    gc.collect()
    text = Path("/proc/self/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0]) / 1024


if __name__ == "__main__":
    main()
