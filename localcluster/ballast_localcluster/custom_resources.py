"""Install CustomResourceDefinitions and wait until their kinds are served."""

import functools
from collections.abc import Sequence
from pathlib import Path

from ballast_localcluster.rest import Rest
from ballast_localcluster.waiting import Limit, wait_until

_PATH = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def install_custom_resources(rest: Rest, files: Sequence[Path]) -> None:
    """Apply every definition in the YAML files.

    Raises:
        CallError: the API server refuses one.
        TimeoutError: a kind is not established in time.
    """
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
