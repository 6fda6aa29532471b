"""The environment of a container's process: small and clean, then what the pod asks for, as with kubelet."""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from ballast_localcluster.nodes.api import Manifest
from ballast_localcluster.nodes.pod_resources.references import ConfigurationError, References, field_value
from ballast_localcluster.supervision.processes import MARK_VARIABLE, PART_VARIABLE

POD_MARK_VARIABLE = "BALLAST_POD_UID"
"""Variable of every process of a pod: the pod's UID. It shows which are left when the pod ends."""

_INHERITED = (MARK_VARIABLE, PART_VARIABLE, "PYTHONPATH", "LD_LIBRARY_PATH")
"""The cluster's marks, and what this Python may need to start at all."""

_EXPANSION = re.compile(r"\$(?:\$|\(([A-Za-z_.\-][A-Za-z0-9_.\-]*)\))")
_NAME = re.compile(r"[A-Za-z_.\-][A-Za-z0-9_.\-]*")


def search_path() -> str:
    """PATH of a pod: the folder of this Python first, so that `ballast-train` is found, then the caller's."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def inherited_environment() -> dict[str, str]:
    """Variables that the agent hands on of its own environment."""
    return {name: os.environ[name] for name in _INHERITED if name in os.environ}


def base_environment(*, pod: Manifest, address: str, home: Path, temporary: Path) -> dict[str, str]:
    """Variables of every process of the pod, before its own."""
    return {
        "PATH": search_path(),
        "HOME": str(home),
        "TMPDIR": str(temporary),
        "LANG": "C.UTF-8",
        "HOSTNAME": pod["metadata"]["name"],
        # One thread a process: many pods share the machine's few cores.
        "OMP_NUM_THREADS": "1",
        "POD_IP": address,
        POD_MARK_VARIABLE: pod["metadata"]["uid"],
        **inherited_environment(),
    }


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Kubernetes' expansion: ``$(NAME)`` by its value, left alone where it has none; ``$$`` is a dollar."""

    def value(match: re.Match[str]) -> str:
        if match[1] is None:
            return "$"
        return variables.get(match[1], match[0])

    return _EXPANSION.sub(value, text)


async def declared_environment(
    container: Manifest,
    pod: Manifest,
    references: References,
    known: Mapping[str, str],
    *,
    address: str,
    host_address: str,
) -> tuple[dict[str, str], frozenset[str]]:
    """The container's ``envFrom`` and ``env``, in order, later ones winning and seeing earlier ones.

    ``references`` look up in the pod's namespace. ``known``: variables that are there already, which
    ``$(NAME)`` may use.

    Returns:
        the variables, and the names of those whose value stands literally in the pod.

    Raises:
        ConfigurationError: a reference is missing or not emulated.
    """
    declared: dict[str, str] = {}
    literal: set[str] = set()
    for source in container.get("envFrom") or []:
        kind = "configmap" if source.get("configMapRef") else "secret"
        data = await references.data(kind, source.get("configMapRef") or source["secretRef"])
        for key, content in data.items():
            if _NAME.fullmatch(name := source.get("prefix", "") + key):
                declared[name] = content.decode(errors="replace")
    for variable in container.get("env") or []:
        name = variable["name"]
        if source := variable.get("valueFrom"):
            value = await _referred(name, source, pod, references, address, host_address)
            if value is not None:
                declared[name] = value
            literal.discard(name)
        else:
            declared[name] = expand(variable.get("value") or "", {**known, **declared})
            literal.add(name)
    return declared, frozenset(literal)


async def _referred(
    name: str, source: Manifest, pod: Manifest, references: References, address: str, host_address: str
) -> str | None:
    if field := source.get("fieldRef"):
        return field_value(field["fieldPath"], pod, address, host_address)
    if reference := source.get("configMapKeyRef"):
        kind = "configmap"
    elif reference := source.get("secretKeyRef"):
        kind = "secret"
    else:
        raise ConfigurationError(f"env {name}: process nodes do not emulate {', '.join(source)}")
    data = await references.data(kind, reference)
    if reference["key"] not in data:
        if reference.get("optional", False):
            return None
        raise ConfigurationError(f"couldn't find key {reference['key']} in {kind} {reference['name']}")
    return data[reference["key"]].decode(errors="replace")
