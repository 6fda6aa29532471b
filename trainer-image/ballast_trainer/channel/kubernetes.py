"""The channel through the Kubernetes API: the job's ConfigMap ``<job>-plan`` and Lease ``<job>``.

Two objects and three requests (get, get, patch) do not need the client package, whose import
takes longer than torch's; this file speaks to the API server over HTTPS itself.  It finds the
server as every client does: ``KUBECONFIG``, or the service account mounted into the pod.
"""

import base64
import datetime
import http.client
import json
import os
import ssl
import tempfile
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ballast_policies.contract import (
    ACK_ANNOTATION,
    CONFIG_KEY,
    FINISHED_ANNOTATION,
    PLAN_KEY,
    PROPOSAL_ANNOTATION,
    REPORT_ANNOTATION,
    Plan,
    lease_name,
    plan_config_map_name,
)

from ballast_trainer.channel.base import ChannelError, Messages, config_from, plan_from
from ballast_trainer.errors import ConfigurationError

_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_REQUEST_SECONDS = 10.0


class ApiServer:
    """Requests to the API server as this pod's service account."""

    def __init__(
        self, server: str, context: ssl.SSLContext | None, token_file: Path | None, token: str
    ) -> None:
        self._server = urllib.parse.urlsplit(server)
        self._context = context
        self._token_file = token_file
        self._token = token
        self._connection: http.client.HTTPConnection | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "ApiServer":
        """From ``KUBECONFIG``, else from the mounted service account.

        Raises:
            ConfigurationError: neither is there.
        """
        if environment.get("KUBECONFIG"):
            return cls._from_kubeconfig(Path(environment["KUBECONFIG"]))
        host = environment.get("KUBERNETES_SERVICE_HOST")
        if not host:
            reason = "not set, and no KUBECONFIG. To fix: run in a pod, or use `ballast-train run`"
            raise ConfigurationError("KUBERNETES_SERVICE_HOST", reason)
        address = f"[{host}]" if ":" in host else host
        server = f"https://{address}:{environment.get('KUBERNETES_SERVICE_PORT', '443')}"
        context = ssl.create_default_context(cafile=str(_SERVICE_ACCOUNT / "ca.crt"))
        return cls(server, context, _SERVICE_ACCOUNT / "token", "")

    @classmethod
    def _from_kubeconfig(cls, path: Path) -> "ApiServer":
        import yaml

        try:
            config = yaml.safe_load(path.read_text())
            named = {
                kind: {entry["name"]: entry[kind] for entry in config[f"{kind}s"]}
                for kind in ("cluster", "user", "context")
            }
            current = named["context"][config["current-context"]]
            cluster, user = named["cluster"][current["cluster"]], named["user"][current["user"]]
        except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
            raise ConfigurationError("KUBECONFIG", f"{path} is not a kubeconfig: {error!r}") from error
        context = None
        if cluster["server"].startswith("https"):
            context = ssl.create_default_context(
                cafile=cluster.get("certificate-authority"),
                cadata=_decoded(cluster, "certificate-authority-data"),
            )
            if cluster.get("insecure-skip-tls-verify"):
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            _load_client_certificate(context, user)
        token_file = Path(user["tokenFile"]) if user.get("tokenFile") else None
        return cls(cluster["server"], context, token_file, user.get("token", ""))

    def request(self, method: str, path: str, body: Any = None) -> Mapping[str, Any] | None:
        """One request; None where the object does not exist.

        Raises:
            ChannelError: no connection, or an answer other than success or not found.
        """
        headers = {"Accept": "application/json"}
        # The kubelet renews a mounted token, so it is read each time.
        token = self._token_file.read_text().strip() if self._token_file is not None else self._token
        if token:
            headers["Authorization"] = f"Bearer {token}"
        data = None
        if body is not None:
            data = json.dumps(body)
            headers["Content-Type"] = "application/merge-patch+json"
        try:
            connection = self._connected()
            connection.request(method, self._server.path.rstrip("/") + path, data, headers)
            response = connection.getresponse()
            text = response.read()
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise ChannelError(f"{method} {path}: {error!r}") from error
        if response.status == http.client.NOT_FOUND:
            return None
        if response.status >= http.client.BAD_REQUEST:
            raise ChannelError(f"{method} {path}: {response.status} {text[:300].decode(errors='replace')}")
        answer: Mapping[str, Any] = json.loads(text)
        return answer

    def close(self) -> None:
        """Close the connection; the next request opens a new one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connected(self) -> http.client.HTTPConnection:
        if self._connection is None:
            host = self._server.hostname or ""
            if self._context is not None:
                self._connection = http.client.HTTPSConnection(
                    host, self._server.port, timeout=_REQUEST_SECONDS, context=self._context
                )
            else:
                self._connection = http.client.HTTPConnection(
                    host, self._server.port, timeout=_REQUEST_SECONDS
                )
        return self._connection


class KubernetesChannel:
    """See :class:`~ballast_trainer.channel.base.Channel`."""

    def __init__(self, api: ApiServer, *, namespace: str, job: str, pod: str) -> None:
        self._api = api
        self._plan = f"/api/v1/namespaces/{namespace}/configmaps/{plan_config_map_name(job)}"
        self._lease = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{lease_name(job)}"
        self._pod = pod

    def read_plan(self) -> Plan | None:
        """``plan.json`` of the ConfigMap."""
        return plan_from(self._data().get(PLAN_KEY), self._plan)

    def read_config(self) -> Mapping[str, Any] | None:
        """``config.json`` of the ConfigMap."""
        return config_from(self._data().get(CONFIG_KEY), self._plan)

    def write(self, messages: Messages) -> None:
        """One patch of the Lease: annotations, holder and renewal time."""
        texts = {
            REPORT_ANNOTATION: messages.report,
            PROPOSAL_ANNOTATION: messages.proposal,
            ACK_ANNOTATION: messages.ack,
        }
        annotations = {key: message.to_json() for key, message in texts.items() if message is not None}
        if messages.finished_step is not None:
            annotations[FINISHED_ANNOTATION] = str(messages.finished_step)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        body = {
            "metadata": {"annotations": annotations},
            # A merge patch with None takes the holder away.
            "spec": {"holderIdentity": None if messages.closing else self._pod, "renewTime": now},
        }
        if self._api.request("PATCH", self._lease, body) is None:
            raise ChannelError(f"{self._lease} does not exist")

    def _data(self) -> Mapping[str, str]:
        config_map = self._api.request("GET", self._plan)
        data: Mapping[str, str] = (config_map or {}).get("data") or {}
        return data


def _decoded(values: Mapping[str, Any], key: str) -> str | None:
    return base64.b64decode(values[key]).decode() if values.get(key) else None


def _load_client_certificate(context: ssl.SSLContext, user: Mapping[str, Any]) -> None:
    if user.get("client-certificate"):
        context.load_cert_chain(user["client-certificate"], user["client-key"])
    elif user.get("client-certificate-data"):
        # ssl reads certificates from files only.
        with tempfile.TemporaryDirectory() as folder:
            names = []
            for key in ("client-certificate-data", "client-key-data"):
                path = Path(folder) / key
                path.touch(mode=0o600)
                path.write_text(_decoded(user, key) or "")
                names.append(os.fspath(path))
            context.load_cert_chain(*names)
