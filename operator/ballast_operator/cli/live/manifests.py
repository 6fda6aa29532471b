"""Kubernetes manifests from files of users: YAML as ``kubectl`` reads it, within limits."""

import math
import sys
from pathlib import Path
from typing import Any

import click
import yaml

MOST_BYTES = 1024 * 1024
MOST_VALUES = 200_000
MOST_LEVELS = 50


class _Loader(yaml.SafeLoader):
    """Times stay texts, as in JSON."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - as in the base class
        first: [(tag, pattern) for tag, pattern in rows if tag != "tag:yaml.org,2002:timestamp"]
        for first, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def read_manifests(file: str) -> list[dict[str, Any]]:
    """Objects of a YAML or JSON file; ``-``: standard input. Raises ClickException: they are none."""
    where = "standard input" if file == "-" else file
    try:
        if file == "-":
            data = sys.stdin.buffer.read(MOST_BYTES + 1)
        else:
            with Path(file).open("rb") as handle:
                data = handle.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise click.ClickException(
                f"{where}: more than {MOST_BYTES >> 20} MiB. To fix: a file with fewer manifests"
            )
        documents = [found for found in yaml.load_all(data, _Loader) if found is not None]
    except OSError as error:
        raise click.ClickException(f"{where}: {error.strerror}. To fix: name a file of YAML") from error
    # What is no text, a number of thousands of digits, or nested too deeply.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        text = " ".join(str(error).split())
        raise click.ClickException(f"{where} is not YAML: {text:.300}. To fix: correct it") from error
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
