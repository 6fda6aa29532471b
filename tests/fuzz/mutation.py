"""Changes of valid input that an enemy or a fault would make, from a stream of choices.

The choices come from hypothesis in the tests, and from libFuzzer's bytes in ``scripts/fuzz``: both then
shrink, replay and steer the same changes.
"""

import copy
import json
from collections.abc import Callable
from typing import Any

Choose = Callable[[int], int]
"""A number from 0 up to, and without, the given one."""

HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 2**31, 2**53 + 1, 10**30, -(10**30), 0.5, 1e-320, 1e308, -1e308,
    float("nan"), float("inf"), float("-inf"), "", " ", "0", "-1", "1e999", "nan", "\u00b2", "\u0663",
    "\ud800", "\x00", "a" * 300, "../../etc/passwd", "{}", "[" * 2000, "9" * 5000, "2k", "1e6", "\u2028",
    "os:system", "module.sub:name.other", "TRUE", "2030-13-41T25:61:61Z", [], {}, [[]], [{}], [None],
    {"": None}, {"a": {"a": {"a": []}}}, ["x"] * 100,
)  # fmt: skip
"""Values that parsers have failed on, somewhere."""


OPTIONAL = frozenset(
    {"labels", "annotations", "taints", "value", "timeAdded", "unschedulable", "allocatable", "capacity"}
    | {"conditions", "reason", "message", "phase", "podIP", "nodeName", "resources", "limits"}
    | {"containerStatuses", "state", "terminated", "deletionTimestamp"}
)  # fmt: skip
"""Fields of core objects that the API server lets be absent."""


def mutated(document: Any, choose: Choose) -> Any:
    """A copy of a valid JSON document with up to six changes, ``choose`` says which."""
    result = copy.deepcopy(document)
    for _ in range(choose(7)):
        result = _changed(result, choose)
    return result


def mutated_within_schema(document: Any, choose: Choose) -> Any:
    """The same, with only such changes as the API server's own schemas let through: texts and numbers of any
    value, and optional fields left out."""
    result = copy.deepcopy(document)
    for _ in range(choose(7)):
        places = list(_places(result))
        where, key = places[choose(len(places))]
        if key in OPTIONAL and choose(2) == 0:
            del where[key]
        elif isinstance(where[key], str | int):
            alike = [one for one in HOSTILE if type(one) is type(where[key])]
            where[key] = alike[choose(len(alike))]
    return result


def _changed(document: Any, choose: Choose) -> Any:
    places = list(_places(document))
    if not places:
        return copy.deepcopy(HOSTILE[choose(len(HOSTILE))])
    where, key = places[choose(len(places))]
    change = choose(4)
    if change == 0:
        del where[key]
    elif change == 1 and isinstance(where, list):
        where.insert(choose(len(where) + 1), copy.deepcopy(where[key]))
    elif change == 2:
        other, at = places[choose(len(places))]
        where[key] = copy.deepcopy(other[at])
    else:
        where[key] = copy.deepcopy(HOSTILE[choose(len(HOSTILE))])
    return document


def _places(document: Any) -> Any:
    """(container, key) of every value inside."""
    if isinstance(document, dict):
        for key, value in list(document.items()):
            yield document, key
            yield from _places(value)
    elif isinstance(document, list):
        for index, value in enumerate(document):
            yield document, index
            yield from _places(value)


def as_json(document: Any, choose: Choose) -> str:
    """The document's text; now and then torn, or with a byte changed."""
    text = json.dumps(document)
    change = choose(8)
    if change == 0:
        return text[: choose(len(text) + 1)]
    if change == 1 and text:
        at = choose(len(text))
        return text[:at] + '{}[]",:0-eEnN\\\x00\ud800'[choose(16)] + text[at + 1 :]
    return text
