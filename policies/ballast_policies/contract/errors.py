"""Errors of a value of the contract: one problem for each field, with what to change."""

import dataclasses
import difflib
import functools
from collections.abc import Iterable
from typing import Any

_SHOWN = 80


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """One field that cannot be used.

    Attributes:
        path: dotted path of the field, in JSON's spelling: ``pipeline.maxStages``, ``ranks[0].pod``; empty:
            the value as a whole.
        reason: the value, what is wrong with it and, after "To fix:", what to change.
    """

    path: str
    reason: str

    def below(self, path: str) -> "Problem":
        """The same problem, of a value that is itself the field ``path`` of another."""
        return Problem(join_path(path, self.path), self.reason)

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}" if self.path else self.reason


class ContractError(ValueError):
    """A value does not fit its type; the text names every field, its value and the reason.

    Attributes:
        problems: one for each field, at least one.
    """

    def __init__(self, problems: str | Problem | Iterable[Problem]) -> None:
        if isinstance(problems, str):
            problems = Problem("", problems)
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("; ".join(map(str, self.problems)))


def join_path(path: str, rest: str) -> str:
    """``rest`` below ``path``; either may be empty."""
    return f"{path}{rest}" if not path or not rest or rest[0] == "[" else f"{path}.{rest}"


@functools.cache
def camel(name: str) -> str:
    """``snake_case`` as ``camelCase``: the spelling of a field in JSON."""
    head, *rest = name.split("_")
    return head + "".join(part.title() for part in rest)


def shown(value: Any) -> str:
    """The value in a message, cut where it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, or nested too deeply
        return f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def suggestion(name: str, known: Iterable[str]) -> str:
    """``one of a, b``, and the nearest of them where one is near; letters' case does not count."""
    names = list(known)
    return f"one of {', '.join(map(str, names))}{_nearest(name, names)}"


def not_among(name: str, known: Iterable[str]) -> str:
    """``is not one of a, b``, and what to change."""
    names = list(known)
    return f"is not one of {', '.join(map(str, names))}. To fix: one of these{_nearest(name, names)}"


def _nearest(name: str, names: Iterable[str]) -> str:
    by_case = {str(other).lower(): str(other) for other in names}
    near = difflib.get_close_matches(name.lower(), by_case, n=1)
    return f"; did you mean {by_case[near[0]]!r}?" if near else ""
