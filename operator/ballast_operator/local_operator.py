"""An operator as a process of this machine: what it needs on the cluster, its account, its command line.

For `ballast up`, `ballast demo` and tests; on other clusters the Helm chart does this.
"""

import contextlib
import os
import sys
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from ballast.client.connection import kubeconfig_errors, reaches_itself
from kubernetes import client, config
from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.exceptions import NotFoundError

from ballast_operator.api.rbac import operator_rules, people_roles
from ballast_operator.api.schema.crd import custom_resource_definitions

OPERATOR_NAME = "ballast-operator"
"""Name of the operator's service account, ClusterRole and ClusterRoleBinding."""

_LABELS = {"app.kubernetes.io/name": "ballast", "app.kubernetes.io/part-of": "ballast"}
_RBAC = "rbac.authorization.k8s.io"


def install_objects(namespace: str) -> list[dict[str, Any]]:
    """CRDs, the operator's namespace and service account, and all roles, in the order to apply them."""
    return [
        *custom_resource_definitions(),
        _object("v1", "Namespace", namespace),
        _object("v1", "ServiceAccount", OPERATOR_NAME, namespace=namespace),
        {**_object(f"{_RBAC}/v1", "ClusterRole", OPERATOR_NAME), "rules": operator_rules()},
        {
            **_object(f"{_RBAC}/v1", "ClusterRoleBinding", OPERATOR_NAME),
            "roleRef": {"apiGroup": _RBAC, "kind": "ClusterRole", "name": OPERATOR_NAME},
            "subjects": [{"kind": "ServiceAccount", "name": OPERATOR_NAME, "namespace": namespace}],
        },
        *people_roles(),
    ]


def _object(api_version: str, kind: str, name: str, **metadata: str) -> dict[str, Any]:
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {"name": name, **metadata, "labels": dict(_LABELS)},
    }


OPERATOR_NAMESPACE = "ballast-system"
FIELD_MANAGER = "ballast-demo"
TOKEN_SECONDS = 3600
_SERVED_WITHIN_SECONDS = 30.0


def write_definitions(folder: Path) -> Path:
    """The custom resource definitions as one file, for a control plane that knows them from the start."""
    path = folder / "crds.yaml"
    path.write_text(yaml.safe_dump_all(custom_resource_definitions()))
    return path


LIVELY: Mapping[str, str] = {"BALLAST_JOB_RENEW_SECONDS": "1", "BALLAST_JOB_PROGRESS_SECONDS": "12"}
"""Settings of an operator for a few jobs that somebody watches: reports each second."""


def operator_command(kubeconfig: Path, *, settings: Mapping[str, str] = LIVELY) -> list[str]:
    """The operator as the image runs it, with its pages on a free port of the loopback address.

    Of ``settings``, those that the environment does not have already.
    """
    given = [f"{name}={value}" for name, value in settings.items() if name not in os.environ]
    command = [
        *(["/usr/bin/env", *given] if given else []),
        sys.executable,
        "-m",
        "ballast_operator.cli",
        "operator",
        "--kubeconfig",
        str(kubeconfig),
    ]
    pages = ["--metrics-host", "127.0.0.1", "--metrics-port", "0"]
    return [*command, "--lease-namespace", OPERATOR_NAMESPACE, *pages]


def api_client(kubeconfig: Path) -> client.ApiClient:
    """Client by a file. Of a cluster on this machine without the proxies of its environment, as kubectl's."""
    found = client.Configuration()
    with kubeconfig_errors(str(kubeconfig), config.ConfigException):
        config.load_kube_config(str(kubeconfig), client_configuration=found)
    if reaches_itself(urllib.parse.urlsplit(found.host).hostname or ""):
        found.proxy = None
    return client.ApiClient(found)


def write_operator_kubeconfig(
    api: client.ApiClient, kubeconfig: Path, path: Path, *, token_seconds: int = TOKEN_SECONDS
) -> Path:
    """A kubeconfig with the service account of the operator: it has the installed roles and no more."""
    token = client.CoreV1Api(api).create_namespaced_service_account_token(
        OPERATOR_NAME,
        OPERATOR_NAMESPACE,
        client.AuthenticationV1TokenRequest(
            spec=client.V1TokenRequestSpec(audiences=[], expiration_seconds=token_seconds)
        ),
    )
    content = yaml.safe_load(kubeconfig.read_text())
    (context,) = [c for c in content["contexts"] if c["name"] == content["current-context"]]
    context["context"]["user"] = OPERATOR_NAME
    content["users"] = [{"name": OPERATOR_NAME, "user": {"token": token.status.token}}]
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump(content))
    return path


def apply_objects(
    kube: DynamicClient, objects: Sequence[dict[str, Any]], namespace: str | None = None
) -> None:
    """Server-side apply of each object, as ``kubectl apply --server-side`` does.

    A kind that the API server has only just learned is looked up again until it is served.
    """
    for manifest in objects:
        deadline = time.monotonic() + _SERVED_WITHIN_SECONDS
        while True:
            try:
                resource = kube.resources.get(api_version=manifest["apiVersion"], kind=manifest["kind"])
                where = manifest["metadata"].get("namespace") or (namespace if resource.namespaced else None)
                resource.server_side_apply(
                    body=manifest, namespace=where, field_manager=FIELD_MANAGER, force_conflicts=True
                )
                break
            except Exception as error:
                served = not isinstance(error, client.ApiException) or error.status in (404, 429, 503)
                if not served or time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
                kube.resources.invalidate_cache()


def delete_objects(kube: DynamicClient, objects: Sequence[dict[str, Any]], namespace: str) -> None:
    """Delete each object that is still there."""
    for manifest in objects:
        resource = kube.resources.get(api_version=manifest["apiVersion"], kind=manifest["kind"])
        with contextlib.suppress(NotFoundError):
            where = manifest["metadata"].get("namespace") or (namespace if resource.namespaced else None)
            resource.delete(name=manifest["metadata"]["name"], namespace=where)
