"""What can go wrong with the control plane, the operators, what lies between, and what people do."""

import signal

from ballast_policies.contract.messages import lease_name, plan_config_map_name

from tests.chaos.processes import hostile
from tests.chaos.processes.cluster import API_SERVER, CONTROLLERS, ETCD, NAMESPACE, REPLICAS, SCHEDULER
from tests.chaos.processes.episode import Episode
from tests.chaos.processes.jobs import PATH, Job
from tests.chaos.processes.kinds import CORE, kind, node_of, replica_of, seconds_of

QUOTA = {
    "apiVersion": "v1",
    "kind": "ResourceQuota",
    "metadata": {"name": "chaos"},
    "spec": {"hard": {"pods": "0"}},
}


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
            episode.stop_for(part, seconds_of(number, longest))
        else:
            episode.cluster.kill(part)


@kind("leader killed")
def _(episode: Episode, number: int) -> None:
    episode.cluster.kill(episode.leader() or replica_of(number))


@kind("both operators killed")
def _(episode: Episode, number: int) -> None:
    for name in REPLICAS:
        episode.cluster.kill(name)


@kind("leader stopped")
def _(episode: Episode, number: int) -> None:
    episode.stop_for(episode.leader() or replica_of(number), seconds_of(number, 12))


@kind("solver killed")
def _(episode: Episode, number: int) -> None:
    for pid in episode.cluster.children(episode.leader() or replica_of(number)):
        episode.cluster.signal_process(pid, signal.SIGKILL)


@kind("solver stopped")
def _(episode: Episode, number: int) -> None:
    for pid in episode.cluster.children(episode.leader() or replica_of(number)):
        episode.stop_process_for(pid, seconds_of(number, 15))


@kind("quota is full")
def _(episode: Episode, number: int) -> None:
    path = f"{CORE}/resourcequotas"
    episode.cluster.call("POST", path, QUOTA)
    episode.later(seconds_of(number, 10), lambda: episode.delete(f"{path}/chaos"))


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
        episode.later(seconds_of(number, 10), lambda plural=plural: episode.delete(f"{group}/{plural}/chaos"))
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
    episode.later(seconds_of(number, 8), undo)


@kind("hostile TrainingJob")
def _(episode: Episode, number: int) -> None:
    """Refused, or it ends at that job; deleted after a while."""
    job = Job("single", number, 50, episode.cluster.folder / "hostile")
    name, text = hostile.manifest(number, job)
    episode.cluster.create(PATH, text)
    path = f"{PATH}/{name}"
    episode.later(seconds_of(number, 15), lambda: episode.delete(path))


for code in (409, 410, 429, 500, 504):

    @kind(f"half of the requests answered by {code}")
    def _(episode: Episode, number: int, code: int = code) -> None:
        episode.trouble(replica_of(number), "refused", seconds_of(number, 8), status=code)


for what, field, longest in (
    ("answers lost", "lost", 4),
    ("connections cut", "away", 10),
    ("requests not answered", "silent", 8),
    ("watches stalled", "stalled", 25),
):

    @kind(what)
    def _(episode: Episode, number: int, field: str = field, longest: int = longest) -> None:
        episode.trouble(replica_of(number), field, seconds_of(number, longest))


@kind("API server slow")
def _(episode: Episode, number: int) -> None:
    episode.trouble(replica_of(number), "slow", seconds_of(number, 10), delay=0.2 + number % 3)


@kind("watches dropped")
def _(episode: Episode, number: int) -> None:
    episode.trouble(replica_of(number), "broken", 0.0)


@kind("watches answered by 410")
def _(episode: Episode, number: int) -> None:
    episode.trouble(replica_of(number), "gone", 1.0)
    episode.trouble(replica_of(number), "broken", 0.0)


@kind("API server stopped, operators killed and a node lost at once")
def _(episode: Episode, number: int) -> None:
    """Fresh operators find no API server, and then a cluster of which a part has gone without a word."""
    episode.stop_for(API_SERVER, seconds_of(number, 9))
    for name in REPLICAS:
        episode.cluster.kill(name)
    episode.stop_for(episode.cluster.agent(node_of(number)), 20.0)


@kind("etcd killed, leader stopped and trainer killed at once")
def _(episode: Episode, number: int) -> None:
    """Whoever leads next learns of the trainer's end late."""
    leader = episode.leader() or replica_of(number)
    if pid := episode.rank(number):
        episode.cluster.signal_process(pid, signal.SIGKILL)
    episode.stop_for(leader, seconds_of(number, 12))
    episode.cluster.kill(ETCD)


@kind("watches stalled, leader killed and a node's agent killed at once")
def _(episode: Episode, number: int) -> None:
    """The follower takes over with what it knew before."""
    leader = episode.leader() or replica_of(number)
    for name in REPLICAS:
        episode.trouble(name, "stalled", seconds_of(number, 10))
    episode.cluster.kill(episode.cluster.agent(node_of(number)))
    episode.cluster.kill(leader)
