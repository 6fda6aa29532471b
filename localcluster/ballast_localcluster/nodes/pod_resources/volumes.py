"""A pod's volumes as directories of the pod's folder.

ConfigMap, Secret, emptyDir, hostPath, downwardAPI and projected volumes.  Contents are those at the pod's
start; service-account tokens are kept fresh.
"""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ballast_localcluster.nodes.api import Api, ApiError, Manifest
from ballast_localcluster.nodes.pod_resources.environment import expand
from ballast_localcluster.nodes.pod_resources.references import ConfigurationError, References, field_value

MOUNT_PATH = "/var/run/secrets/kubernetes.io/serviceaccount"
_DEFAULT_SECONDS = 3600
_REFRESH_FRACTION = 0.8


async def write_token(api: Api, pod: Manifest, source: Manifest, path: Path) -> float:
    """Ask for a token of the pod's service account, bound to the pod, and write it.

    ``source``: a ``serviceAccountToken`` projection: ``audience``, ``expirationSeconds``.

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


log = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class Token:
    """A token file, and when it is to be written again (Unix time)."""

    path: Path
    source: Manifest
    refresh_at: float


class Volumes:
    """The volumes of one pod, each in a directory of its own in ``folder``."""

    def __init__(self, api: Api, pod: Manifest, folder: Path, address: str, host_address: str) -> None:
        self._api = api
        self._pod = pod
        self._folder = folder
        self._addresses = (address, host_address)
        self._tokens: list[Token] = []
        self.paths: dict[str, Path] = {}

    async def realise(self, references: References) -> None:
        """Make all of them; what was made before is made again.

        Raises:
            ConfigurationError: something is missing, or of a kind that is not emulated.
        """
        self._tokens.clear()
        for volume in self._pod["spec"].get("volumes") or []:
            self.paths[volume["name"]] = await self._realise(volume, references)

    async def keep_tokens_fresh(self) -> None:
        """Write tokens again before they expire, until cancelled."""
        while self._tokens:
            soonest = min(self._tokens, key=lambda token: token.refresh_at)
            await asyncio.sleep(max(0.0, soonest.refresh_at - time.time()))
            try:
                soonest.refresh_at = await write_token(self._api, self._pod, soonest.source, soonest.path)
            except ApiError as error:
                log.warning("token of pod %s: %s", self._pod["metadata"]["name"], error)
                soonest.refresh_at = time.time() + 10

    async def _realise(self, volume: Manifest, references: References) -> Path:
        name: str = volume["name"]
        directory = self._folder / name
        kind = next(key for key in volume if key != "name")
        source = volume[kind]
        if kind == "hostPath":
            return _host_path(name, source)
        directory.mkdir(parents=True, exist_ok=True)
        for part in source.get("sources") or [] if kind == "projected" else []:
            projected, of = next(iter(part.items()))
            if not await self._write(directory, projected, of, references):
                raise ConfigurationError(f"process nodes do not emulate the projection {', '.join(part)}")
        known = kind in ("emptyDir", "projected") or await self._write(directory, kind, source, references)
        if not known:
            raise ConfigurationError(
                f"volume {name}: process nodes do not emulate {kind}. "
                "To fix: use emptyDir, hostPath, configMap, secret, downwardAPI or projected."
            )
        return directory

    async def _write(self, directory: Path, kind: str, source: Manifest, references: References) -> bool:
        """Write what a volume, or a part of a projected one, has; False: such are not emulated."""
        match kind:
            case "configMap" | "secret":
                data = await references.data(kind.lower(), source)
                what = f"{kind.lower()} {source.get('secretName') or source['name']}"
                _write_items(directory, source, data, what)
            case "downwardAPI":
                self._write_fields(directory, source)
            case "serviceAccountToken":
                path = _inside(directory, source["path"])
                try:
                    refresh_at = await write_token(self._api, self._pod, source, path)
                except ApiError as error:
                    raise ConfigurationError(f"token: {error}") from error
                self._tokens.append(Token(path, source, refresh_at))
            case _:
                return False
        return True

    def _write_fields(self, directory: Path, source: Manifest) -> None:
        for item in source.get("items") or []:
            if "fieldRef" not in item:
                raise ConfigurationError(f"downwardAPI {item['path']}: only fieldRef is emulated")
            value = field_value(item["fieldRef"]["fieldPath"], self._pod, *self._addresses)
            _inside(directory, item["path"]).write_text(value)


def mounts_of(
    container: Manifest, volumes: Mapping[str, Path], variables: Mapping[str, str]
) -> dict[str, Path]:
    """Container path -> real path of each volume mount.

    ``volumes``: name -> real path. ``variables``: what ``subPathExpr`` may refer to.

    Raises:
        ConfigurationError: a sub-path that leads out of its volume, or refers to an unknown variable.
    """
    mounts = {}
    for mount in container.get("volumeMounts") or []:
        real = volumes[mount["name"]]
        inner = mount.get("subPath") or expand(mount.get("subPathExpr", ""), variables)
        if "$(" in inner:
            raise ConfigurationError(
                f"subPathExpr {mount['subPathExpr']!r} of mount {mount['name']} refers to a variable that "
                f"container {container['name']} does not declare"
            )
        if inner:
            real = _inside(real, inner)
            if not real.exists():
                real.mkdir(parents=True)
        mounts[mount["mountPath"]] = real
    return mounts


def _write_items(directory: Path, source: dict[str, Any], data: dict[str, bytes], what: str) -> None:
    items = source.get("items")
    wanted = {item["key"]: item["path"] for item in items} if items else {key: key for key in data}
    for key, path in wanted.items():
        if key not in data:
            if source.get("optional", False):
                continue
            raise ConfigurationError(f"{what} has no key {key}")
        _inside(directory, path).write_bytes(data[key])


def _inside(directory: Path, path: str) -> Path:
    target = directory / path
    if Path(path).is_absolute() or ".." in Path(path).parts:
        raise ConfigurationError(f"path {path!r} leads out of its volume")
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def _host_path(name: str, source: Manifest) -> Path:
    path, kind = Path(source["path"]), source.get("type", "")
    if kind == "DirectoryOrCreate":
        path.mkdir(parents=True, exist_ok=True)
    elif kind == "FileOrCreate":
        path.touch()
    elif (kind == "Directory" and not path.is_dir()) or (kind == "File" and not path.is_file()):
        raise ConfigurationError(f"volume {name}: hostPath {path} is no {kind.lower()}")
    return path
