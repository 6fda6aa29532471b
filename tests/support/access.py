"""What an account may do, as the API server's authorizer sees it at the moment, and what it has done."""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from ballast_operator.api.rbac import Rule, operator_rules
from ballast_operator.local_operator import OPERATOR_NAME
from kubernetes import client

from tests.support.waiting import eventually

Right = tuple[str, str, str]
"""Verb, API group, resource with its subresource."""


@dataclasses.dataclass
class Use:
    """What one account was allowed: right -> namespaces, empty for all of them; and what it was denied."""

    namespaces: dict[Right, set[str]]
    denied: list[Right]


def use(log: Path, user: str) -> Use:
    found: dict[Right, set[str]] = {}
    denied: list[Right] = []
    # The last line may be half written.
    for line in log.read_text().rpartition("\n")[0].splitlines():
        event = json.loads(line)
        if event["user"]["username"] != user or "objectRef" not in event:
            continue  # "objectRef" is absent of discovery, which every account may read
        asked = event["objectRef"]
        resource = "/".join(filter(None, (asked["resource"], asked.get("subresource"))))
        right = (event["verb"], asked.get("apiGroup", ""), resource)
        if event["annotations"]["authorization.k8s.io/decision"] == "allow":
            found.setdefault(right, set()).add(asked.get("namespace", ""))
        else:
            denied.append(right)
    return Use(found, denied)


def granted(rules: Iterable[Rule]) -> set[Right]:
    return {
        (verb, group, resource)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def account(namespace: str, name: str) -> str:
    """The user name of a service account."""
    return f"system:serviceaccount:{namespace}:{name}"


def new_account(api: client.ApiClient, namespace: str, name: str) -> str:
    """A service account, which has no rights yet; its token."""
    core = client.CoreV1Api(api)
    core.create_namespaced_service_account(namespace, {"metadata": {"name": name}})
    asked = client.AuthenticationV1TokenRequest(spec=client.V1TokenRequestSpec(audiences=[]))
    return str(core.create_namespaced_service_account_token(name, namespace, asked).status.token)


def binding(role: str, namespace: str, name: str, *, kind: str = "ClusterRole") -> dict[str, Any]:
    """Gives a service account what is in a role; it is called as the account and its namespace."""
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": f"{kind}Binding",
        "metadata": {"name": f"{name}-{namespace}"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": role},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
    }


def kubeconfig_of(token: str, admin: Path, path: Path) -> Path:
    """A kubeconfig of who has the token, for the cluster of the administrator's."""
    content = yaml.safe_load(admin.read_text())
    (context,) = [c for c in content["contexts"] if c["name"] == content["current-context"]]
    context["context"]["user"] = "of-the-token"
    file = path.with_suffix(".token")
    file.write_text(token)
    content["users"] = [{"name": "of-the-token", "user": {"tokenFile": str(file)}}]
    path.write_text(json.dumps(content))
    return path


def may(
    api: client.ApiClient,
    user: str,
    verb: str,
    group: str,
    resource: str,
    *,
    namespace: str = "default",
    name: str | None = None,
) -> bool:
    """Whether ``user`` may do this; ``resource`` with its subresource after a slash."""
    resource, _, subresource = resource.partition("/")
    attributes = client.V1ResourceAttributes(
        verb=verb,
        group=group,
        resource=resource,
        subresource=subresource or None,
        namespace=namespace,
        name=name,
    )
    review = client.V1SubjectAccessReview(
        spec=client.V1SubjectAccessReviewSpec(user=user, resource_attributes=attributes)
    )
    answer = client.AuthorizationV1Api(api).create_subject_access_review(review)
    return bool(answer.status.allowed)


def wait_for_operators_rights(api: Any, namespace: str) -> None:
    """Until the authorizer, which learns of roles by a watch, knows those of the operator's account."""
    user = account(namespace, OPERATOR_NAME)
    for rule in operator_rules():
        verb, group, resource = rule["verbs"][0], rule["apiGroups"][0], rule["resources"][0]
        eventually(lambda asked=(verb, group, resource): may(api, user, *asked), f"{user} to have its rights")
