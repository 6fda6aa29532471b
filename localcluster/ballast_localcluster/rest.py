"""A few calls to the API server with the standard library alone, for starting a cluster."""

import functools
import http.client
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ballast_localcluster.waiting import Limit, wait_until

CALL_SECONDS = 10.0


class CallError(Exception):
    """The API server's error, of HTTP status ``status``; None: it did not answer."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Rest:
    """The API server as one user, given by a kubeconfig that this package wrote."""

    def __init__(self, kubeconfig: Path) -> None:
        import base64

        config = json.loads(kubeconfig.read_text())
        cluster = config["clusters"][0]["cluster"]
        authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        self.server: str = cluster["server"]
        self._token: str = config["users"][0]["user"]["token"]
        context = ssl.create_default_context(cadata=authority)
        # Straight to the loopback address, whatever proxy the environment names.
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )

    def call(self, method: str, path: str, body: Any = None, content_type: str = "application/json") -> Any:
        """One request; the decoded answer, or its text where it is not JSON.

        Raises:
            CallError: refused, failed, or no answer within ``CALL_SECONDS``.
        """
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": content_type}
        request = urllib.request.Request(self.server + path, data=data, method=method, headers=headers)
        try:
            with self._opener.open(request, timeout=CALL_SECONDS) as answer:
                text = answer.read().decode()
                return json.loads(text) if "json" in answer.headers.get_content_type() else text
        except urllib.error.HTTPError as error:
            with error:
                text = error.read().decode(errors="replace")
            raise CallError(f"{method} {path}: {error.code} {text[:2000]}", error.code) from error
        except (OSError, http.client.HTTPException, ValueError) as error:  # also an answer that was cut off
            raise CallError(f"{method} {path}: {error!r}") from error

    def apply(self, path: str, manifest: dict[str, Any]) -> Any:
        """Server-side apply of one object at its path."""
        query = "?fieldManager=ballast-local-cluster&force=true"
        return self.call("PATCH", path + query, manifest, "application/apply-patch+yaml")

    def answers(self, path: str) -> bool:
        """True if a GET of ``path`` succeeds now."""
        try:
            self.call("GET", path)
        except CallError:
            return False
        return True


def node_is_ready(rest: Rest, node: str) -> bool:
    """True if pods may be bound to the node: Ready, and without the taints of one that is not."""
    try:
        found = rest.call("GET", f"/api/v1/nodes/{node}")
    except CallError:
        return False
    conditions = found["status"].get("conditions", [])
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
    # The controller manager lifts the not-ready taint a moment later; pods do not fit before.
    return ready and not any(
        t["key"].startswith("node.kubernetes.io/") for t in found["spec"].get("taints", [])
    )


def node_offers_gpus(rest: Rest, node: str, gpus: int) -> bool:
    """True if the node's kubelet has heard of that many healthy GPUs."""
    found = rest.call("GET", f"/api/v1/nodes/{node}")
    return bool(found["status"].get("allocatable", {}).get("nvidia.com/gpu", "0") == str(gpus))


_PATH = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def install_custom_resources(rest: Rest, files: Sequence[Path]) -> None:
    """Apply definitions in YAML files. Raises CallError: one is refused; TimeoutError: not established."""
    if not files:
        return
    import yaml

    names = []
    for file in files:
        for manifest in yaml.safe_load_all(file.read_text()):
            if manifest:
                names.append(manifest["metadata"]["name"])
                rest.apply(f"{_PATH}/{names[-1]}", manifest)

    def established(name: str) -> bool:
        status = rest.call("GET", f"{_PATH}/{name}").get("status") or {}
        conditions = status.get("conditions") or []  # null until the controller has looked at it
        return any(c["type"] == "Established" and c["status"] == "True" for c in conditions)

    for name in names:
        look = functools.partial(established, name)
        wait_until(look, f"{name} to be established", Limit.KINDS_ESTABLISHED)
