"""The kinds the operator reads and writes, and their paths."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from ballast_operator.api.meta import MANAGER

Object = Mapping[str, Any]
"""A Kubernetes object as JSON."""

Key = tuple[str, str]
"""(namespace, name); the namespace of cluster-scoped objects is empty."""


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """A resource of the API server."""

    api_version: str
    kind: str
    plural: str
    namespaced: bool = True

    def object(self, **content: Any) -> dict[str, Any]:
        """An object of the kind."""
        return {"apiVersion": self.api_version, "kind": self.kind, **content}

    @property
    def group(self) -> str:
        """The API group; empty: the core's."""
        return self.api_version.rpartition("/")[0]

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """The URL path of a collection, an object, or a part of it."""
        root = "/api/" if "/" not in self.api_version else "/apis/"
        parts = [root + self.api_version]
        if self.namespaced and namespace:
            parts.append(f"namespaces/{namespace}")
        parts.append(self.plural)
        if name:
            parts.append(name)
        if subresource:
            parts.append(subresource)
        return "/".join(parts)


VERSION = re.compile(r"[0-9]{1,20}")
"""A resourceVersion, as the API server writes it."""

JOB = Kind("ballast.dev/v1alpha1", "TrainingJob", "trainingjobs")
POLICY = Kind("ballast.dev/v1alpha1", "ClusterPolicy", "clusterpolicies", namespaced=False)
POD = Kind("v1", "Pod", "pods")
NODE = Kind("v1", "Node", "nodes", namespaced=False)
CONFIG_MAP = Kind("v1", "ConfigMap", "configmaps")
SERVICE_ACCOUNT = Kind("v1", "ServiceAccount", "serviceaccounts")
EVENT = Kind("v1", "Event", "events")
NAMESPACE = Kind("v1", "Namespace", "namespaces", namespaced=False)
CLAIM = Kind("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
STORAGE_CLASS = Kind("storage.k8s.io/v1", "StorageClass", "storageclasses", namespaced=False)
LEASE = Kind("coordination.k8s.io/v1", "Lease", "leases")
TOKEN_REVIEW = Kind("authentication.k8s.io/v1", "TokenReview", "tokenreviews", namespaced=False)
SUBJECT_ACCESS_REVIEW = Kind(
    "authorization.k8s.io/v1", "SubjectAccessReview", "subjectaccessreviews", namespaced=False
)
POD_GROUP = Kind("scheduling.k8s.io/v1beta1", "PodGroup", "podgroups")
"""Kubernetes' own gangs: since 1.37, behind the gate ``GenericWorkload``."""
WORKLOAD = Kind("kueue.x-k8s.io/v1beta2", "Workload", "workloads")
ROLE = Kind("rbac.authorization.k8s.io/v1", "Role", "roles")
ROLE_BINDING = Kind("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings")


def key_of_job(name: str) -> Key:
    """The key of a job by its name in problems, rounds and logs: ``namespace/name``."""
    namespace, _, job = name.partition("/")
    return namespace, job


def key_of(item: Object) -> Key:
    """(namespace, name) of an object."""
    metadata = item["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


_SHAPES = {
    "totalSteps": int,
    "entity": str,
    "dataLocation": Mapping,
    "throughput": list,
    "nodePools": list,
    "dataPrices": list,
    "budgets": Mapping,
    "objective": Mapping,
}
"""Fields of specs that reports read, and what they are."""


def is_ours(job: Object) -> bool:
    """True if the TrainingJob is this operator's; those of other controllers (``managedBy``) are not."""
    spec = job.get("spec")
    return not isinstance(spec, Mapping) or spec.get("managedBy") in (None, MANAGER)


def spec_of(item: Object) -> Mapping[str, Any]:
    """The spec of a TrainingJob or ClusterPolicy, without what is not of its shape.

    Where the definition was installed without its schema, a spec is any value, or missing.
    """
    spec = item.get("spec")
    if not isinstance(spec, Mapping):
        return {}
    return {name: value for name, value in spec.items() if isinstance(value, _SHAPES.get(name, object))}


def version_of(item: Object) -> int:
    """The object's resourceVersion as a number: larger is newer (KEP-5504 makes this comparison official)."""
    return int(item["metadata"].get("resourceVersion") or 0)


def check(kind: Kind, item: Object) -> None:
    """See that an object is one of the kind, by what the caches need of it.

    Raises:
        ValueError, TypeError, LookupError, AttributeError: it is not.
    """
    metadata = item["metadata"]
    if item.get("kind", kind.kind) != kind.kind:
        raise ValueError(f"a {item['kind']!s:.63}")
    if not VERSION.fullmatch(metadata["resourceVersion"]):
        raise ValueError("no resourceVersion")
    for key in ("name", "uid") + ("namespace",) * kind.namespaced:
        if not isinstance(metadata[key], str) or not metadata[key]:
            raise ValueError(f"no {key}")
    for key, shape in (("labels", dict), ("annotations", dict), ("ownerReferences", list)):
        if not isinstance(metadata.get(key), shape | None):
            raise ValueError(f"{key} of a wrong kind")


def controlled_by(item: Object, uid: str) -> bool:
    """True if the object with this UID is the controller of ``item``."""
    owners = item["metadata"].get("ownerReferences") or []
    return any(owner.get("uid") == uid and owner.get("controller") for owner in owners)
