"""Fields of statuses that the API server drops: a custom resource definition is of another release."""

import time
from collections.abc import Callable, Iterator
from typing import Any

from ballast_operator.kube.kinds import Kind, Object

DROPPED_SECONDS = 300.0
"""After so long a dropped field is written again: the definition may have been replaced."""


class DroppedFields:
    """What of each kind's statuses is not kept; ``clock``: seconds that never go back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._fields: dict[Kind, list[str]] = {}
        self._until: dict[Kind, float] = {}

    def learn(self, kind: Kind, sent: Object, kept: Any) -> list[str] | None:
        """The fields that are dropped, after a status was written and read back; None: that is no news.

        Empty: a field that was dropped has been kept, so the definition is another one now.
        """
        known = self._fields.get(kind, [])
        again = [field for field in known if _has({"status": sent}, field)]
        found = set(_lacking(sent, kept, "status"))
        if not found and not again:
            return None
        still = [] if set(again) - found else known
        self._fields[kind] = sorted({*found, *still})
        self._until[kind] = self._clock() + DROPPED_SECONDS
        return self._fields[kind]

    def without(self, kind: Kind, status: Object) -> Object:
        """The status as it would be kept: what is dropped alone is no reason to write it."""
        if self._clock() < self._until.get(kind, 0.0):
            for field in self._fields[kind]:
                status = _without(status, field.removeprefix("status."))
        return status


def _lacking(sent: Any, kept: Any, path: str) -> Iterator[str]:
    """Paths of the fields of ``sent`` that ``kept`` does not have."""
    if isinstance(sent, dict):
        for name, value in sent.items():
            if value is None:
                continue
            if isinstance(kept, dict) and name in kept:
                yield from _lacking(value, kept[name], f"{path}.{name}")
            else:
                yield f"{path}.{name}"
    elif isinstance(sent, list) and isinstance(kept, list):
        for value, other in zip(sent, kept, strict=False):
            yield from _lacking(value, other, f"{path}[]")


def _has(value: Any, path: str) -> bool:
    """Whether there is the field at a path as of :func:`_lacking`."""
    name, _, rest = path.partition(".")
    found = value.get(name.removesuffix("[]")) if isinstance(value, dict) else None
    parts = found if name.endswith("[]") and isinstance(found, list) else [found]
    return any(part is not None and (not rest or _has(part, rest)) for part in parts)


def _without(value: Any, path: str) -> Any:
    """The value without the field at a path as of :func:`_lacking`."""
    name, _, rest = path.partition(".")
    field = name.removesuffix("[]")
    if not isinstance(value, dict) or field not in value:
        return value
    if not rest:
        return {key: part for key, part in value.items() if key != field}
    part = value[field]
    less = [_without(one, rest) for one in part] if isinstance(part, list) else _without(part, rest)
    return {**value, field: less}
