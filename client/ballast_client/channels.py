"""Ways to the operator: the job's ConfigMap and Lease, or files in a directory."""

import base64
import datetime
import http.client
import json
import os
import ssl
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from ballast_client.messages import ACK_ANNOTATION, FINISHED_ANNOTATION, PLAN_KEY, REPORT_ANNOTATION

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
REQUEST_SECONDS = 10.0

FILES = {REPORT_ANNOTATION: "report.json", ACK_ANNOTATION: "ack.json", FINISHED_ANNOTATION: "finished-step"}
"""Annotation -> the file that holds the same in a directory."""


class ChannelError(RuntimeError):
    """The operator cannot be reached now; training continues, and the call is repeated."""


class Channel(Protocol):
    """Plans come in, messages go out; every call may raise :class:`ChannelError`."""

    def read_plan(self) -> str | None:
        """``plan.json``; None while there is none."""

    def write(self, annotations: Mapping[str, str], *, release: bool = False) -> None:
        """Renew the Lease with these messages; ``release``: and give it up."""


class Directory:
    """The channel without Kubernetes: one file for each message, replaced whole."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read_plan(self) -> str | None:
        """The file's text."""
        try:
            return (self._path / PLAN_KEY).read_text()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ChannelError(str(error)) from error

    def write(self, annotations: Mapping[str, str], *, release: bool = False) -> None:
        """One file for each message."""
        try:
            for name, text in annotations.items():
                fresh = self._path / f".{FILES[name]}.new"
                fresh.write_text(text)
                fresh.replace(self._path / FILES[name])
        except OSError as error:
            raise ChannelError(str(error)) from error


class Kubernetes:
    """The API server, as the pod's service account: it may read its job's plan and renew its job's Lease."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        namespace, job = environment["BALLAST_NAMESPACE"], environment["BALLAST_JOB"]
        self._plan = f"/api/v1/namespaces/{namespace}/configmaps/{job}-plan"
        self._lease = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{job}"
        self._holder = environment.get("BALLAST_POD_NAME") or job
        if environment.get("KUBECONFIG"):
            server, self._context, self._token_file = _from_kubeconfig(Path(environment["KUBECONFIG"]))
        else:
            host = environment["KUBERNETES_SERVICE_HOST"]
            address = f"[{host}]" if ":" in host else host
            server = f"https://{address}:{environment.get('KUBERNETES_SERVICE_PORT', '443')}"
            self._context = ssl.create_default_context(cafile=os.fspath(SERVICE_ACCOUNT / "ca.crt"))
            self._token_file = SERVICE_ACCOUNT / "token"
        self._server = urllib.parse.urlsplit(server)

    def read_plan(self) -> str | None:
        """Text of the plan in the ConfigMap ``<job>-plan``."""
        data = ((self._request("GET", self._plan) or {}).get("data")) or {}
        text = data.get(PLAN_KEY)
        return text if isinstance(text, str) else None

    def write(self, annotations: Mapping[str, str], *, release: bool = False) -> None:
        """One patch of the Lease ``<job>``."""
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="microseconds")  # noqa: UP017
        spec = {
            "holderIdentity": None if release else self._holder,
            "renewTime": now.replace("+00:00", "Z"),
        }
        body = {"metadata": {"annotations": dict(annotations)}, "spec": spec}
        if self._request("PATCH", self._lease, body) is None:
            raise ChannelError(f"{self._lease} does not exist")

    def _request(self, method: str, path: str, body: Any = None) -> dict[str, Any] | None:
        """One request on a connection of its own: there is one every few seconds."""
        headers = {"Accept": "application/json", "Content-Type": "application/merge-patch+json"}
        host, port = self._server.hostname or "", self._server.port
        connection: http.client.HTTPConnection
        if self._server.scheme == "https":
            connection = http.client.HTTPSConnection(
                host, port, timeout=REQUEST_SECONDS, context=self._context
            )
        else:
            connection = http.client.HTTPConnection(host, port, timeout=REQUEST_SECONDS)
        try:
            # The kubelet renews the token, so it is read each time.
            headers["Authorization"] = f"Bearer {self._token_file.read_text().strip()}"
            data = None if body is None else json.dumps(body)
            connection.request(method, self._server.path.rstrip("/") + path, data, headers)
            response = connection.getresponse()
            text = response.read()
            if response.status == http.client.NOT_FOUND:
                return None
            if response.status >= http.client.BAD_REQUEST:
                shown = text[:300].decode(errors="replace")
                raise ChannelError(f"{method} {path}: {response.status} {shown}")
            answer = json.loads(text)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ChannelError(f"{method} {path}: {error!r}") from error
        finally:
            connection.close()
        return answer if isinstance(answer, dict) else None


def find_channel(environment: Mapping[str, str]) -> Channel | None:
    """The channel that the environment names; None: the script runs away from Ballast."""
    if environment.get("BALLAST_CHANNEL"):
        return Directory(Path(environment["BALLAST_CHANNEL"]))
    pod = environment.get("BALLAST_JOB") and environment.get("BALLAST_NAMESPACE")
    if pod and (environment.get("KUBECONFIG") or environment.get("KUBERNETES_SERVICE_HOST")):
        return Kubernetes(environment)
    return None


def _from_kubeconfig(path: Path) -> tuple[str, ssl.SSLContext | None, Path]:
    """(server, context, token's file) of a process node's kubeconfig. Raises ChannelError: it is another."""
    try:
        config = json.loads(path.read_text())
        (cluster,) = (entry["cluster"] for entry in config["clusters"])
        (user,) = (entry["user"] for entry in config["users"])
        authority = cluster.get("certificate-authority-data")
        context = None
        if cluster["server"].startswith("https"):
            given = base64.b64decode(authority).decode() if authority else None
            context = ssl.create_default_context(cadata=given)
        return str(cluster["server"]), context, Path(user["tokenFile"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ChannelError(f"KUBECONFIG {path} is not a pod's: {error!r}") from error
