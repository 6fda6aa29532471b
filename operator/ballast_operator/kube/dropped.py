"""Fields of statuses that the API server drops: a custom resource definition is of another release."""

from collections.abc import Iterator
from typing import Any

from ballast_operator.kube.kinds import Kind, Object

_Path = tuple[str | None, ...]
"""Keys from the status on; None: every entry of a list."""


class DroppedFields:
    """Fields of each kind's statuses that are not kept."""

    def __init__(self) -> None:
        self._fields: dict[Kind, frozenset[_Path]] = {}
        self._left_out: set[Kind] = set()

    def ask_again(self, kind: Kind) -> None:
        """All fields are written once more: a watch has ended, as it does where the definition changes."""
        self._left_out.discard(kind)

    def learn(self, kind: Kind, sent: Object, kept: Any) -> list[str] | None:
        """The fields that are dropped, after a status was written and read back; None: that is no news.

        Empty: a field that was dropped has been kept, so the definition is another one now.
        """
        known = self._fields.get(kind, frozenset())
        again = {field for field in known if _has(sent, field)}
        found = frozenset(_lacking(sent, kept, ()))
        if not found and not again:
            return None
        self._fields[kind] = found if again - found else found | known
        self._left_out.add(kind)
        return sorted(
            "status" + "".join("[]" if key is None else f".{key}" for key in field)
            for field in self._fields[kind]
        )

    def without(self, kind: Kind, status: Object) -> Object:
        """The status as it would be kept: what is dropped alone is no reason to write it."""
        if kind in self._left_out:
            for field in self._fields[kind]:
                status = _without(status, field)
        return status


def _lacking(sent: Any, kept: Any, path: _Path) -> Iterator[_Path]:
    """Paths of the fields of ``sent`` that ``kept`` does not have."""
    if isinstance(sent, dict):
        for name, value in sent.items():
            if value is None:
                continue
            if isinstance(kept, dict) and name in kept:
                yield from _lacking(value, kept[name], (*path, name))
            else:
                yield (*path, name)
    elif isinstance(sent, list) and isinstance(kept, list):
        for value, other in zip(sent, kept, strict=False):
            yield from _lacking(value, other, (*path, None))


def _has(value: Any, path: _Path) -> bool:
    """True if the field at the path exists."""
    if not path:
        return value is not None
    if path[0] is None:
        return isinstance(value, list) and any(_has(part, path[1:]) for part in value)
    return isinstance(value, dict) and _has(value.get(path[0]), path[1:])


def _without(value: Any, path: _Path) -> Any:
    """The value without the field at a path."""
    name, rest = path[0], path[1:]
    if isinstance(value, list):
        return [_without(part, rest) for part in value] if name is None else value
    if not isinstance(value, dict) or name not in value:
        return value
    if not rest:
        return {key: part for key, part in value.items() if key != name}
    return {**value, name: _without(value[name], rest)}
