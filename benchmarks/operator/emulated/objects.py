"""Nodes, jobs and a ClusterPolicy of a large cluster, as the API server has them."""

from collections.abc import Mapping
from typing import Any

from ballast_operator.kube.kinds import JOB

GPU = "nvidia.com/gpu"
POOL_LABEL = "ballast.dev/pool"
GPUS_PER_NODE = 8

TYPES: Mapping[str, float] = {"v100": 1.0, "p100": 0.55, "k80": 0.3, "a100": 2.2}
"""GPU type -> speed; every pool has one type."""

SCARCE = "scarce"
"""A GPU type of which there is one node with four GPUs: nearly all jobs that want it wait."""

MODELS = ("gpt", "resnet", "bert", "recommender", "recurrent")


def node(index: int, *, gpus: int = GPUS_PER_NODE) -> dict[str, Any]:
    """The ``index``-th node; pools take turns."""
    pool = list(TYPES)[index % len(TYPES)]
    amount = {GPU: str(gpus), "cpu": "64", "memory": "512Gi", "pods": "110"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": f"{pool}-{index:05d}",
            "labels": {POOL_LABEL: pool, "kubernetes.io/hostname": f"{pool}-{index:05d}"},
        },
        "spec": {},
        "status": {
            "capacity": amount,
            "allocatable": amount,
            "conditions": [
                {"type": "Ready", "status": "True", "reason": "Emulated", "message": "no kubelet"}
            ],
        },
    }


def scarce_node() -> dict[str, Any]:
    """The one node of the scarce type."""
    item = node(0, gpus=4)
    item["metadata"] = {"name": "scarce-0", "labels": {POOL_LABEL: SCARCE}}
    return item


def waiting_job(index: int, *, prefix: str = "waits") -> dict[str, Any]:
    """A job for all GPUs of the scarce type."""
    item = job(index, stages=4, prefix=prefix)
    item["spec"]["gpuTypes"] = [SCARCE]
    item["spec"]["throughput"] = [{"gpuType": SCARCE, "stages": 4, "stepsPerSecond": 0.1 + index % 7 / 10}]
    return item


def some_status(item: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """(path, merge patch) of a status as a job that waits has it."""
    known = {"status": "False", "lastTransitionTime": "2026-01-01T00:00:00Z", "observedGeneration": 1}
    conditions = [
        {**known, "type": kind, "reason": "WaitingForCapacity", "message": "no GPUs of its type are free"}
        for kind in ("Admitted", "Running")
    ]
    path = JOB.path(item["metadata"]["namespace"], item["metadata"]["name"], "status")
    return path, {"status": {"conditions": conditions, "observedGeneration": 1, "state": "Waiting"}}


def fitting_job(index: int, *, prefix: str) -> dict[str, Any]:
    """A job for one GPU of a type that has room."""
    return job(index, stages=1, prefix=prefix)


def account(job: str) -> dict[str, Any]:
    """A service account for the pod of a job."""
    return {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": f"{job}-trainer"}}


def pod(job: str) -> dict[str, Any]:
    """The one pod of a job, on a node already."""
    trainer = {"name": "trainer", "image": "ballast.example/trainer:1"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"{job}-0"},
        "spec": {
            "containers": [trainer],
            "nodeName": node(0)["metadata"]["name"],
            "serviceAccountName": f"{job}-trainer",
        },
    }


def policy(
    name: str = "scale", *, objective: str = "max-min-fairness", round_seconds: int = 60
) -> dict[str, Any]:
    """A ClusterPolicy over one pool for each GPU type."""
    return {
        "apiVersion": "ballast.dev/v1alpha1",
        "kind": "ClusterPolicy",
        "metadata": {"name": name},
        "spec": {
            "objective": {"policy": objective},
            "roundSeconds": round_seconds,
            "moves": {"minRunSeconds": 3600, "maxMovesPerHour": 3600},
            "nodePools": [
                {
                    "name": kind,
                    "gpuType": kind,
                    "nodeSelector": {POOL_LABEL: kind},
                    "pricePerGpuHour": 2.0 * speed,
                }
                for kind, speed in {**TYPES, SCARCE: 1.0}.items()
            ],
        },
    }


def job(
    index: int, *, namespace: str = "default", stages: int | None = None, prefix: str = "job"
) -> dict[str, Any]:
    """The ``index``-th job: five models, gangs of 1 to 8, speeds that differ by job and GPU type."""
    gang = stages if stages is not None else (1, 2, 4, 8)[index % 4]
    model = MODELS[index % len(MODELS)]
    jitter = 1.0 + (index * 7919 % 1000) / 5000
    known = [
        {"gpuType": kind, "stages": gang, "stepsPerSecond": round(speed**jitter * gang * 0.4, 4)}
        for kind, speed in TYPES.items()
    ]
    return {
        "apiVersion": "ballast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": f"{prefix}-{index:05d}", "namespace": namespace},
        "spec": {
            "totalSteps": 100_000,
            "model": {"name": "mlp", "layers": 16, "args": {"size": 64 + MODELS.index(model)}},
            "pipeline": {"minStages": gang, "maxStages": gang, "microbatches": 8, "globalBatchSize": 64},
            "checkpoint": {"path": "/checkpoints", "everySteps": 500},
            "throughput": known,
            "template": {"spec": {"containers": [{"name": "trainer", "image": "ballast.example/trainer:1"}]}},
        },
    }
