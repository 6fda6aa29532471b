"""Ways to the operator: the job's ConfigMap and Lease, or files in a directory."""

import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from ballast_client.api_server import ApiServer, ChannelError
from ballast_client.messages import (
    ACK_ANNOTATION,
    END_REASON_ANNOTATION,
    FINISHED_ANNOTATION,
    PROPOSAL_ANNOTATION,
    REPORT_ANNOTATION,
)

FILES = {
    REPORT_ANNOTATION: "report.json",
    PROPOSAL_ANNOTATION: "proposal.json",
    ACK_ANNOTATION: "ack.json",
    FINISHED_ANNOTATION: "finished-step",
    END_REASON_ANNOTATION: "end-reason",
}
"""Annotation -> the file that holds the same in a directory."""


class Channel(Protocol):
    """Plans come in, messages go out; every call may raise :class:`ChannelError`."""

    def read(self, key: str) -> str | None:
        """The text of ``key``, such as ``plan.json``; None while there is none."""

    def write(self, annotations: Mapping[str, str], *, release: bool = False) -> None:
        """Renew the Lease with these messages; ``release``: and give it up."""


class Directory:
    """The channel without Kubernetes: one file for each message, replaced whole."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def read(self, key: str) -> str | None:
        """The text of a file; None: there is none."""
        try:
            return (self._path / key).read_text()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeError) as error:
            raise ChannelError(str(error)) from error

    def write(self, annotations: Mapping[str, str], *, release: bool = False) -> None:
        """One file for each message."""
        for name, text in annotations.items():
            self.replace(FILES[name], text)

    def replace(self, key: str, text: str) -> None:
        """A file with another text, in one rename: a reader sees whole files."""
        fresh = self._path / f".{key}.new"
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            fresh.write_text(text)
            fresh.replace(self._path / key)
        except OSError as error:
            raise ChannelError(str(error)) from error

    def close(self) -> None:
        """Nothing runs."""


class Kubernetes:
    """The job's ConfigMap and Lease on the API server; ``pod`` holds the Lease."""

    def __init__(self, api: ApiServer, *, namespace: str, job: str, pod: str) -> None:
        self._api = api
        self._config_map = f"/api/v1/namespaces/{namespace}/configmaps/{job}-plan"
        self._lease = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{job}"
        self._holder = pod

    def __str__(self) -> str:
        return self._config_map

    def newest(self) -> Mapping[str, Any] | None:
        """The ConfigMap ``<job>-plan``; None: there is none."""
        return self._api.request("GET", self._config_map)

    def read(self, key: str) -> str | None:
        """The text of one of its keys; None: there is none."""
        text = ((self.newest() or {}).get("data") or {}).get(key)
        return text if isinstance(text, str) else None

    def write(self, annotations: Mapping[str, str], *, release: bool = False) -> None:
        """One patch of the Lease ``<job>``."""
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="microseconds")  # noqa: UP017
        spec = {
            # A merge patch with None takes the holder away.
            "holderIdentity": None if release else self._holder,
            "renewTime": now.replace("+00:00", "Z"),
        }
        body = {"metadata": {"annotations": dict(annotations)}, "spec": spec}
        if self._api.request("PATCH", self._lease, body) is None:
            raise ChannelError(f"{self._lease} does not exist")

    def close(self) -> None:
        """Nothing runs."""


def find_channel(environment: Mapping[str, str]) -> Channel | None:
    """The channel that the environment names; None: the script runs away from Ballast."""
    if environment.get("BALLAST_CHANNEL"):
        return Directory(Path(environment["BALLAST_CHANNEL"]))
    pod = environment.get("BALLAST_JOB") and environment.get("BALLAST_NAMESPACE")
    if pod and (environment.get("KUBECONFIG") or environment.get("KUBERNETES_SERVICE_HOST")):
        namespace, job = environment["BALLAST_NAMESPACE"], environment["BALLAST_JOB"]
        holder = environment.get("BALLAST_POD_NAME") or job
        return Kubernetes(ApiServer.from_environment(environment), namespace=namespace, job=job, pod=holder)
    return None
