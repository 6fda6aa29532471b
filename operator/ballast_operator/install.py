"""What has to be on a cluster before the operator runs, for runs without the Helm chart.

Who calls it: ``ballast demo``, tests, and users who run the operator outside the cluster.
"""

from typing import Any

from ballast_operator.api.rbac import operator_rules, people_roles
from ballast_operator.api.schema.crd import custom_resource_definitions

OPERATOR_NAME = "ballast-operator"
"""Name of the operator's service account, ClusterRole and ClusterRoleBinding."""

_LABELS = {"app.kubernetes.io/name": "ballast", "app.kubernetes.io/part-of": "ballast"}
_RBAC = "rbac.authorization.k8s.io"


def install_objects(namespace: str) -> list[dict[str, Any]]:
    """CRDs, the operator's namespace and service account, and all roles, in the order to apply them.

    Args:
        namespace: where the operator's service account lives.
    """
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
