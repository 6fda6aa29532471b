"""Users of a local cluster, each with a token, rights and a kubeconfig."""

import base64
import csv
import dataclasses
import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """A user of the API server; ``file``: name of its kubeconfig, without ``.kubeconfig``."""

    file: str
    name: str
    groups: tuple[str, ...] = ()


NODE_AGENT = "system:ballast:node-agent"
NAMES = "system:ballast:coredns"
POLICIES = "system:ballast:kube-router"

USERS = (
    User(file="admin", name="admin", groups=("system:masters",)),
    User(file="controller-manager", name="system:kube-controller-manager"),
    User(file="scheduler", name="system:kube-scheduler"),
    User(file="node-agent", name=NODE_AGENT),
    # Of real nodes; kubelets have certificates.
    User(file="proxy", name="system:kube-proxy"),
    User(file="coredns", name=NAMES),
    User(file="policies", name=POLICIES),
)


def write_credentials(folder: Path, server: str, authority: Path) -> Path:
    """Write a kubeconfig for each of ``USERS`` into ``folder``; the path of the API server's token file."""
    tokens = {user: secrets.token_urlsafe(32) for user in USERS}
    path = folder / "tokens.csv"
    path.touch(mode=0o600)
    with path.open("w", newline="") as handle:
        writer = csv.writer(handle)
        for number, (user, token) in enumerate(tokens.items()):
            writer.writerow(
                [token, user.name, f"user-{number}", *([",".join(user.groups)] if user.groups else [])]
            )
    for user, token in tokens.items():
        write_kubeconfig(
            folder / f"{user.file}.kubeconfig",
            server=server,
            authority=authority.read_bytes(),
            user={"token": token},
        )
    return path


def write_kubeconfig(
    path: Path, *, server: str, authority: bytes, user: Mapping[str, str], namespace: str = "default"
) -> None:
    """Write a kubeconfig, readable by this user alone; JSON, which is YAML.

    ``server``: URL of the API server, whose certificate has ``authority``. ``user``: its credentials, as a
    kubeconfig has them.
    """
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {
                "name": "local",
                "cluster": {
                    "server": server,
                    "certificate-authority-data": base64.b64encode(authority).decode(),
                },
            }
        ],
        "users": [{"name": "user", "user": dict(user)}],
        "contexts": [
            {"name": "local", "context": {"cluster": "local", "user": "user", "namespace": namespace}}
        ],
        "current-context": "local",
    }
    path.touch(mode=0o600)
    path.write_text(json.dumps(config, indent=1) + "\n")


NODE_AGENT_ROLE: dict[str, Any] = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "ClusterRole",
    "metadata": {"name": NODE_AGENT},
    "rules": [
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["create", "get", "list", "watch", "patch"]},
        {"apiGroups": [""], "resources": ["nodes/status"], "verbs": ["patch"]},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch", "delete"]},
        {"apiGroups": [""], "resources": ["pods/status"], "verbs": ["patch"]},
        {"apiGroups": [""], "resources": ["configmaps", "secrets"], "verbs": ["get"]},
        {"apiGroups": [""], "resources": ["serviceaccounts/token"], "verbs": ["create"]},
        {"apiGroups": [""], "resources": ["events"], "verbs": ["create"]},
        {
            "apiGroups": ["coordination.k8s.io"],
            "resources": ["leases"],
            "verbs": ["create", "get", "update", "patch"],
        },
    ],
}
"""Rights of a node agent, those of a kubelet, for all nodes."""


def role_binding(name: str, role: str) -> dict[str, Any]:
    """A ClusterRoleBinding for the user ``name``, under its name."""
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": name}],
    }


NODE_AGENT_BINDING = role_binding(NODE_AGENT, NODE_AGENT)


def _reader(name: str, resources: Mapping[str, list[str]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A role that reads resources by API group, and its binding to the user of its name."""
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": name},
        "rules": [
            {"apiGroups": [group], "resources": names, "verbs": ["get", "list", "watch"]}
            for group, names in resources.items()
        ],
    }
    return role, role_binding(name, name)


REAL_NODES_RIGHTS = (
    *_reader(NAMES, {"": ["services", "namespaces"], "discovery.k8s.io": ["endpointslices"]}),
    *_reader(
        POLICIES,
        {
            "": ["pods", "namespaces", "nodes", "services", "endpoints"],
            "discovery.k8s.io": ["endpointslices"],
            "networking.k8s.io": ["networkpolicies"],
        },
    ),
)
"""Rights of CoreDNS and of what enforces NetworkPolicies."""
