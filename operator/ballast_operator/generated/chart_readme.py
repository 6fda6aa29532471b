"""README of the Helm chart: its values with their comments, from ``values.yaml``."""

import json
from collections.abc import Iterator

import yaml

_HEAD = """# Helm chart of Ballast

<!-- Generated from values.yaml by `make generate`. Edit the comments there. -->

Installs the operator with its custom resource definitions, permissions and admission policies:

```console
$ helm install ballast charts/ballast --namespace ballast-system --create-namespace
$ helm test ballast --namespace ballast-system
```

[Install on a cluster](../../docs/install.md) has images, the first steps, upgrades and removal.

A value that is not in this table is refused.

| value | default | what |
|---|---|---|
"""


def chart_readme(values: str) -> str:
    """The page for the text of ``values.yaml``: two spaces a level, comments above their key."""
    defaults = yaml.safe_load(values)
    keys = list(_keys(values))
    groups = {path[:depth] for path, _ in keys for depth in range(1, len(path))}
    rows = []
    for path, what in keys:
        default = "" if path in groups else f"`{json.dumps(_at(defaults, path))}`"
        if default or what:
            rows.append(f"| `{'.'.join(path)}` | {default} | {what} |\n")
    return _HEAD + "".join(rows)


def _keys(values: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Each key with the comment above it, in the file's order."""
    path: list[str] = []
    comment: list[str] = []
    for line in values.splitlines():
        text = line.strip()
        if not text:
            comment = []
        elif text.startswith("#"):
            comment.append(text.removeprefix("#").strip())
        elif not text.startswith("-"):
            depth = (len(line) - len(line.lstrip())) // 2
            path = [*path[:depth], text.partition(":")[0]]
            yield tuple(path), " ".join(comment).replace("|", "\\|")
            comment = []


def _at(defaults: object, path: tuple[str, ...]) -> object:
    for key in path:
        assert isinstance(defaults, dict)
        defaults = defaults[key]
    return defaults
