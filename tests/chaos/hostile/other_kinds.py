"""Hostile objects that are no TrainingJobs, and objects of others that look like a job's."""

from typing import Any

from ballast_policies.contract import (
    GPU_RESOURCE,
    JOB_LABEL,
    LAUNCH_LABEL,
    PLAN_KEY,
    RANK_LABEL,
    lease_name,
    plan_config_map_name,
    pod_name,
)

from tests.chaos.hostile.author import BALLAST, TEXTS, TIMES, Author, Hostile, kind
from tests.chaos.hostile.jobs import NAMESPACE, POOL_LABEL

POLICIES_PATH = "/apis/ballast.dev/v1alpha1/clusterpolicies"
GATE = {"schedulingGates": [{"name": "example.com/never"}]}
"""A pod with it is bound by nobody."""


@kind("ClusterPolicy")
def _(author: Author, number: int) -> Hostile:
    rng = author.rng
    pool = {"name": "fast", "nodeSelector": {POOL_LABEL: "fast"}, "gpuType": "fast"}
    changes: dict[str, Any] = {
        "roundSeconds": rng.choice([0, 1, 86_400]),
        "nodePools": rng.choice([[], [pool, pool], [pool], [{**pool, "pricePerGpuHour": 1e308}]]),
        "objective": {"policy": rng.choice(["min-cost", "os:system", "hierarchical"])},
        "budgets": {"x" * 200: {"amount": 5e-324}},
        "tenants": {"namespaces": {NAMESPACE: {"maxGpus": 0}}},
        "dryRun": True,
    }
    chosen = {name: changes[name] for name in rng.sample(sorted(changes), rng.randint(1, 2))}
    item = {
        "apiVersion": BALLAST,
        "kind": "ClusterPolicy",
        "metadata": {"name": f"hostile-{number}", "annotations": author.annotations()},
        "spec": {"nodePools": [pool], **chosen},
    }
    status = {
        "bill": [{"pool": "fast", "since": TIMES[0], "gpus": 2**53, "cost": 1e308, "heldCost": 1e308}],
        "billAt": rng.choice(TIMES),
        "teams": [{"team": "x", "since": TIMES[0], "cost": 1e308, "costPerHour": 1e308}],
        "shadowPrices": {"fast": -1e308},
    }
    return author.other("ClusterPolicy", POLICIES_PATH, item, status=status, answered=True)


@kind("Node")
def _(author: Author, number: int) -> Hostile:
    """Cordoned, or of no pool: what says that it is ready and open gets pods, whoever wrote it."""
    rng = author.rng
    labels = {
        POOL_LABEL: rng.choice(["fast", "slow", "none"]),
        "nvidia.com/gpu.product": "x" * 63,
        "nvidia.com/gpu.memory": "9" * 60,
        "nvidia.com/gpu.replicas": rng.choice(["0", "9" * 30, "x"]),
        "topology.kubernetes.io/zone": "z",
        "karpenter.sh/capacity-type": rng.choice(["spot", "x"]),
    }
    gpus = rng.choice(["9223372036854775807", "1e18", "0", "7"])
    taints = [{"key": f"example.com/{n}", "value": "x", "effect": "NoSchedule"} for n in range(50)]
    ready = [{"type": "Ready", "status": "True", "reason": "x", "message": "y"}]
    item = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": f"hostile-{number}",
            "labels": labels,
            "annotations": author.annotations(),
        },
        "spec": {"unschedulable": True, "taints": rng.choice([[], taints])},
    }
    status = {"capacity": {GPU_RESOURCE: gpus}, "allocatable": {GPU_RESOURCE: gpus}, "conditions": ready}
    return author.other("Node", "/api/v1/nodes", item, status=status)


def _metadata(author: Author, name: str) -> dict[str, Any]:
    """Labels as those of an ordinary job's objects."""
    labels = {
        JOB_LABEL: author.victim(),
        LAUNCH_LABEL: author.rng.choice(["1", "x", "9" * 60]),
        RANK_LABEL: author.rng.choice(["0", "", "9" * 60]),
    }
    return {"name": name, "namespace": NAMESPACE, "labels": labels, "annotations": author.annotations()}


@kind("Pod with the labels of an ordinary job")
def _(author: Author, number: int) -> Hostile:
    container = {"name": "c", "image": "i", "resources": {"limits": {GPU_RESOURCE: "1000000"}}}
    item = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": _metadata(author, f"hostile-{number}"),
        "spec": {**GATE, "containers": [container]},
    }
    return author.other(
        "Pod with the labels of an ordinary job", f"/api/v1/namespaces/{NAMESPACE}/pods", item
    )


@kind("Lease with the labels of an ordinary job")
def _(author: Author, number: int) -> Hostile:
    item = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": _metadata(author, f"hostile-{number}"),
        "spec": {"holderIdentity": "x", "leaseDurationSeconds": 2**31 - 1, "renewTime": None},
    }
    path = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
    return author.other("Lease with the labels of an ordinary job", path, item)


@kind("ConfigMap with the labels of an ordinary job")
def _(author: Author, number: int) -> Hostile:
    data = {PLAN_KEY: author.rng.choice(TEXTS), "x" * 253: "y"}
    item = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(author, f"hostile-{number}"),
        "data": data,
    }
    path = f"/api/v1/namespaces/{NAMESPACE}/configmaps"
    return author.other("ConfigMap with the labels of an ordinary job", path, item)


def in_the_way(author: Author, job: Hostile) -> Hostile:
    """An object of somebody else that has a name which the job needs."""
    metadata = {"namespace": NAMESPACE, "labels": {JOB_LABEL: job.name}}
    group, version = "rbac.authorization.k8s.io", f"namespaces/{NAMESPACE}"
    role = {"apiGroup": group, "kind": "Role", "name": "all"}
    choices: dict[str, tuple[str, str, str, dict[str, Any]]] = {
        "Lease": (
            "coordination.k8s.io/v1",
            "leases",
            lease_name(job.name),
            {"spec": {"holderIdentity": "x"}},
        ),
        "ConfigMap": ("v1", "configmaps", plan_config_map_name(job.name), {"data": {PLAN_KEY: "{}"}}),
        "ServiceAccount": ("v1", "serviceaccounts", f"{job.name}-trainer", {}),
        "Role": (f"{group}/v1", "roles", f"{job.name}-trainer", {"rules": []}),
        "RoleBinding": (
            f"{group}/v1",
            "rolebindings",
            f"{job.name}-trainer",
            {"roleRef": role, "subjects": []},
        ),
        "Pod": (
            "v1",
            "pods",
            pod_name(job.name, 1, 0),
            {"spec": {**GATE, "containers": [{"name": "c", "image": "i"}]}},
        ),
    }
    name = author.rng.choice(sorted(choices))
    api, plural, own, content = choices[name]
    item = {"apiVersion": api, "kind": name, "metadata": {**metadata, "name": own}, **content}
    root = "/api/v1" if api == "v1" else f"/apis/{api}"
    return author.other(f"{name} with a name that a job needs", f"{root}/{version}/{plural}", item)
