"""GPUs: what nodes have, who uses them, and what is left.

A GPU is free when no pod that lives holds it and no launch that is written down counts on it.  A pod
that has been asked to go still holds its GPU; one that has ended does not.
"""

import dataclasses
import functools
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from typing import Any

from ballast_policies.contract.messages import JOB_LABEL
from ballast_policies.protocol.observed import held_pods
from ballast_policies.rounds.values import dedupe_shared_gpus
from ballast_policies.scheduling.gang_spec import job_id
from kubernetes.utils.quantity import parse_quantity

from ballast_operator.api.job_allocation import JobAllocation, is_coming
from ballast_operator.kube.caches import controlled_by_job, job_of
from ballast_operator.kube.kept_fields import pinned_node
from ballast_operator.kube.kinds import Key, Object
from ballast_operator.views.clock import Time, parse
from ballast_operator.views.node_constraints import GONE_KEYS, Taint, blocking, read_taints
from ballast_operator.views.notices import Leaving, read_leaving

REPLICAS = "nvidia.com/gpu.replicas"
"""Replicas of each GPU; 1: whole GPUs."""

STRATEGY = "nvidia.com/gpu.sharing-strategy"
"""``none``, ``time-slicing`` or ``mps``."""

PRODUCT = "nvidia.com/gpu.product"
SHARED_SUFFIX = "-SHARED"
"""Suffix of the product where GPUs are shared under the name of whole ones."""


def shared_gpus(labels: Mapping[str, str]) -> str:
    """Text on the sharing of the node's GPUs; empty: they are whole, or the node does not say.

    A gang must not be started there: the plugin may give two of its ranks the same GPU, which NCCL refuses
    (https://github.com/NVIDIA/nccl/issues/418), and speed, memory and cost would be those of a part of a GPU.
    """
    replicas, strategy = labels.get(REPLICAS, "1"), labels.get(STRATEGY, "none")
    several = replicas.isdecimal() and int(replicas) > 1
    if not several and strategy in ("", "none") and not labels.get(PRODUCT, "").endswith(SHARED_SUFFIX):
        return ""
    how = f"by {strategy}" if strategy not in ("", "none") else "by other pods"
    count = f", {replicas} replicas of each" if several else ""
    return f"its GPUs are shared {how}{count}, and ranks need whole GPUs"


MOST_GPUS = 1024
"""GPUs of one node. Where more are told of, its device plugin, or whoever wrote its status, is wrong."""

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A node.

    Attributes:
        closed: why nothing is started there, whatever it tolerates; empty: pods may be.
        taints: all of them; which ones matter depends on the pod.
        leaving: it is about to go.
        created: when it was made; None: not known.
        room: resource -> what pods of others leave of it to jobs: CPUs, bytes, pods; empty: not known.
        conditions: as ``type=status``.
    """

    name: str
    labels: Mapping[str, str]
    ready: bool
    allocatable: Mapping[str, str]
    closed: str = ""
    taints: tuple[Taint, ...] = ()
    leaving: Leaving | None = None
    created: Time | None = None
    room: Mapping[str, float] = dataclasses.field(default_factory=dict)
    conditions: frozenset[str] = frozenset()

    def gpus(self, resource: str) -> int:
        """GPUs of ``resource`` that it offers to pods; 0 where it says that it has impossibly many."""
        count = gpu_count(str(self.allocatable.get(resource, "0")))
        return count if count <= MOST_GPUS else 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PodNeed:
    """Resources that the pods of a gang ask of a node besides GPUs.

    Attributes:
        asks: resource -> amount for each pod, sorted: CPUs, bytes, and one of the node's pods.
        pods: of the gang.
        gpus_per_pod: of each.
    """

    asks: tuple[tuple[str, float], ...]
    pods: int = 1
    gpus_per_pod: int = 1


def read_node(item: Object, pods: Iterable[Object] = ()) -> NodeView:
    """A node from its JSON; ``pods``: those on it."""
    status, content = item.get("status") or {}, item.get("spec") or {}
    conditions = status.get("conditions") or []
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
    taints = read_taints(content)
    labels = item["metadata"].get("labels") or {}
    leaving = read_leaving(taints, conditions, item["metadata"].get("annotations") or {}, labels)
    gone = [str(taint) for taint in taints if taint.key in GONE_KEYS]
    closed = ""
    if not ready:
        closed = "not ready"
    elif leaving is not None:
        closed = f"about to go, by {leaving.by}"
    elif gone:
        closed = f"gone, by taint {gone[0]}"
    elif content.get("unschedulable", False):
        closed = "cordoned"
    elif impossible := _impossible(status.get("allocatable") or {}):
        closed = impossible
    else:
        closed = shared_gpus(labels)
    return NodeView(
        name=item["metadata"]["name"],
        labels=labels,
        ready=ready,
        allocatable=status.get("allocatable") or {},
        closed=closed,
        taints=taints,
        leaving=leaving,
        created=parse(item["metadata"]["creationTimestamp"])
        if "creationTimestamp" in item["metadata"]
        else None,
        room=_room(status.get("allocatable") or {}, pods),
        conditions=frozenset(f"{c['type']}={c.get('status')}" for c in conditions),
    )


def restarted(before: Object, after: Object) -> bool:
    """True if the machine was restarted between two versions of a node."""
    old, new = (((item.get("status") or {}).get("nodeInfo") or {}).get("bootID") for item in (before, after))
    return bool(old and new) and old != new


def closed_by_condition(nodes: Mapping[str, NodeView], sick: Iterable[str]) -> dict[str, NodeView]:
    """``nodes``, closed where a condition of ``sick``, a type that is True or ``type=status``, holds."""
    marks = frozenset(mark if "=" in mark else f"{mark}=True" for mark in sick)
    found = dict(nodes)
    for name, node in nodes.items():
        if not node.closed and not node.conditions.isdisjoint(marks):
            closed = f"sick, by condition {min(node.conditions & marks)}"
            found[name] = dataclasses.replace(node, closed=closed)
    return found


def _room(allocatable: Mapping[str, str], pods: Iterable[Object]) -> dict[str, float]:
    """Rest of what a node offers, beside pods that are no job's; without what cannot be read."""
    room = {
        name: amount for name, quantity in allocatable.items() if (amount := _amount(quantity)) < math.inf
    }
    for pod in pods:
        held = None if is_ours(pod) else held_of_node(pod)
        for name, amount in held[1].items() if held is not None else ():
            if name in room:
                room[name] -= amount
    return room


def held_of_node(pod: Object) -> tuple[str, dict[str, float]] | None:
    """(node that a pod is on, resource -> what it holds of it); None: it waits for a node, or has ended."""
    content = pod.get("spec") or {}
    node = content.get("nodeName")
    return (node, pod_requests(content)) if node and _lives(pod) else None


@functools.lru_cache(maxsize=1024)
def gpu_count(quantity: str) -> int:
    """GPUs in a Kubernetes quantity such as "8" or "2k"; 0, with a warning, where it cannot be read."""
    try:
        count = int(parse_quantity(quantity))
        if count > MOST_GPUS:
            logger.warning("%s GPUs are more than a node can have: %d", quantity, MOST_GPUS)
        return min(count, MOST_GPUS + 1)
    except (ValueError, ArithmeticError):
        logger.warning("quantity %r of GPUs cannot be read and counts as 0", quantity)
        return 0


def _impossible(allocatable: Mapping[str, str]) -> str:
    """Text on an impossible number of GPUs of a node; empty: it is possible."""
    for name, quantity in allocatable.items():
        if "gpu" in name and gpu_count(str(quantity)) > MOST_GPUS:
            return f"said to have {str(quantity)[:40]} of {name}, more than {MOST_GPUS}"
    return ""


def pod_gpus(pod: Object, resource: str) -> int:
    """GPUs that a pod holds."""
    found = _together(pod.get("spec") or {}, lambda container: _container_gpus(container, resource))
    return int(found)


def _together(content: Object, asked: Callable[[Object], float]) -> float:
    """Amount that a pod holds: the most that its containers ask for together, or before them one by one.

    Init containers run one after another before the others, except those that are restarted: they stay
    (https://kubernetes.io/docs/concepts/workloads/pods/init-containers/#resource-sharing-within-containers).
    """
    staying = most = 0.0
    for container in content.get("initContainers") or []:
        amount = asked(container)
        if container.get("restartPolicy") == "Always":
            staying += amount
            most = max(most, staying)
        else:
            most = max(most, staying + amount)
    return max(most, staying + sum(asked(container) for container in content.get("containers") or []))


def _container_gpus(container: Object, resource: str) -> int:
    resources = container.get("resources") or {}
    wanted = (resources.get("limits") or {}).get(resource) or (resources.get("requests") or {}).get(resource)
    return gpu_count(str(wanted or "0"))


def pod_requests(content: Object) -> dict[str, float]:
    """Resource -> what a pod with this spec asks of its node: CPUs, bytes, and one of its pods.

    A limit without a request is one; what is stated for the whole pod counts before its containers', and the
    overhead of its runtime class is added, as kube-scheduler adds it.
    """
    containers = [*(content.get("initContainers") or []), *(content.get("containers") or [])]
    asked = {id(container): _asked(container) for container in containers}

    def held(name: str) -> float:
        return _together(content, lambda container: asked[id(container)].get(name, 0.0))

    found = {name: held(name) for each in asked.values() for name in each}
    found |= _asked(content)
    for name, quantity in (content.get("overhead") or {}).items():
        found[name] = found.get(name, 0.0) + _finite(quantity)
    return {**found, "pods": 1.0}


def _asked(content: Object) -> dict[str, float]:
    resources = content.get("resources") or {}
    stated = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {name: _finite(quantity) for name, quantity in stated.items()}


def _finite(quantity: Any) -> float:
    """A quantity; 0 where it cannot be read, which the API server does not store."""
    return amount if (amount := _amount(quantity)) < math.inf else 0.0


@functools.lru_cache(maxsize=8192)
def _amount(quantity: Any) -> float:
    """A Kubernetes quantity as a number; infinite where it cannot be read."""
    try:
        amount = float(parse_quantity(str(quantity)))
    except (ValueError, ArithmeticError):
        return math.inf
    return amount if amount >= 0 else math.inf


def is_ours(pod: Object) -> bool:
    """It carries a job's label, and that job controls it: a label alone can be anybody's."""
    job = job_of(pod)
    return job is not None and controlled_by_job(pod, job[1])


REGION_LABELS = ("topology.kubernetes.io/region", "failure-domain.beta.kubernetes.io/region")
ZONE_LABELS = ("topology.kubernetes.io/zone", "failure-domain.beta.kubernetes.io/zone")
"""Labels of nodes; the second one is that of old clusters."""


def region_of(labels: Mapping[str, str]) -> str:
    """The region that labels name; empty: none."""
    return next((labels[name] for name in REGION_LABELS if labels.get(name)), "")


def zone_of(labels: Mapping[str, str]) -> str:
    """The zone that labels name; empty: none."""
    return next((labels[name] for name in ZONE_LABELS if labels.get(name)), "")


def _lives(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")


def foreign_use(pods: Iterable[Object], resource: str) -> Counter[str]:
    """Node -> GPUs that pods of others hold."""
    used: Counter[str] = Counter()
    for pod in pods:
        if not is_ours(pod) and _lives(pod):
            node = (pod.get("spec") or {}).get("nodeName")
            if node:
                used[node] += pod_gpus(pod, resource)
    return used


STUCK_SECONDS = 60.0
"""Seconds after a pod is to have ended until nobody waits for its GPUs any more."""


STUCK_FIX = "see the kubelet of their nodes; once their processes are gone, kubectl delete pod --force"


def stuck_pods(pods: Iterable[Object], held: Set[Key], now: Time) -> list[Object]:
    """Pods of jobs that were to have ended a while ago and hold GPUs still: their node or its runtime hangs.

    ``held``: pods that running gangs count as theirs.
    """
    return [
        pod
        for pod in pods
        if (by := (metadata := pod["metadata"]).get("deletionTimestamp"))
        and is_ours(pod)
        and _lives(pod)
        and (pod.get("spec") or {}).get("nodeName")
        and (metadata["namespace"], metadata["name"]) not in held
        and (now - parse(by)).total_seconds() > STUCK_SECONDS
    ]


def orphans(pods: Iterable[Object], resources: Iterable[str]) -> list[str]:
    """Pods with a job's label and no job that hold GPUs: what ``kubectl delete --cascade=orphan`` leaves."""
    kinds = set(resources)
    return sorted(
        f"{metadata.get('namespace', '')}/{metadata['name']}"
        for pod in pods
        if JOB_LABEL in ((metadata := pod["metadata"]).get("labels") or {})
        and not is_ours(pod)
        and _lives(pod)
        and (pod.get("spec") or {}).get("nodeName")
        and any(pod_gpus(pod, kind) for kind in kinds)
    )


def own_use(
    pods: Iterable[Object], allocations: Mapping[Key, JobAllocation], resource: str, *, but: Key
) -> Counter[str]:
    """Node -> GPUs that pods of jobs hold, or that written launches other than ``but``'s count on."""
    used: Counter[str] = Counter()
    alive: defaultdict[Key, set[str]] = defaultdict(set)
    for pod in pods:
        job = job_of(pod)
        if job is None or not is_ours(pod) or not _lives(pod):
            continue
        alive[job].add(pod["metadata"]["name"])
        if node := pinned_node(pod):
            used[node] += pod_gpus(pod, resource)
    for key, gang in allocations.items():
        if key == but:
            continue
        # A pod's end counts once it is written: until then its job pays.
        for name in held_pods(gang.pods, alive=alive[key], ended=gang.ended) - alive[key]:
            used[gang.node_of[name]] += gang.gpus_per_pod
    return used


def shortage(
    wanted: Iterable[str],
    *,
    key: Key,
    nodes: Mapping[str, NodeView],
    pods: Iterable[Object],
    allocations: Mapping[Key, JobAllocation],
    resource: str,
    tolerations: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Reason that a gang of ``key`` cannot be on ``wanted`` now, a node a GPU, as text; empty: it can."""
    pods = list(pods)
    taken = foreign_use(pods, resource) + own_use(pods, allocations, resource, but=key)
    for name, count in sorted(Counter(wanted).items()):
        if is_coming(name):
            continue  # its pods wait for it
        node = nodes.get(name)
        if node is None or node.closed:
            return f"node {name} takes no pods: {node.closed if node is not None else 'gone'}"
        barring = blocking(node.taints, tolerations, resource)
        if barring:
            return f"node {name} has taint {barring[0]}, which the template does not tolerate"
        free = node.gpus(resource) - taken[name]
        if free < count:
            return (
                f"{max(free, 0)} of {count} GPUs on node {name} are free; the others' pods are not gone yet"
            )
    return ""


def dedupe_shared_allocations(allocations: Iterable[JobAllocation]) -> list[JobAllocation]:
    """The allocations without the second of two on one GPU.

    The first is one that pays, if there is one: the other's pod has ended, or its node is still to come.
    """
    paying_first = sorted(allocations, key=lambda held: not held.pays)
    return dedupe_shared_gpus(paying_first, lambda held: held.shared_node)


JOBS_PER_GPU = 2
"""Jobs on a GPU, at most."""

TIME_SLICING = ("", "time-slicing")
"""Values of the label of the strategy; an old feature discovery has none."""


def as_shared(node: NodeView, resource: str) -> NodeView:
    """The node in a pool with sharing: open, unless it is closed for another reason or does not suit."""
    closed = "" if node.closed == shared_gpus(node.labels) else node.closed
    return dataclasses.replace(node, closed=closed or why_not_shared(node, resource))


def why_not_shared(node: NodeView, resource: str) -> str:
    """Reason that two jobs cannot share a GPU of the node, as text; empty: they can.

    Only on a node with one GPU is it certain that two pods are on the same one: the device plugin chooses.
    """
    replicas, strategy = node.labels.get(REPLICAS, ""), node.labels.get(STRATEGY, "")
    if replicas != str(JOBS_PER_GPU):
        found = f"is {replicas}" if replicas else "is missing"
        return f"its pool shares GPUs, and its label {REPLICAS} {found} in place of {JOBS_PER_GPU}"
    if strategy not in TIME_SLICING:
        return f"its pool shares GPUs by time slicing, and its label {STRATEGY} is {strategy}"
    if node.gpus(resource) != JOBS_PER_GPU:
        offered = node.gpus(resource)
        return (
            f"its pool shares GPUs, which needs nodes of one GPU each: it offers {offered} of {resource} "
            f"in place of {JOBS_PER_GPU}"
        )
    return ""


def taken_by_others(
    pods: Iterable[Object], allocations: Mapping[Key, JobAllocation], resource: str, *, but: Collection[Key]
) -> Counter[str]:
    """Node -> replicas that pods hold, or launches count on, of other jobs than ``but`` and of no job."""
    pods = [pod for pod in pods if not is_ours(pod) or job_of(pod) not in but]
    held = {key: gang for key, gang in allocations.items() if key not in but}
    return foreign_use(pods, resource) + own_use(pods, held, resource, but=("", ""))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sharer:
    """A job that is on the GPU as well.

    Attributes:
        job: namespace/name.
    """

    job: str
    since: Time


def sharer_of(key: Key, node: str, allocations: Mapping[Key, JobAllocation]) -> Sharer | None:
    """Job of ``allocations`` on the GPU of ``node`` besides the job ``key``; None: it is alone."""
    for other, held in sorted(allocations.items()):
        if other != key and held.shared_gpu is not None and node in held.nodes and held.pays:
            return Sharer(job=job_id(other), since=held.since)
    return None
