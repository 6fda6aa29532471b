"""How many random examples a test draws."""

from typing import Any

from hypothesis import settings

USUAL = 50
"""Examples of a test that names no number, in the profile of ``make test``."""


def examples(count: int, **more: Any) -> settings:
    """Settings with ``count`` examples, in proportion fewer in a profile with fewer than usual.

    Args:
        count: in ``make test``.
        more: other settings of hypothesis.
    """
    share = min(1.0, settings().max_examples / USUAL)
    return settings(max_examples=max(1, round(count * share)), **more)
