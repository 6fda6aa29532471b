"""A pod's own credentials: bound tokens, and a kubeconfig that uses them."""

import base64
import json
import time
from pathlib import Path

from ballast_localcluster.nodes.api import Api, Manifest

MOUNT_PATH = "/var/run/secrets/kubernetes.io/serviceaccount"
_DEFAULT_SECONDS = 3600
_REFRESH_FRACTION = 0.8


async def write_token(api: Api, pod: Manifest, source: Manifest, path: Path) -> float:
    """Ask for a token of the pod's service account, bound to the pod, and write it.

    Args:
        api: the agent's connection.
        pod: whose token it is.
        path: the file.
        source: a ``serviceAccountToken`` projection: ``audience``, ``expirationSeconds``.

    Returns:
        Unix time at which to ask for the next one.

    Raises:
        ApiError: the service account or the pod is gone.
    """
    metadata = pod["metadata"]
    account = pod["spec"].get("serviceAccountName", "default")
    seconds: float = source.get("expirationSeconds", _DEFAULT_SECONDS)
    audience = source.get("audience")
    request = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {
            "audiences": [audience] if audience else [],
            "expirationSeconds": seconds,
            "boundObjectRef": {
                "apiVersion": "v1",
                "kind": "Pod",
                "name": metadata["name"],
                "uid": metadata["uid"],
            },
        },
    }
    where = f"/api/v1/namespaces/{metadata['namespace']}/serviceaccounts/{account}/token"
    answer = await api.call_until_reached("POST", where, request)
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(answer["status"]["token"])
    fresh.replace(path)  # a reader sees the old token or the new one, never half of it
    return time.time() + _REFRESH_FRACTION * seconds


def write_kubeconfig(path: Path, *, server: str, authority: str, token: Path, namespace: str) -> None:
    """Write the kubeconfig of a pod; its token is read from the token file, which is kept fresh."""
    authority_data = base64.b64encode(authority.encode()).decode()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": "local", "cluster": {"server": server, "certificate-authority-data": authority_data}}
        ],
        "users": [{"name": "pod", "user": {"tokenFile": str(token)}}],
        "contexts": [
            {"name": "local", "context": {"cluster": "local", "user": "pod", "namespace": namespace}}
        ],
        "current-context": "local",
    }
    path.write_text(json.dumps(config, indent=1) + "\n")
