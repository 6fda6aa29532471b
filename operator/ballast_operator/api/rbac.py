"""Rights of each role: the one source for the Helm chart, for local runs and for the Role of each job.

The operator's rules are what it calls and no more, by the API server's audit log. It may make a job's Role
because it holds all that the Role grants: Kubernetes refuses to let anyone hand out more than they have.
"""

from typing import Any

from ballast_policies.contract.messages import lease_name, plan_config_map_name

from ballast_operator.api import meta

Rule = dict[str, list[str]]

_WATCH = ("list", "watch")
_APPLY = ("get", "create", "patch")
"""Make what is not there, look at whose it is, bring it up to date."""

_RBAC = "rbac.authorization.k8s.io"
_COORDINATION = "coordination.k8s.io"
_KINDS = (meta.CLUSTER_POLICY_PLURAL, meta.TRAINING_JOB_PLURAL)


def _rule(group: str, resources: tuple[str, ...], verbs: tuple[str, ...], *names: str) -> Rule:
    rule = {"apiGroups": [group], "resources": list(resources), "verbs": list(verbs)}
    return {**rule, "resourceNames": list(names)} if names else rule


def operator_rules() -> list[Rule]:
    """Rights of the operator's service account, in every namespace."""
    return [
        # Jobs and policies are the users'; the operator writes their status, and deletes what its TTL ended.
        _rule(meta.GROUP, _KINDS, _WATCH),
        # Where the answer to a write of a status was lost, it is read before anything is decided on it.
        _rule(meta.GROUP, (meta.TRAINING_JOB_PLURAL,), ("get", "delete")),
        _rule(meta.GROUP, tuple(f"{plural}/status" for plural in _KINDS), ("patch",)),
        _rule("", ("nodes",), _WATCH),
        # Whether the namespace of `--namespace` exists.
        _rule("", ("namespaces",), ("get",)),
        _rule("", ("pods",), ("get", *_WATCH, "create", "delete")),
        # Whether the volumes of a job's pods can be there.
        _rule("", ("persistentvolumeclaims",), ("get",)),
        _rule("storage.k8s.io", ("storageclasses",), ("get",)),
        # A job's plan and Lease; the leader's Lease, which it updates, and its saved state.
        _rule("", ("configmaps",), (*_APPLY, *_WATCH)),
        _rule(_COORDINATION, ("leases",), (*_APPLY, *_WATCH, "update")),
        # The identity of a job's pods.
        _rule("", ("serviceaccounts",), _APPLY),
        _rule(_RBAC, ("roles", "rolebindings"), _APPLY),
        # A gang of Kubernetes, where the API server has them.
        _rule("scheduling.k8s.io", ("podgroups",), _APPLY),
        # Its own, and those of kubelets about pulls.
        _rule("", ("events",), ("create", "list")),
    ]


def kueue_rules() -> list[Rule]:
    """Rights of the operator's service account in addition where jobs wait in queues of Kueue."""
    return [_rule("kueue.x-k8s.io", ("workloads",), ("get", "create", "delete"))]


def page_rules() -> list[Rule]:
    """Rights of the operator's service account in addition where it serves the page."""
    return [
        _rule("authentication.k8s.io", ("tokenreviews",), ("create",)),
        _rule("authorization.k8s.io", ("subjectaccessreviews",), ("create",)),
    ]


def trainer_rules(job: str) -> list[Rule]:
    """Rights of a job's pods in its namespace: follow their plan, renew their Lease. Nothing else."""
    return [
        _rule("", ("configmaps",), ("get", "watch"), plan_config_map_name(job)),
        _rule(_COORDINATION, ("leases",), ("patch",), lease_name(job)),
    ]


def viewer_rules() -> list[Rule]:
    """Rights of people who look: aggregated to the cluster's ``view`` role."""
    return [_rule(meta.GROUP, _KINDS, ("get", *_WATCH))]


def editor_rules() -> list[Rule]:
    """Rights of people who train: aggregated to ``edit`` and ``admin``. Policies stay with administrators."""
    verbs = ("create", "update", "patch", "delete", "deletecollection")
    return [_rule(meta.GROUP, (meta.TRAINING_JOB_PLURAL,), ("get", *_WATCH, *verbs))]


def people_roles() -> list[dict[str, Any]]:
    """The ClusterRoles for people."""
    return [
        _cluster_role("ballast-viewer", viewer_rules(), "view", "edit", "admin"),
        _cluster_role("ballast-editor", editor_rules(), "edit", "admin"),
    ]


def _cluster_role(name: str, rules: list[Rule], *aggregate_to: str) -> dict[str, Any]:
    labels = {"app.kubernetes.io/part-of": "ballast"}
    labels |= {f"{_RBAC}/aggregate-to-{role}": "true" for role in aggregate_to}
    return {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "ClusterRole",
        "metadata": {"name": name, "labels": labels},
        "rules": rules,
    }
