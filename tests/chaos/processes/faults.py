"""What can go wrong with processes: each kind is a function of the episode and a number that chooses."""

import contextlib
import os
import resource
import signal
from collections.abc import Callable
from typing import Any

from ballast_localcluster.rest import CallError
from ballast_policies.contract import lease_name, plan_config_map_name

from tests.chaos.processes import hostile
from tests.chaos.processes.cluster import (
    API_SERVER,
    CONTROLLERS,
    ETCD,
    NAMESPACE,
    NODES,
    REPLICAS,
    SCHEDULER,
)
from tests.chaos.processes.episode import Episode
from tests.chaos.processes.jobs import PATH, Job
from tests.operator.loops.hostile.test_lies import LIES

Apply = Callable[[Episode, int], None]
KINDS: dict[str, Apply] = {}
"""Name -> what it does. It may be refused by an API server that is away: then nothing has happened."""

CORE = f"/api/v1/namespaces/{NAMESPACE}"
TAINT = {"key": "maintenance", "value": "chaos", "effect": "NoSchedule"}
QUOTA = {
    "apiVersion": "v1",
    "kind": "ResourceQuota",
    "metadata": {"name": "chaos"},
    "spec": {"hard": {"pods": "0"}},
}


def kind(name: str) -> Callable[[Apply], Apply]:
    def register(apply: Apply) -> Apply:
        KINDS[name] = apply
        return apply

    return register


def _node(number: int) -> str:
    return sorted(NODES)[number % len(NODES)]


def _replica(number: int) -> str:
    return REPLICAS[number % len(REPLICAS)]


def _seconds(number: int, longest: int) -> float:
    """1 to ``longest``."""
    return 1.0 + (number // 10) % longest


for what, part, longest in (
    ("API server killed", API_SERVER, 0),
    ("etcd killed", ETCD, 0),
    ("scheduler killed", SCHEDULER, 0),
    ("controller manager killed", CONTROLLERS, 0),
    ("API server stopped", API_SERVER, 9),
    ("etcd stopped", ETCD, 6),
    ("scheduler stopped", SCHEDULER, 8),
    ("controller manager stopped", CONTROLLERS, 8),
):

    @kind(what)
    def _(episode: Episode, number: int, part: str = part, longest: int = longest) -> None:
        if longest:
            episode.stop_for(part, _seconds(number, longest))
        else:
            episode.cluster.kill(part)


@kind("leader killed")
def _(episode: Episode, number: int) -> None:
    episode.cluster.kill(episode.leader() or _replica(number))


@kind("both operators killed")
def _(episode: Episode, number: int) -> None:
    for name in REPLICAS:
        episode.cluster.kill(name)


@kind("leader stopped")
def _(episode: Episode, number: int) -> None:
    episode.stop_for(episode.leader() or _replica(number), _seconds(number, 12))


@kind("solver killed")
def _(episode: Episode, number: int) -> None:
    for pid in episode.cluster.children(episode.leader() or _replica(number)):
        episode.cluster.signal_process(pid, signal.SIGKILL)


@kind("solver stopped")
def _(episode: Episode, number: int) -> None:
    for pid in episode.cluster.children(episode.leader() or _replica(number)):
        episode.stop_process_for(pid, _seconds(number, 15))


@kind("node agent killed")
def _(episode: Episode, number: int) -> None:
    episode.cluster.kill(episode.cluster.agent(_node(number)))


@kind("node agent stopped")
def _(episode: Episode, number: int) -> None:
    """Up to long enough for the node to be NotReady and its pods to be evicted."""
    episode.stop_for(episode.cluster.agent(_node(number)), _seconds(number, 30))


@kind("node flaps")
def _(episode: Episode, number: int) -> None:
    agent = episode.cluster.agent(_node(number))
    episode.cluster.kill(agent)
    episode.later(4.0, lambda: episode.cluster.kill(agent))


@kind("node deleted")
def _(episode: Episode, number: int) -> None:
    name = _node(number)
    episode.cluster.call("DELETE", f"/api/v1/nodes/{name}")
    episode.later(_seconds(number, 8), lambda: episode.register(name))


@kind("node cordoned")
def _(episode: Episode, number: int) -> None:
    _change_node(episode, number, {"spec": {"unschedulable": True}}, {"spec": {"unschedulable": None}})


@kind("node relabelled")
def _(episode: Episode, number: int) -> None:
    back = {"metadata": {"labels": {"ballast.dev/pool": NODES[_node(number)][0]}}}
    _change_node(episode, number, {"metadata": {"labels": {"ballast.dev/pool": "another"}}}, back)


@kind("node tainted")
def _(episode: Episode, number: int) -> None:
    path = f"/api/v1/nodes/{_node(number)}"
    taints = [*episode.cluster.call("GET", path)["spec"].get("taints", []), TAINT]
    episode.cluster.merge(path, {"spec": {"taints": taints}})
    episode.later(_seconds(number, 12), lambda: episode.insist(lambda: _remove_taint(episode, path)))


def _remove_taint(episode: Episode, path: str) -> None:
    node = episode.cluster.call("GET", path)
    taints = [taint for taint in node["spec"].get("taints", []) if taint["key"] != TAINT["key"]]
    version = {"resourceVersion": node["metadata"]["resourceVersion"]}
    episode.cluster.merge(path, {"metadata": version, "spec": {"taints": taints}})


def _change_node(episode: Episode, number: int, patch: dict[str, Any], back: dict[str, Any]) -> None:
    path = f"/api/v1/nodes/{_node(number)}"
    episode.cluster.merge(path, patch)
    undo = lambda: episode.insist(lambda: episode.cluster.merge(path, back))  # noqa: E731
    episode.later(_seconds(number, 12), undo)


@kind("pod deleted by someone")
def _(episode: Episode, number: int) -> None:
    if pod := episode.pod(number):
        episode.cluster.call("DELETE", f"{CORE}/pods/{pod}")


@kind("pod evicted")
def _(episode: Episode, number: int) -> None:
    if pod := episode.pod(number):
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
        episode.cluster.call("POST", f"{CORE}/pods/{pod}/eviction", body)


@kind("trainer killed")
def _(episode: Episode, number: int) -> None:
    """As the kernel does where memory is short: exit code 137."""
    if pid := episode.rank(number):
        episode.cluster.signal_process(pid, signal.SIGKILL)


@kind("trainer told to end")
def _(episode: Episode, number: int) -> None:
    if pid := episode.rank(number):
        episode.cluster.signal_process(pid, signal.SIGTERM)


@kind("trainer hangs")
def _(episode: Episode, number: int) -> None:
    """Longer than its peers and the operator wait, or shorter."""
    if pid := episode.rank(number):
        episode.stop_process_for(pid, _seconds(number, 40))


@kind("disk full")
def _(episode: Episode, number: int) -> None:
    """Files of more than 8 kB cannot be written by one rank."""
    pid = episode.rank(number)
    if pid and pid in episode.cluster.own_processes():
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (8_192, resource.RLIM_INFINITY))
            episode.later(_seconds(number, 10), lambda: _unlimited(pid))


def _unlimited(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@kind("checkpoint storage away")
def _(episode: Episode, number: int) -> None:
    """The folder of a job is a file for a while: nothing can be read or written there."""
    job = episode.job(number)
    away = job.checkpoints.with_name(job.name + ".away")
    if not job.checkpoints.is_dir() or away.exists():
        return
    os.rename(job.checkpoints, away)  # noqa: PTH104 - at once
    job.checkpoints.write_text("no folder")

    def back() -> None:
        job.checkpoints.unlink(missing_ok=True)
        os.rename(away, job.checkpoints)  # noqa: PTH104

    episode.later(_seconds(number, 10), back)


for name, (annotation, text) in LIES.items():
    if name == "an epoch of the future":
        continue  # a true acknowledgement never follows it: the liar's own job restarts by time-outs

    @kind(f"trainer says {name}")
    def _(episode: Episode, number: int, annotation: str = annotation, text: str = text) -> None:
        patch = {"metadata": {"annotations": {annotation: text}}}
        path = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/"
        episode.cluster.merge(path + lease_name(episode.job(number).name), patch)


@kind("quota is full")
def _(episode: Episode, number: int) -> None:
    path = f"{CORE}/resourcequotas"
    episode.cluster.call("POST", path, QUOTA)
    episode.later(_seconds(number, 10), lambda: episode.delete(f"{path}/chaos"))


@kind("admission refuses pods")
def _(episode: Episode, number: int) -> None:
    """A policy of the cluster that its administrator has got wrong, for a while."""
    group, rule = "/apis/admissionregistration.k8s.io/v1", {"apiGroups": [""], "apiVersions": ["v1"]}
    meta = {"apiVersion": "admissionregistration.k8s.io/v1", "metadata": {"name": "chaos"}}
    pods = {"resourceRules": [{**rule, "operations": ["CREATE"], "resources": ["pods"]}]}
    only = {"matchLabels": {"kubernetes.io/metadata.name": NAMESPACE}}
    policy = {
        **meta,
        "kind": "ValidatingAdmissionPolicy",
        "spec": {"matchConstraints": pods, "validations": [{"expression": "false"}]},
    }
    binding = {
        **meta,
        "kind": "ValidatingAdmissionPolicyBinding",
        "spec": {
            "policyName": "chaos",
            "validationActions": ["Deny"],
            "matchResources": {"namespaceSelector": only},
        },
    }
    names = ("validatingadmissionpolicies", "validatingadmissionpolicybindings")
    for plural in names:
        episode.later(_seconds(number, 10), lambda plural=plural: episode.delete(f"{group}/{plural}/chaos"))
    for plural, body in zip(names, (policy, binding), strict=True):
        episode.cluster.call("POST", f"{group}/{plural}", body)


def _owned(job: Job) -> dict[str, str]:
    leases = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
    roles = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/roles"
    return {
        "plan": f"{CORE}/configmaps/{plan_config_map_name(job.name)}",
        "lease": f"{leases}/{lease_name(job.name)}",
        "role": f"{roles}/{job.name}-trainer",
        "service account": f"{CORE}/serviceaccounts/{job.name}-trainer",
    }


for lost in ("plan", "lease", "role", "service account"):

    @kind(f"{lost} deleted")
    def _(episode: Episode, number: int, lost: str = lost) -> None:
        episode.cluster.call("DELETE", _owned(episode.job(number))[lost])


@kind("leader's Lease taken")
def _(episode: Episode, number: int) -> None:
    """As a third replica would that then dies."""
    path = "/apis/coordination.k8s.io/v1/namespaces/ballast-system/leases/ballast-operator"
    episode.cluster.merge(path, {"spec": {"holderIdentity": "another", "leaseDurationSeconds": 2}})


@kind("job suspended and resumed")
def _(episode: Episode, number: int) -> None:
    path = f"{PATH}/{episode.job(number).name}"
    episode.cluster.merge(path, {"spec": {"suspend": True}})
    undo = lambda: episode.insist(  # noqa: E731
        lambda: episode.cluster.merge(path, {"spec": {"suspend": False}})
    )
    episode.later(_seconds(number, 8), undo)


@kind("hostile TrainingJob")
def _(episode: Episode, number: int) -> None:
    """Refused, or it ends at that job; deleted after a while."""
    job = Job("single", number, 50, episode.cluster.folder / "hostile")
    name, text = hostile.manifest(number, job)
    episode.cluster.create(PATH, text)
    path = f"{PATH}/{name}"
    episode.later(_seconds(number, 15), lambda: episode.delete(path))


for code in (409, 410, 429, 500, 504):

    @kind(f"half of the requests answered by {code}")
    def _(episode: Episode, number: int, code: int = code) -> None:
        episode.trouble(_replica(number), "refused", _seconds(number, 8), status=code)


for what, field, longest in (
    ("answers lost", "lost", 4),
    ("connections cut", "away", 10),
    ("requests not answered", "silent", 8),
    ("watches stalled", "stalled", 25),
):

    @kind(what)
    def _(episode: Episode, number: int, field: str = field, longest: int = longest) -> None:
        episode.trouble(_replica(number), field, _seconds(number, longest))


@kind("API server slow")
def _(episode: Episode, number: int) -> None:
    episode.trouble(_replica(number), "slow", _seconds(number, 10), delay=0.2 + number % 3)


@kind("watches dropped")
def _(episode: Episode, number: int) -> None:
    episode.trouble(_replica(number), "broken", 0.0)


@kind("watches answered by 410")
def _(episode: Episode, number: int) -> None:
    episode.trouble(_replica(number), "gone", 1.0)
    episode.trouble(_replica(number), "broken", 0.0)


def apply(episode: Episode, what: str, number: int) -> bool:
    """Do it; False where the API server did not let it."""
    try:
        KINDS[what](episode, number)
    except CallError:
        return False
    return True
