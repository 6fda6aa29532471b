"""References of a pod: its own fields, and the ConfigMaps and Secrets that it names."""

import base64
import re
from typing import Any

from ballast_localcluster.nodes.api import Api, ApiError, Manifest


class ConfigurationError(Exception):
    """A pod cannot start yet (or ever): something it refers to is missing or not emulated.

    The text becomes the message of the container's waiting state.
    """


class References:
    """Looks up what pods of one namespace refer to; one look-up an object for each use of this value."""

    def __init__(self, api: Api, namespace: str) -> None:
        self._api = api
        self._namespace = namespace
        self._found: dict[tuple[str, str], Manifest | None] = {}

    async def data(self, kind: str, source: Manifest) -> dict[str, bytes]:
        """Content of the ConfigMap or Secret (``kind``) that ``source`` names; none of an optional one."""
        name = source["secretName" if "secretName" in source else "name"]
        found = await self._get(f"{kind}s", name, source.get("optional", False)) or {}
        secret = kind == "secret"
        text = {} if secret else {key: value.encode() for key, value in (found.get("data") or {}).items()}
        encoded = (found.get("data" if secret else "binaryData") or {}).items()
        return text | {key: base64.b64decode(value) for key, value in encoded}

    async def _get(self, plural: str, name: str, optional: bool) -> Manifest | None:
        key = (plural, name)
        if key not in self._found:
            path = f"/api/v1/namespaces/{self._namespace}/{plural}/{name}"
            try:
                self._found[key] = await self._api.call_until_reached("GET", path)
            except ApiError as error:
                if error.status != 404:
                    raise ConfigurationError(str(error)) from error
                self._found[key] = None
        if self._found[key] is None and not optional:
            raise ConfigurationError(f'{plural.removesuffix("s")} "{name}" not found')
        return self._found[key]


_SUBSCRIPT = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")


def field_value(path: str, pod: Manifest, address: str, host_address: str) -> str:
    """The value of a downward-API field. Raises ConfigurationError: a path that the API does not have."""
    metadata, spec = pod["metadata"], pod["spec"]
    if match := _SUBSCRIPT.fullmatch(path):
        return str((metadata.get(match[1]) or {}).get(match[2], ""))
    if path in ("metadata.labels", "metadata.annotations"):
        values = metadata.get(path.removeprefix("metadata.")) or {}
        return "\n".join(f'{key}="{_escaped(value)}"' for key, value in sorted(values.items()))
    fields: dict[str, Any] = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "metadata.uid": metadata["uid"],
        "spec.nodeName": spec.get("nodeName", ""),
        "spec.serviceAccountName": spec.get("serviceAccountName", ""),
        "status.podIP": address,
        "status.podIPs": address,
        "status.hostIP": host_address,
        "status.hostIPs": host_address,
    }
    if path not in fields:
        raise ConfigurationError(f"fieldRef {path!r} is none of {', '.join(sorted(fields))}")
    return str(fields[path])


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
