"""Requests to the API server, from a pod.

A few requests on two objects do not need Kubernetes' client, whose import takes longer than torch's; this
file speaks to the API server over HTTPS itself.  It finds the server by ``KUBECONFIG``, which process nodes
set, or by the service account mounted into the pod.
"""

import base64
import contextlib
import http.client
import json
import os
import ssl
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from socket import SHUT_RDWR
from typing import Any

_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_REQUEST_SECONDS = 10.0
_REFUSALS = (
    http.client.FORBIDDEN,
    http.client.REQUEST_ENTITY_TOO_LARGE,
    http.client.UNPROCESSABLE_ENTITY,
)
"""Answers to an object that is too large, or that an admission policy forbids."""


class ChannelError(RuntimeError):
    """The other side cannot be reached now; training continues and the call is repeated later."""


class RequestRefused(ChannelError):  # noqa: N818
    """The API server does not take it, e.g. more than an object holds: the same would be refused again."""


class NotInPodError(ChannelError):
    """The environment is not a pod's: ``variable`` of it, and the ``reason`` with what to change."""

    def __init__(self, variable: str, reason: str) -> None:
        super().__init__(f"{variable}: {reason}")
        self.variable, self.reason = variable, reason


class ApiServer:
    """Requests to the API server as this pod's service account."""

    def __init__(self, server: str, context: ssl.SSLContext | None, token_file: Path) -> None:
        self._server = urllib.parse.urlsplit(server)
        self._context = context
        self._token_file = token_file
        self._connection: http.client.HTTPConnection | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "ApiServer":
        """Client by ``KUBECONFIG``, else by account. Raises NotInPodError: neither can be used."""
        if environment.get("KUBECONFIG"):
            return cls._from_kubeconfig(Path(environment["KUBECONFIG"]))
        host = environment.get("KUBERNETES_SERVICE_HOST")
        if not host:
            reason = "not set, and no KUBECONFIG. To fix: run in a pod, or use `ballast-train run`"
            raise NotInPodError("KUBERNETES_SERVICE_HOST", reason)
        address = f"[{host}]" if ":" in host else host
        server = f"https://{address}:{environment.get('KUBERNETES_SERVICE_PORT', '443')}"
        authority = _SERVICE_ACCOUNT / "ca.crt"
        try:
            context = ssl.create_default_context(cafile=os.fspath(authority))
        except OSError as error:
            reason = f"the pod has no service account, {authority}: {error.strerror}"
            fix = "leave automountServiceAccountToken: false out of spec.template and its account"
            raise NotInPodError("KUBERNETES_SERVICE_HOST", f"{reason}. To fix: {fix}") from error
        return cls(server, context, _SERVICE_ACCOUNT / "token")

    @classmethod
    def _from_kubeconfig(cls, path: Path) -> "ApiServer":
        try:
            config = json.loads(path.read_text())
            (cluster,) = (entry["cluster"] for entry in config["clusters"])
            (user,) = (entry["user"] for entry in config["users"])
            server, context = str(cluster["server"]), None
            if server.startswith("https"):
                given = cluster.get("certificate-authority-data")
                authority = base64.b64decode(given).decode() if given else None
                context = ssl.create_default_context(cadata=authority)
            return cls(server, context, Path(user["tokenFile"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise NotInPodError(
                "KUBECONFIG", f"{path} is not a pod's: {error!r}. To fix: unset it in spec.template"
            ) from error

    def request(self, method: str, path: str, body: Any = None) -> Mapping[str, Any] | None:
        """One request; None: no such object. Raises ChannelError: no connection, or another bad answer."""
        data = None if body is None else json.dumps(body)
        kept = self._connection is not None
        try:
            self._connection = self._connection or self._connect()
            self._send(self._connection, method, path, data)
            response = self._connection.getresponse()
            text = response.read()
            if response.status == http.client.NOT_FOUND:
                return None
            if response.status >= http.client.BAD_REQUEST:
                shown = text[:300].decode(errors="replace")
                error_of = RequestRefused if response.status in _REFUSALS else ChannelError
                raise error_of(f"{method} {path}: {response.status} {shown}")
            answer = json.loads(text)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            if kept and isinstance(error, ConnectionError):
                # A server or proxy may end what is idle; what is asked for may be done twice.
                return self.request(method, path, body)
            raise ChannelError(f"{method} {path}: {error!r}") from error
        return answer if isinstance(answer, dict) else None

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
        # The kubelet renews a mounted token, so it is read each time.
        token = self._token_file.read_text().strip()
        headers = {"Accept": "application/json", "Authorization": f"Bearer {token}"}
        if data is not None:
            headers["Content-Type"] = "application/merge-patch+json"
        connection.request(method, self._server.path.rstrip("/") + path, data, headers)

    def _connect(self) -> http.client.HTTPConnection:
        host, port = self._server.hostname or "", self._server.port
        if self._context is not None:
            return http.client.HTTPSConnection(host, port, timeout=_REQUEST_SECONDS, context=self._context)
        return http.client.HTTPConnection(host, port, timeout=_REQUEST_SECONDS)
