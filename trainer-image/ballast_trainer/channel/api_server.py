"""Requests to the API server, from a pod or with a kubeconfig.

A few requests on two objects do not need the client package, whose import takes longer than torch's; this
file speaks to the API server over HTTPS itself.  It finds the server as every client does: ``KUBECONFIG``, or
the service account mounted into the pod.
"""

import base64
import contextlib
import http.client
import json
import os
import ssl
import tempfile
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from socket import SHUT_RDWR
from typing import Any

from ballast_trainer.channel.base import ChannelError
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
        """From ``KUBECONFIG``, else from the service account. Raises ConfigurationError: neither is there."""
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
            raise ConfigurationError(
                "KUBECONFIG", f"{path} is not a kubeconfig: {error!r}. To fix: one that kubectl reads"
            ) from error
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
        """One request; None: no such object. Raises ChannelError: no connection, or another bad answer."""
        data = None if body is None else json.dumps(body)
        try:
            self._connection = self._connection or self._connect()
            self._send(self._connection, method, path, data)
            response = self._connection.getresponse()
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

    def watch(
        self, path: str, *, seconds: float, opened: Callable[[Callable[[], None]], None]
    ) -> Iterator[Any]:
        """The events of a watch, as they come, on a connection of its own; ends where the server ends it.

        Args:
            path: with the query.
            seconds: without a byte, after which the connection counts as lost.
            opened: called once the server has answered, with a function that ends the watch from any thread.

        Raises:
            ChannelError: no connection, it is lost, or the answer is not a watch.
        """
        connection = self._connect()
        try:
            self._send(connection, "GET", path, None)
            socket = connection.sock
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise ChannelError(f"GET {path}: {response.status} {response.reason}")
            socket.settimeout(seconds)

            def end() -> None:
                with contextlib.suppress(OSError):
                    socket.shutdown(SHUT_RDWR)

            opened(end)
            while line := response.readline():
                yield json.loads(line)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ChannelError(f"GET {path}: {error!r}") from error
        finally:
            connection.close()

    def _send(self, connection: http.client.HTTPConnection, method: str, path: str, data: str | None) -> None:
        headers = {"Accept": "application/json"}
        # The kubelet renews a mounted token, so it is read each time.
        token = self._token_file.read_text().strip() if self._token_file is not None else self._token
        if token:
            headers["Authorization"] = f"Bearer {token}"
        if data is not None:
            headers["Content-Type"] = "application/merge-patch+json"
        connection.request(method, self._server.path.rstrip("/") + path, data, headers)

    def _connect(self) -> http.client.HTTPConnection:
        host, port = self._server.hostname or "", self._server.port
        if self._context is not None:
            return http.client.HTTPSConnection(host, port, timeout=_REQUEST_SECONDS, context=self._context)
        return http.client.HTTPConnection(host, port, timeout=_REQUEST_SECONDS)


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
