"""A cluster in memory, strict where the real one is: versions, uids, names; and it can break at any write.

It checks, at every write, what must never be: a node with more GPUs taken by pods, or promised to jobs, than
it has, two launches of a job alive at once.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

from ballast_operator.errors import Unavailable
from ballast_operator.kube.kept_fields import pinned_node
from ballast_operator.kube.kinds import JOB, NODE, POD, Key, Kind
from ballast_operator.views.nodes import pod_gpus, read_node
from ballast_policies.contract.messages import JOB_LABEL, LAUNCH_LABEL

GPU = "nvidia.com/gpu"


class Crash(BaseException):
    """The operator dies: nothing of it continues, not even its ``except`` clauses for errors."""


def as_sent(value: Any) -> Any:
    """A copy, as JSON carries it over a connection."""
    return json.loads(json.dumps(value))


def merged(old: Any, patch: Any) -> Any:
    """JSON merge patch."""
    if not isinstance(patch, Mapping) or not isinstance(old, Mapping):
        return as_sent(patch)
    result = dict(old)
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result


class World:
    """The API server's store, and the laws of the cluster."""

    def __init__(self) -> None:
        self.objects: dict[tuple[Kind, Key], dict[str, Any]] = {}
        self.version = 0
        self.writes = 0
        self.after_write: Callable[[int], None] = lambda number: None
        self.log: list[str] = []
        self.uids_of_pods: dict[Key, set[str]] = {}
        self.admission: Callable[[Kind, Mapping[str, Any]], None] = lambda kind, body: None
        self.dry_runs = 0
        self.lacking: frozenset[str] = frozenset()  # fields of statuses that the definitions do not have
        self.events: list[str] = []

    # What tests and simulated machines use: no rules but versions.

    def bump(self) -> int:
        """The next resourceVersion; deletions have one too."""
        self.version += 1
        return self.version

    def items(self, kind: Kind) -> list[dict[str, Any]]:
        found = [(key, item) for (of, key), item in self.objects.items() if of is kind]
        return [item for _, item in sorted(found, key=itemgetter(0))]

    def get(self, kind: Kind, namespace: str, name: str) -> dict[str, Any] | None:
        return self.objects.get((kind, (namespace, name)))

    def put(self, kind: Kind, item: dict[str, Any]) -> dict[str, Any]:
        """Create or replace, as someone other than the operator."""
        item = as_sent(item)
        metadata = item["metadata"]
        key = (kind, (metadata.get("namespace", ""), metadata["name"]))
        old = self.objects.get(key)
        version = self.bump()
        metadata.setdefault("uid", old["metadata"]["uid"] if old else f"uid-{version}")
        metadata["resourceVersion"] = str(version)
        metadata.setdefault("generation", 1)
        metadata.setdefault("creationTimestamp", "2026-01-01T00:00:00Z")
        if old is not None and old.get("spec") != item.get("spec"):
            metadata["generation"] = old["metadata"]["generation"] + 1
        self.objects[key] = item
        if kind is POD:
            self.uids_of_pods.setdefault(key[1], set()).add(metadata["uid"])
        return item

    def patch(self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any]) -> None:
        item = self.get(kind, namespace, name)
        if item is not None:
            self.put(kind, merged(item, patch))

    def drop(self, kind: Kind, namespace: str, name: str) -> None:
        """The object is gone, and with it what it owns."""
        item = self.objects.pop((kind, (namespace, name)), None)
        if item is None:
            return
        self.bump()
        uid = item["metadata"]["uid"]
        for (owned_kind, key), other in list(self.objects.items()):
            if any(o["uid"] == uid for o in other["metadata"].get("ownerReferences") or []):
                self.drop(owned_kind, *key)

    def checked(self) -> None:
        """The laws."""
        taken: Counter[str] = Counter()
        launches: dict[Key, set[str]] = {}
        for pod in self.items(POD):
            if pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
                continue
            node = pinned_node(pod)
            taken[node] += pod_gpus(pod, GPU)
            labels = pod["metadata"].get("labels") or {}
            if JOB_LABEL in labels:
                key = (pod["metadata"]["namespace"], labels[JOB_LABEL])
                launches.setdefault(key, set()).add(labels[LAUNCH_LABEL])
        taken.pop("", None)  # they wait for a node that does not exist yet
        for what, gpus in (("taken", taken), ("promised", self._promised())):
            for node, count in gpus.items():
                item = self.get(NODE, "", node)
                if item is None:
                    continue  # deleted under its pods, or still to come
                view, offered = read_node(item), item["status"]["allocatable"]
                has = max((view.gpus(name) for name in offered if "gpu" in name), default=0)
                assert count <= has, f"node {node} has {has} GPUs, {count} are {what}"
        for key, alive in launches.items():
            assert len(alive) == 1, f"launches {sorted(alive)} of {key} are alive at once"

    def _promised(self) -> Counter[str]:
        """Node -> GPUs that jobs hold there by their statuses."""
        found: Counter[str] = Counter()
        for item in self.items(JOB):
            status = item.get("status")
            held = status.get("allocation") if isinstance(status, dict) else None
            if isinstance(held, dict):
                for pod, node in zip(held["pods"], held["nodes"], strict=True):
                    found[node] += 0 if pod in held.get("ended", ()) else held.get("gpusPerPod", 1)
        return found

    # What the operator's client does.

    def write(self, what: str) -> None:
        self.log.append(what)

    def wrote(self) -> None:
        self.checked()
        number, self.writes = self.writes, self.writes + 1
        self.after_write(number)


def unavailable(number: int) -> None:
    """For ``after_write``: the write landed, its answer was lost."""
    raise Unavailable(f"the answer to write {number} was lost")
