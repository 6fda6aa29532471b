"""How many examples a test has: random ones, and those of a parametrised test."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import settings

USUAL = 50
"""Examples of a test that names no number, each night."""


def examples(count: int, **more: Any) -> settings:
    """Settings with ``count`` examples, in proportion fewer in a profile with fewer than usual.

    Args:
        count: each night.
        more: other settings of hypothesis.
    """
    return settings(max_examples=in_proportion(count), **more)


def in_proportion(count: int) -> int:
    """How many of ``count`` examples or seeds each night a run has, by its profile; at least one."""
    return max(1, round(count * min(1.0, settings().max_examples / USUAL)))


def thinned(values: Sequence[Any]) -> Sequence[Any]:
    """All values each night; in a profile with fewer examples one of so many, from the first on."""
    return values[:: max(1, USUAL // settings().max_examples)]


def first_fast(values: Iterable[Any], count: int = 1) -> list[Any]:
    """Values for ``parametrize``: ``make test-unit`` runs the first ``count``; the others are slow."""
    return _first(values, count, pytest.mark.slow)


def first_daily(values: Iterable[Any], count: int = 1) -> list[Any]:
    """Values for ``parametrize``: ``make test`` runs the first ``count``, ``make test-nightly`` all."""
    return _first(values, count, pytest.mark.nightly)


def _first(values: Iterable[Any], count: int, mark: pytest.MarkDecorator) -> list[Any]:
    values = list(values)
    return values[:count] + [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=mark)
        for value in values[count:]
    ]
