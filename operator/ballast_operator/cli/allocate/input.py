"""Reads the input of ``ballast allocate``: JSON to a Problem, strictly."""

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ballast_policies.allocation.problem import Entity, Job, Pair, Problem, ProblemError

PROBLEM_KEYS = ("gpu_types", "capacity", "prices", "entities", "jobs", "pairs")
JOB_KEYS = tuple(field.name for field in dataclasses.fields(Job))
WHOLE = ("gpus",)
TEXTS = ("name", "entity")
SMALLEST, LARGEST = 1e-9, 1e15
"""Numbers other than 0 must lie between: no speed, price, weight or time of a cluster does not."""


def read_problem(text: str) -> Problem:
    """The problem that a JSON text poses.

    Raises:
        ProblemError: not JSON, an unknown or missing key, or an impossible value; the text names the field.
    """
    try:
        value = json.loads(text, object_pairs_hook=_without_repeats)
    except ProblemError:
        raise
    except (ValueError, RecursionError) as error:
        raise ProblemError(f"the input is not JSON: {error}") from error
    _object(value, "the input", PROBLEM_KEYS, required=("gpu_types", "capacity", "jobs"))
    gpu_types = tuple(_text(item, f"gpu_types[{i}]") for i, item in enumerate(_list(value, "gpu_types")))
    capacity = _by_type(value["capacity"], "capacity", gpu_types, _whole)
    return Problem(
        gpu_types=gpu_types,
        capacity={gpu_type: capacity.get(gpu_type, 0) for gpu_type in gpu_types},
        jobs=tuple(_job(item, f"jobs[{i}]", gpu_types) for i, item in enumerate(_list(value, "jobs"))),
        prices=_by_type(value.get("prices", {}), "prices", gpu_types, _number),
        entities=_entities(value.get("entities", {})),
        pairs=tuple(
            _pair(item, f"pairs[{i}]", gpu_types) for i, item in enumerate(_list(value, "pairs", default=[]))
        ),
    )


def _without_repeats(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of the text; JSON itself would let the last of several equal keys win without a word."""
    found: dict[str, Any] = {}
    for key, value in items:
        if key in found:
            raise ProblemError(f"{key}: given twice in one object. To fix: give it once")
        found[key] = value
    return found


def _job(value: Any, where: str, gpu_types: tuple[str, ...]) -> Job:
    _object(value, where, JOB_KEYS, required=("name", "throughput"))
    fields: dict[str, Any] = {}
    for key, item in value.items():
        place = f"{where}.{key}"
        if key == "throughput":
            fields[key] = _by_type(item, place, gpu_types, _number)
        elif item is None and key in ("entity", "steps_remaining", "deadline"):
            fields[key] = None
        elif key in TEXTS:
            fields[key] = _text(item, place)
        else:
            fields[key] = _whole(item, place) if key in WHOLE else _number(item, place)
    return Job(**fields)


def _pair(value: Any, where: str, gpu_types: tuple[str, ...]) -> Pair:
    _object(value, where, ("jobs", "throughput"), required=("jobs", "throughput"))
    names = _list(value, "jobs", where=where)
    if len(names) != 2:
        raise ProblemError(f"{where}.jobs: {names!r} must be the names of two jobs")
    return Pair(
        jobs=(_text(names[0], f"{where}.jobs[0]"), _text(names[1], f"{where}.jobs[1]")),
        throughput=_by_type(value["throughput"], f"{where}.throughput", gpu_types, _two_numbers),
    )


def _entities(value: Any) -> dict[str, Entity]:
    if not isinstance(value, dict):
        raise ProblemError(f"entities: expected an object, got {value!r}")
    found = {}
    for name, item in value.items():
        where = f"entities.{name}"
        _object(item, where, ("weight", "policy", "parent"))
        fields: dict[str, Any] = {}
        if "weight" in item:
            fields["weight"] = _number(item["weight"], f"{where}.weight")
        if "policy" in item:
            fields["policy"] = _text(item["policy"], f"{where}.policy")
        if item.get("parent") is not None:
            fields["parent"] = _text(item["parent"], f"{where}.parent")
        found[name] = Entity(**fields)
    return found


def _object(
    value: Any, where: str, allowed: tuple[str, ...], required: tuple[str, ...] = ()
) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ProblemError(f"{where}: expected an object, got {value!r}")
    for key in value:
        if key not in allowed:
            raise ProblemError(f"{where}: unknown key {key!r}; known are {', '.join(allowed)}")
    for key in required:
        if key not in value:
            raise ProblemError(f"{where}: {key!r} is missing")
    return value


def _list(value: Mapping[str, Any], key: str, *, where: str = "", default: Any = None) -> list[Any]:
    item = value.get(key, default)
    if not isinstance(item, list):
        raise ProblemError(f"{where + '.' if where else ''}{key}: expected a list, got {item!r}")
    return item


def _by_type(
    value: Any, where: str, gpu_types: tuple[str, ...], read: Callable[[Any, str], Any]
) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ProblemError(f"{where}: expected an object by GPU type, got {value!r}")
    for key in value:
        if key not in gpu_types:
            raise ProblemError(f"{where}.{key}: {key!r} is not one of gpu_types {list(gpu_types)}")
    return {key: read(item, f"{where}.{key}") for key, item in value.items()}


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise ProblemError(f"{where}: expected a text, got {value!r}")
    return value


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ProblemError(f"{where}: expected a number, got {value!r}")
    return float(_within_limits(value, where))


def _whole(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ProblemError(f"{where}: expected a whole number, got {value!r}")
    return int(_within_limits(value, where))


def _within_limits(value: float, where: str) -> float:
    """Beyond these limits sums lose what they are made of; NaN is left to the problem, which refuses it."""
    if abs(value) > LARGEST or 0 < abs(value) < SMALLEST:
        raise ProblemError(
            f"{where}: {value:.0e} is not between {SMALLEST:g} and {LARGEST:g}. To fix: other units"
            if abs(value) <= sys.float_info.max
            else f"{where}: a number beyond {LARGEST:g} is impossible"
        )
    return value


def _two_numbers(value: Any, where: str) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise ProblemError(f"{where}: expected two numbers, got {value!r}")
    return _number(value[0], f"{where}[0]"), _number(value[1], f"{where}[1]")
