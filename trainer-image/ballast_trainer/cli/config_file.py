"""Options ``--config`` and ``--set`` of the commands, and the reading of the file that they name."""

import sys
from pathlib import Path
from typing import Any

import click
from ballast_policies.contract.errors import ContractError, camel, shown
from ballast_policies.contract.limits import OBJECT
from ballast_policies.contract.yaml_text import parse_yaml

from ballast_trainer.errors import ConfigurationError

CONFIG = click.option(
    "--config", "config_path", type=click.Path(path_type=Path), required=True, help="YAML or JSON file."
)
ASSIGNMENTS = click.option(
    "--set", "assignments", multiple=True, metavar="KEY=VALUE", help="Override a field, e.g. totalSteps=20."
)


def read_config(path: Path, assignments: tuple[str, ...]) -> dict[str, Any]:
    """The configuration of a YAML or JSON file, with ``key.key=value`` assignments made.

    From then on modules beside the file and in the working directory can be imported, so that a
    ``module:callable`` may name them.

    Raises:
        ConfigurationError: the file or an assignment cannot be read.
    """
    try:
        value = parse_yaml(OBJECT.read(path))
    except (OSError, ContractError) as error:
        reason = f"cannot read {path}: {error}. To fix: a file of YAML or JSON"
        raise ConfigurationError("--config", reason) from error
    if not isinstance(value, dict):
        reason = f"{path} is not a mapping. To fix: begin with totalSteps: and model:"
        raise ConfigurationError("--config", reason)
    for assignment in assignments:
        _assign(value, assignment)
    for folder in (str(Path.cwd()), str(path.resolve().parent)):
        if folder not in sys.path:
            sys.path.append(folder)
    return value


def _assign(config: dict[str, Any], assignment: str) -> None:
    key, equals, text = assignment.partition("=")
    if not equals or not key:
        reason = f"{assignment!r} is not key=value. To fix: e.g. --set pipeline.microbatches=4"
        raise ConfigurationError("--set", reason)
    *parents, last = _spelled(key)
    target: Any = config
    for parent in parents:
        place = _place(key, target, parent)
        if isinstance(target, dict) and target.get(place) is None:
            target[place] = {}
        target = target[place]
        if not isinstance(target, dict | list):
            reason = f"{key!r}: {parent!r} is {shown(target)}, no object. To fix: a field of an object"
            raise ConfigurationError("--set", reason)
    try:
        target[_place(key, target, last)] = parse_yaml(text)
    except ContractError as error:
        reason = f"{key!r}: {shown(text)} is not YAML ({error}). To fix: a value as in the file"
        raise ConfigurationError("--set", reason) from error


def _place(key: str, target: Any, part: str) -> Any:
    """Key that ``part`` selects in a mapping, or, as a number from 0, in a list."""
    if isinstance(target, dict):
        return part
    if not part.isdecimal() or int(part) >= len(target):
        reason = f"{key!r}: {part!r} is no place in a list of {len(target)}. To fix: a number from 0"
        raise ConfigurationError("--set", reason)
    return int(part)


def _spelled(key: str) -> list[str]:
    """The parts of a dotted key in camelCase; below ``args`` unchanged, since those are Python's names."""
    parts = key.split(".")
    fixed = parts.index("args") + 1 if "args" in parts else len(parts)
    return [camel(part) for part in parts[:fixed]] + parts[fixed:]
