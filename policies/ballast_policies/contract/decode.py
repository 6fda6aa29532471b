"""Reader from JSON to values: the one door for messages, configurations and inputs of commands.

pydantic checks types and bounds, strictly: a truth value is no number, text is no number, a whole number is a
float where one is expected.  Here stands what it does not have: keys that are given twice, numbers that JSON
or 64 bits do not have, halves of characters, size and depth of a text, a null that stands for a field left
out, and words that say what to change.  Problems of a value are told together, so that a user corrects them
in one go.
"""

import dataclasses
import enum
import functools
import itertools
import json
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic.fields import FieldInfo

from ballast_policies.contract.errors import (
    ContractError,
    Problem,
    camel,
    join_path,
    not_among,
    shown,
    suggestion,
)
from ballast_policies.contract.limits import FILE, MESSAGE, Limits

T = TypeVar("T")
Unknown = Literal["ignore", "refuse"]

Spelling = Callable[[str], str]
"""Function from a field's name to its key."""

_MOST_WHOLE = 2**63 - 1
_DIGITS = 20
"""Longest decimal of a whole number of 64 bits, its sign included."""
_MOST_VALUES = 2_000_000
"""Parts of a value from YAML, which may refer to one part many times: a few bytes would take minutes."""
_MOST_PROBLEMS = 100
"""Problems that are told of a value; a report may have a hundred thousand."""
_DEEPEST = 2 * MESSAGE.depth
"""Levels of a value that is no text; parts of any shape are held to those of a message."""

STRICT = ConfigDict(
    strict=True, extra="forbid", allow_inf_nan=False, frozen=True, validate_by_name=True, defer_build=True
)
"""Settings of all models that are read. Schemas are built at first use, so that a process starts without."""


def decode(
    kind: type[T],
    value: Any,
    *,
    unknown: Unknown = "refuse",
    path: str = "",
    spelling: Spelling = camel,
    parsed: bool = False,
) -> T:
    """``value``, as JSON or YAML has it, as a ``kind``.

    Args:
        kind: a :class:`~ballast_policies.contract.model.Model`, a dataclass, or any type that pydantic reads.
        value: made of dict, list, str, int, float, bool and None.
        unknown: what becomes of keys that ``kind`` has no field for: ``ignore`` for messages, so that two
            releases understand each other; ``refuse`` for what people write.
        path: of ``value`` itself, for the problems' paths.
        spelling: of the keys of a dataclass.
        parsed: whether it was read from JSON, and so has nothing that JSON has not.

    Raises:
        ContractError: the value does not fit.
    """
    if not parsed:
        _refuse(_faults(value, path, _DEEPEST, iter(range(_MOST_VALUES))))
    return _validated(kind, json.dumps(value), value, unknown, path, spelling)


def decode_text(
    kind: type[T],
    text: str,
    *,
    unknown: Unknown = "refuse",
    path: str = "",
    limits: Limits = FILE,
    spelling: Spelling = camel,
) -> T:
    """``text``, which is JSON, as a ``kind``; arguments as of :func:`decode` and :func:`parse_json`.

    Raises:
        ContractError: it is not JSON (NaN, a key given twice and a number of thousands of digits are not),
            is above the limits, or does not fit.
    """
    value = parse_json(text, path=path, limits=limits)
    return _validated(kind, text, value, unknown, path, spelling)


def parse_json(text: str, *, path: str = "", limits: Limits = FILE) -> Any:
    """JSON, without what Python adds to it.

    ``path``: of the value, for the problems' paths.

    Raises:
        ContractError: the text is not JSON, is longer or nested more deeply than ``limits`` allow, gives a
            key twice, has half of a character, or a number that is not finite or beyond 64 bits.
    """
    problem = limits.problem(text)
    if problem:
        raise ContractError(Problem(path, problem))
    try:
        value = json.loads(
            text,
            object_pairs_hook=_each_key_once,
            parse_constant=lambda name: _Refused(f"not JSON: {name} is no number of JSON"),
            # Most texts have no such number, and are read without a call for each.
            parse_float=_finite if _LARGE_EXPONENT.search(text) else None,
            parse_int=_whole if _LONG_NUMBER.search(text) else None,
        )
    except (ValueError, RecursionError) as error:
        raise ContractError(Problem(path, f"not JSON: {error}")) from error
    _refuse(_refused(value, path))
    if _HALF.search(text):
        _refuse(_faults(value, path, limits.depth + 1, itertools.repeat(0)))
    return value


def _refuse(problems: Iterator[Problem]) -> None:
    """Raise ContractError if there are any."""
    found = list(itertools.islice(problems, _MOST_PROBLEMS))
    if found:
        raise ContractError(found)


_LARGE_EXPONENT = re.compile(r"[eE]\+?[0-9]{3}|[0-9]{200}")
_LONG_NUMBER = re.compile(r"[0-9]{19}")
_HALF = re.compile("\\\\u[dD][89a-fA-F]|[\ud800-\udfff]")


@dataclasses.dataclass(frozen=True, slots=True)
class _Refused:
    """Stands in a value for what JSON does not have: the reason is reported with its path."""

    reason: str


def _refused(value: Any, path: str) -> Iterator[Problem]:
    """One for each value of the tree that was refused while the text was read."""
    if type(value) is _Refused:
        yield Problem(path, value.reason)
    elif type(value) is dict:
        for key, item in value.items():
            if type(item) in _NOT_LEAVES:
                yield from _refused(item, join_path(path, key))
    elif type(value) is list:
        for index, item in enumerate(value):
            if type(item) in _NOT_LEAVES:
                yield from _refused(item, f"{path}[{index}]")


_NOT_LEAVES = {dict, list, _Refused}


def _each_key_once(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON itself would let the last of several equal keys win, silently."""
    found = dict(items)
    if len(found) < len(items):
        seen: set[str] = set()
        for key, _ in items:
            if key in seen:
                found[key] = _Refused("given twice in one object. To fix: give it once")
            seen.add(key)
    return found


def _finite(digits: str) -> Any:
    number = float(digits)
    if not math.isfinite(number):
        return _Refused(f"the number {digits[:_DIGITS]} is beyond what a computer's number holds")
    return number


def _whole(digits: str) -> Any:
    if len(digits) > _DIGITS or not -_MOST_WHOLE <= (number := int(digits)) <= _MOST_WHOLE:
        return _Refused(f"the whole number {digits[:_DIGITS]} is beyond 64 bits")
    return number


def _faults(value: Any, path: str, depth: int, budget: Iterator[int]) -> Iterator[Problem]:
    """Values that JSON cannot express: keys and leaves of other types, halves of characters."""
    if next(budget, None) is None:
        raise ContractError(
            Problem(path, f"more than {_MOST_VALUES} values. To fix: fewer, or fewer aliases of YAML")
        )
    if isinstance(value, str):
        if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
            yield Problem(path, _expected("text", "half of a pair of surrogates"))
    elif isinstance(value, float):
        if not math.isfinite(value):
            yield Problem(path, _expected("a number", shown(value)))
    elif value is None or isinstance(value, bool):
        pass
    elif isinstance(value, int):
        if not -_MOST_WHOLE <= value <= _MOST_WHOLE:
            reason = f"a whole number of {value.bit_length()} bits is beyond 64 bits"
            yield Problem(path, f"{reason}. To fix: a smaller one")
    elif depth == 0:
        here = ".".join(path.split(".")[:3])
        raise ContractError(Problem(here, f"nested deeper than {MESSAGE.depth} levels. To fix: fewer levels"))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if isinstance(key, str):
                yield from _faults(key, path, depth, budget)
                yield from _faults(item, join_path(path, key), depth - 1, budget)
            else:
                yield Problem(path, _expected("keys of text", shown(key)))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _faults(item, f"{path}[{index}]", depth - 1, budget)
    else:
        yield Problem(path, _expected("what JSON has (text, a number, a list, ...)", shown(value)))


@functools.cache
def _wrapped(kind: Any, spelling: Spelling) -> type[BaseModel]:
    """A model of one field, ``value``, which gives its strictness to what is no model itself."""
    config = ConfigDict(**STRICT, alias_generator=spelling)
    return create_model("Value", __config__=config, value=(kind, ...))


def _validated(kind: type[T], text: str, value: Any, unknown: Unknown, path: str, spelling: Spelling) -> T:
    """``text`` as a ``kind``; ``value`` is what it says."""
    reader: Any = kind
    if not _is_model(kind):
        reader, text = _wrapped(cast("Any", kind), spelling), f'{{"value":{text}}}'
    extra: Any = "ignore" if unknown == "ignore" else None
    try:
        read = reader.model_validate_json(text, extra=extra, by_alias=True, by_name=False)
    except ValidationError as error:
        details = error.errors(include_url=False)
        if reader is not kind:
            details = [{**detail, "loc": detail["loc"][1:]} for detail in details]
        nulls = [detail["loc"] for detail in details if _null(kind, detail, spelling)]
        if not nulls:
            found = [
                problem.below(path)
                for detail in details[:_MOST_PROBLEMS]
                for problem in _problems(detail, _Place.at(kind, detail["loc"], spelling))
            ]
            if len(details) > _MOST_PROBLEMS:
                found.append(Problem(path, f"{len(details) - _MOST_PROBLEMS} more problems"))
            raise ContractError(found) from error
    else:
        return cast("T", read if reader is kind else read.value)
    value = _without(value, nulls)
    return _validated(kind, json.dumps(value), value, unknown, path, spelling)


def problems_of(kind: type[BaseModel], error: ValidationError) -> list[Problem]:
    """Each error of pydantic's in the contract's words."""
    return [
        problem
        for detail in error.errors(include_url=False)
        for problem in _problems(detail, _Place.at(kind, detail["loc"], camel))
    ]


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """A place in a type.

    Attributes:
        siblings: keys of the object that the place is a field of; None: it is none of an object.
        hint: type of what is there; Any: not known.
        above: type of what it is a part of.
        bounds: of the number that is there, by their name in pydantic: ``ge``, ``gt``, ``le``.
    """

    siblings: tuple[str, ...] | None
    hint: Any
    above: Any
    bounds: Mapping[str, float]

    @classmethod
    def at(cls, kind: Any, loc: tuple[int | str, ...], spelling: Spelling) -> "_Place":
        """The place to which pydantic's location leads."""
        siblings: tuple[str, ...] | None = None
        above, (hint, marks) = Any, _bare(kind)
        for part in loc:
            above, fields = hint, _fields(hint, spelling)
            siblings, inside = None, typing.get_args(hint)
            if fields is not None:
                siblings, hint = tuple(fields), fields.get(str(part), Any)
            else:
                hint = inside[-1 if isinstance(part, str) else 0] if inside else Any
            hint, marks = _bare(hint)
        each = [mark for one in marks for mark in (one.metadata if isinstance(one, FieldInfo) else (one,))]
        return cls(
            siblings,
            hint,
            above,
            {name: getattr(mark, name) for mark in each for name in _BOUNDS if hasattr(mark, name)},
        )


_BOUNDS = ("ge", "gt", "le")


def _bare(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """The type without its None, and the marks that stand beside it."""
    marks: tuple[Any, ...] = ()
    while True:
        inside = typing.get_args(hint)
        if typing.get_origin(hint) is typing.Annotated:
            hint, marks = inside[0], (*marks, *inside[1:])
        elif typing.get_origin(hint) in (typing.Union, types.UnionType):
            hint = next(each for each in inside if each is not type(None))
        else:
            return hint, marks


@functools.cache
def _fields(kind: Any, spelling: Spelling) -> dict[str, Any] | None:
    """Key -> type of an object's fields; None: it is no object with fields."""
    if _is_model(kind):
        return {
            field.alias or name: Annotated[field.annotation, field]
            for name, field in kind.model_fields.items()
        }
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind, include_extras=True)
        return {spelling(field.name): hints[field.name] for field in dataclasses.fields(kind)}
    return None


def _null(kind: Any, detail: Any, spelling: Spelling) -> bool:
    """True if a null stands where its field has none, which means the same as the field left out."""
    loc = detail["loc"]
    if detail["input"] is not None or detail["type"] in _NO_FIELD or not loc or isinstance(loc[-1], int):
        return False
    return _Place.at(kind, loc, spelling).siblings is not None


def _without(value: Any, places: Iterable[tuple[int | str, ...]]) -> Any:
    """The value without the fields at these places, each touched part of it copied once."""
    inside: dict[int | str, list[tuple[int | str, ...]]] = {}
    for first, *rest in places:
        inside.setdefault(first, []).append(tuple(rest))
    if isinstance(value, Mapping):
        return {
            key: _without(item, inside[key]) if key in inside else item
            for key, item in value.items()
            if () not in inside.get(key, ())
        }
    return [_without(item, inside[index]) if index in inside else item for index, item in enumerate(value)]


_NO_FIELD = {"extra_forbidden", "unexpected_keyword_argument"}
_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a whole number of 64 bits",
    "float_type": "a number",
    "finite_number": "a number",
    "string_type": "text",
    "string_unicode": "text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "an object",
    "mapping_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "dataclass_type": "an object",
}
"""Kind of error -> what is expected."""


def _problems(detail: Any, place: _Place) -> tuple[Problem, ...]:
    path = ""
    for part in detail["loc"]:
        path = join_path(path, f"[{part}]" if isinstance(part, int) else part)
    cause = (detail.get("ctx") or {}).get("error")
    if isinstance(cause, ContractError):
        return tuple(problem.below(path) for problem in cause.problems)
    if detail["type"] == "too_short" and len(detail["input"]) > detail["ctx"]["actual_length"]:
        return ()  # its entries are refused themselves
    if detail["type"] == "missing" and isinstance(detail["loc"][-1], int):
        path = path.removesuffix(f"[{detail['loc'][-1]}]")
    return (Problem(path, str(cause) if cause is not None else _reason(detail, place)),)


def _reason(detail: Any, place: _Place) -> str:
    kind, value, limits = detail["type"], detail["input"], detail.get("ctx") or {}
    if kind in _NO_FIELD:
        other = suggestion(str(detail["loc"][-1]), place.siblings or ())
        return f"there is no such field. To fix: leave it out, or {other}"
    if kind in _EXPECTED:
        return _expected(_EXPECTED[kind], shown(value))
    if isinstance(place.hint, type) and issubclass(place.hint, enum.Enum):
        name = value if isinstance(value, str) else ""
        return f"{shown(value)} {not_among(name, [member.value for member in place.hint])}"
    match kind:
        case "missing" if isinstance(value, list):
            return _expected(f"a list of {len(typing.get_args(place.above))}", shown(value))
        case "missing":
            return "missing. To fix: give it a value"
        case "greater_than_equal":
            return f"{shown(value)} is below {limits['ge']:g}. To fix: {_range(place.bounds)}"
        case "greater_than":
            return f"{shown(value)} is not above {limits['gt']:g}. To fix: {_range(place.bounds)}"
        case "less_than_equal":
            return f"{shown(value)} is above {limits['le']:.16g}. To fix: {_range(place.bounds)}"
        case "string_too_short":
            least = limits["min_length"]
            return f"{value!r} is shorter than {least} characters. To fix: a longer text"
        case "string_too_long":
            most = limits["max_length"]
            text = f"{value[:40]!r}... has {len(value)} characters, above {most}"
            return f"{text}. To fix: at most {most}"
        case "too_long":
            return f"{limits['actual_length']} entries, above {limits['max_length']}. To fix: fewer"
        case "too_short":
            return f"{limits['actual_length']} entries, below {limits['min_length']}. To fix: more"
        case "string_pattern_mismatch":
            return f"{shown(value)} is not matched by {limits['pattern']}. To fix: such a text"
    return f"{detail['msg']}, got {shown(value)}. To fix: change it"


def _range(bounds: Mapping[str, float]) -> str:
    low = f"above {bounds['gt']:g}" if "gt" in bounds else f"{bounds['ge']:g}" if "ge" in bounds else ""
    most = bounds.get("le")
    if most is None or most >= 2**31 - 1:
        return low if "gt" in bounds else f"{low} or more"
    return f"{low} to {most:.16g}" if low else f"at most {most:.16g}"


def _expected(expected: str, found: str) -> str:
    return f"expected {expected}, got {found}. To fix: {expected}"
