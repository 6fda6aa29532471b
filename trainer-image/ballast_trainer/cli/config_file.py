"""The file that ``--config`` names, with what ``--set`` changes in it."""

import sys
from pathlib import Path
from typing import Any

import yaml

from ballast_trainer.config_reading import camel
from ballast_trainer.errors import ConfigurationError


def read_config(path: Path, assignments: tuple[str, ...]) -> dict[str, Any]:
    """The configuration of a YAML or JSON file, with ``key.key=value`` assignments made.

    From then on modules beside the file and in the working directory can be imported, so that a
    ``module:callable`` may name them.

    Raises:
        ConfigurationError: the file or an assignment cannot be read.
    """
    try:
        value = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigurationError("--config", f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigurationError("--config", f"{path} is not a mapping")
    for assignment in assignments:
        _assign(value, assignment)
    for folder in (str(Path.cwd()), str(path.resolve().parent)):
        if folder not in sys.path:
            sys.path.append(folder)
    return value


def _assign(config: dict[str, Any], assignment: str) -> None:
    key, equals, text = assignment.partition("=")
    if not equals:
        raise ConfigurationError("--set", f"{assignment!r} is not key=value")
    *parents, last = _spelled(key)
    target = config
    for parent in parents:
        if target.get(parent) is None:
            target[parent] = {}
        target = target[parent]
        if not isinstance(target, dict):
            raise ConfigurationError("--set", f"{key!r}: {parent!r} is not an object")
    try:
        target[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigurationError("--set", f"{key!r}: {text!r} is not YAML ({error})") from error


def _spelled(key: str) -> list[str]:
    """The parts of a dotted key in camelCase; below ``args`` as they are, since those are Python's names."""
    parts = key.split(".")
    fixed = parts.index("args") + 1 if "args" in parts else len(parts)
    return [camel(part) for part in parts[:fixed]] + parts[fixed:]
