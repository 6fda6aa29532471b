"""What asks a cloud for prices."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from ballast_policies.prices.errors import PriceLogError

MOST_FAILURES = 3
"""Requests that fail one after the other: then the source is not asked for the rest."""


class SourceUnavailableError(Exception):
    """A cloud does not answer, or refuses; the text says what, and what to do."""


Answers = Mapping[Any, float | PriceLogError | SourceUnavailableError]
"""What was wanted -> its price in the list's currency, or why there is none."""

W = TypeVar("W")


class PriceSource(Protocol):
    """A price list of a cloud.

    Attributes:
        refresh_seconds: how often prices are asked for.
    """

    refresh_seconds: float

    async def prices(self, wanted: Sequence[Any]) -> Answers:
        """The present prices of all of ``wanted``.

        Raises:
            SourceUnavailableError: no price could be read at all.
        """
        ...


async def one_by_one(wanted: Sequence[W], ask: Callable[[W], Awaitable[float]]) -> Answers:
    """Answers of requests that do not depend on each other: one that fails leaves the others."""
    found: dict[W, float | PriceLogError | SourceUnavailableError] = {}
    failures = 0
    for number, one in enumerate(wanted):
        try:
            found[one] = await ask(one)
            failures = 0
        except PriceLogError as error:
            found[one] = error
            failures = 0
        except SourceUnavailableError as error:
            found[one] = error
            failures += 1
            if failures == MOST_FAILURES:
                found.update(dict.fromkeys(wanted[number + 1 :], error))
                break
    return found
