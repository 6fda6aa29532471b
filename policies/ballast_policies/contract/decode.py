"""From JSON values to frozen dataclasses: the one decoder of messages, configurations and command inputs.

Types are strict: a truth value is no number, text is no number, a whole number is a float where one is
expected, numbers are finite, and text has characters of Unicode only.  Keys are the fields' names, in
camelCase unless the caller spells them otherwise.  A null is a field left out, unless the field's type has
None.  All problems of a value are collected, so that a user corrects them in one go.
"""

import collections.abc
import dataclasses
import enum
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeVar, cast

from ballast_policies.contract.errors import ContractError, Problem, camel, join_path, shown
from ballast_policies.contract.limits import FILE, MESSAGE, Limits, value_deeper
from ballast_policies.contract.settings import field_problem, not_among, suggestion

T = TypeVar("T")
Unknown = Literal["ignore", "refuse"]

Spelling = Callable[[str], str]
"""From a field's name to its key."""

_Reader = Callable[[Any, str, list[Problem]], Any]
_FAILED: Any = object()
_MOST_WHOLE = 2**63 - 1
_DIGITS = 20
"""Longest decimal of a whole number of 64 bits, its sign included."""


def decode(
    kind: type[T], value: Any, *, unknown: Unknown = "refuse", path: str = "", spelling: Spelling = camel
) -> T:
    """``value``, as JSON or YAML has it, as a ``kind``.

    Args:
        kind: a dataclass, or any type that its fields may have: ``bool``, ``int``, ``float``, ``str``, an
            enum, ``X | None``, ``tuple[X, ...]``, ``tuple[X, X]``, ``Mapping[str, X]`` and ``Any``.
        value: made of dict, list, str, int, float, bool and None.
        unknown: what becomes of keys that ``kind`` has no field for: ``ignore`` for messages, so that two
            releases understand each other; ``refuse`` for what people write.
        path: of ``value`` itself, for the problems' paths.
        spelling: of the keys.

    Raises:
        ContractError: the value does not fit.
    """
    problems: list[Problem] = []
    read = _reader(cast("Any", kind), unknown, spelling)(value, path, problems)
    if problems:
        raise ContractError(problems)
    return cast("T", read)


def decode_text(
    kind: type[T], text: str, *, unknown: Unknown = "refuse", path: str = "", limits: Limits = FILE
) -> T:
    """``text``, which is JSON, as a ``kind``; arguments as of :func:`decode` and :func:`parse_json`.

    Raises:
        ContractError: it is not JSON (NaN, a key given twice and a number of thousands of digits are not),
            is above the limits, or does not fit.
    """
    return decode(kind, parse_json(text, path=path, limits=limits), unknown=unknown, path=path)


def parse_json(text: str, *, path: str = "", limits: Limits = FILE) -> Any:
    """JSON, without what Python adds to it.

    Args:
        text: of any origin.
        path: of the value, for the problems' paths.
        limits: of the text as a whole.

    Raises:
        ContractError: the text is not JSON, is longer or nested more deeply than ``limits`` allow, gives a
            key twice, or has a number that is not finite or beyond 64 bits.
    """
    problem = limits.problem(text)
    if problem:
        raise ContractError(Problem(path, problem))
    try:
        value = json.loads(
            text,
            object_pairs_hook=_each_key_once,
            parse_constant=lambda name: _Refused(f"not JSON: {name} is no number of JSON"),
            parse_float=_finite,
            parse_int=_whole,
        )
    except (ValueError, RecursionError) as error:
        raise ContractError(Problem(path, f"not JSON: {error}")) from error
    problems = list(_refused(value, path))
    if problems:
        raise ContractError(problems)
    return value


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
    found: dict[str, Any] = {}
    for key, value in items:
        found[key] = _Refused("given twice in one object. To fix: give it once") if key in found else value
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


@functools.cache
def _reader(kind: Any, unknown: Unknown, spelling: Spelling) -> _Reader:
    """What reads a ``kind``; made once for each, since types are slow to look into."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _reader(arguments[0], unknown, spelling)
    if origin in (typing.Union, types.UnionType):
        return _optional(arguments, unknown, spelling)
    if origin is tuple:
        return _list(arguments, unknown, spelling)
    if origin in (dict, Mapping, collections.abc.Mapping):
        return _mapping(_reader(arguments[1], unknown, spelling))
    if dataclasses.is_dataclass(kind):
        return _object(kind, unknown, spelling)
    if kind is Any:
        return _anything
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _member(kind)
    return _plain(kind)


def _anything(value: Any, path: str, problems: list[Problem]) -> Any:
    reason = f"nested deeper than {MESSAGE.depth} levels. To fix: fewer levels"
    return _fail(problems, path, reason) if value_deeper(value, MESSAGE.depth) else value


def _plain(kind: Any) -> _Reader:
    expected = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}[kind]

    def read(value: Any, path: str, problems: list[Problem]) -> Any:
        if kind is float and type(value) is int:
            try:
                return float(value)
            except OverflowError:
                return _unexpected(problems, path, expected, f"one of {value.bit_length()} bits")
        if type(value) is not kind and not (isinstance(value, kind) and not isinstance(value, bool)):
            return _unexpected(problems, path, expected, shown(value))
        if kind is float and not math.isfinite(value):
            return _unexpected(problems, path, expected, str(value))
        if kind is str and not _is_unicode(value):
            return _unexpected(problems, path, expected, "half of a pair of surrogates")
        return value

    return read


def _is_unicode(text: str) -> bool:
    """Whether it can be written anywhere: JSON's escapes can make halves of characters, which cannot."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


def _member(kind: type[enum.Enum]) -> _Reader:
    members = {member.value: member for member in kind}

    def read(value: Any, path: str, problems: list[Problem]) -> Any:
        if isinstance(value, str) and value in members:
            return members[value]
        name = value if isinstance(value, str) else ""
        return _fail(problems, path, f"{shown(value)} {not_among(name, members)}")

    return read


def _optional(arguments: tuple[Any, ...], unknown: Unknown, spelling: Spelling) -> _Reader:
    (kind,) = [argument for argument in arguments if argument is not type(None)]
    inner = _reader(kind, unknown, spelling)
    return lambda value, path, problems: None if value is None else inner(value, path, problems)


def _list(arguments: tuple[Any, ...], unknown: Unknown, spelling: Spelling) -> _Reader:
    count = None if arguments[-1] is Ellipsis else len(arguments)
    inner = _reader(arguments[0], unknown, spelling)

    def read(value: Any, path: str, problems: list[Problem]) -> Any:
        if not isinstance(value, list | tuple):
            return _unexpected(problems, path, "a list", shown(value))
        if count is not None and len(value) != count:
            return _unexpected(problems, path, f"a list of {count}", shown(value))
        before = len(problems)
        items = tuple(inner(item, f"{path}[{index}]", problems) for index, item in enumerate(value))
        return items if len(problems) == before else _FAILED

    return read


def _mapping(inner: _Reader) -> _Reader:
    def read(value: Any, path: str, problems: list[Problem]) -> Any:
        if type(value) is not dict and not isinstance(value, Mapping):
            return _unexpected(problems, path, "an object", shown(value))
        before, found = len(problems), {}
        for key, item in value.items():
            if not isinstance(key, str):
                return _unexpected(problems, path, "keys of text", shown(key))
            found[key] = inner(item, join_path(path, key), problems)
        return found if len(problems) == before else _FAILED

    return read


def _object(kind: Any, unknown: Unknown, spelling: Spelling) -> _Reader:
    hints = typing.get_type_hints(kind)
    fields = {}
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        reader = _reader(hint, unknown, spelling)
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        fields[spelling(field.name)] = field, reader, type(None) in typing.get_args(hint), required

    def read(value: Any, path: str, problems: list[Problem]) -> Any:
        if type(value) is not dict and not isinstance(value, Mapping):
            return _unexpected(problems, path, "an object", shown(value))
        before, arguments = len(problems), {}
        if unknown == "refuse":
            for key in value:
                if key not in fields:
                    fix = f"leave it out, or {suggestion(str(key), fields)}"
                    _fail(problems, join_path(path, str(key)), f"there is no such field. To fix: {fix}")
        for key, (field, inner, nullable, required) in fields.items():
            item = value.get(key)
            if item is None and not (key in value and nullable):
                if required:
                    _fail(problems, join_path(path, key), "missing. To fix: give it a value")
                continue
            here = join_path(path, key)
            read_item = inner(item, here, problems)
            if read_item is _FAILED:
                continue
            reason = field_problem(field, read_item)
            if reason:
                _fail(problems, here, reason)
            arguments[field.name] = read_item
        if len(problems) > before:
            return _FAILED
        try:
            return kind(**arguments)
        except ContractError as error:
            problems += [problem.below(path) for problem in error.problems]
        except ValueError as error:
            problems.append(Problem(path, str(error)))
        return _FAILED

    return read


def _unexpected(problems: list[Problem], path: str, expected: str, found: str) -> Any:
    return _fail(problems, path, f"expected {expected}, got {found}. To fix: {expected}")


def _fail(problems: list[Problem], path: str, reason: str) -> Any:
    problems.append(Problem(path, reason))
    return _FAILED
