"""Kubernetes manifests from files of users: YAML as ``kubectl`` reads it, within limits."""

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from ballast_policies.contract.errors import ContractError
from ballast_policies.contract.limits import OBJECT
from ballast_policies.contract.yaml_text import parse_documents

MOST_VALUES = 200_000
MOST_LEVELS = 50


def read_manifests(file: str) -> list[dict[str, Any]]:
    """Objects of a YAML or JSON file; ``-``: standard input. Raises ClickException: they are none."""
    where = "standard input" if file == "-" else file
    try:
        documents = parse_documents(OBJECT.text(sys.stdin.buffer) if file == "-" else OBJECT.read(Path(file)))
    except OSError as error:
        raise click.ClickException(f"{where}: {error.strerror}. To fix: name a file of YAML") from error
    except ContractError as error:
        raise click.ClickException(f"{where}: {error}") from error
    items: list[Any] = []
    for document in documents:
        listed = isinstance(document, dict) and document.get("kind") == "List"
        items += document.get("items") or [] if listed else [document]
    if not items:
        raise click.ClickException(f"{where} holds no manifest. To fix: name a file of YAML")
    problem = next((found for item in items if (found := _problem(item))), "")
    if problem:
        raise click.ClickException(f"{where}: {problem}")
    return items


def title(item: Mapping[str, Any]) -> str:
    """``KIND NAME`` of a manifest, as far as it has them, for a line about it."""
    metadata = item.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    return f"{item.get('kind') or 'an object without kind'!s:.60} {name or 'without name'!s:.80}"


def _problem(item: Any) -> str:
    """Reason that a value is no manifest; empty: it may be one."""
    if not isinstance(item, dict):
        return f"{item!r:.80} is no manifest. To fix: an object with apiVersion, kind and metadata"
    left, values = [(item, "", 0)], 0
    while left:
        value, path, level = left.pop()
        values += 1
        if values > MOST_VALUES or level > MOST_LEVELS:
            return f"{path:.80}: more than {MOST_VALUES} values or {MOST_LEVELS} levels. To fix: fewer"
        if isinstance(value, dict):
            for key, part in value.items():
                if not isinstance(key, str):
                    return f"{path:.80}: the key {key!r:.40} is no text. To fix: put it in quotes"
                left.append((part, f"{path}.{key}".lstrip("."), level + 1))
        elif isinstance(value, list):
            left += [(part, f"{path}[{index}]", level + 1) for index, part in enumerate(value)]
        elif isinstance(value, float) and not math.isfinite(value):
            return f"{path:.80}: {value} is no number that JSON has. To fix: a finite one"
        elif not isinstance(value, str | int | float | None):
            return f"{path:.80}: {type(value).__name__} is no value that JSON has. To fix: leave its tag out"
    return ""
