"""One price of a price feed: read within limits, checked, and the last good one kept with its age."""

import dataclasses
import datetime
import enum

from pydantic import Field

from ballast_policies.contract.decode import decode_text
from ballast_policies.contract.errors import ContractError, Problem, shown
from ballast_policies.contract.limits import PRICE
from ballast_policies.contract.model import Model
from ballast_policies.prices.offers import LEAST_OF_ON_DEMAND, MOST_ABOVE_ON_DEMAND, is_plausible

MOST_AHEAD_SECONDS = 300.0
"""Seconds by which the clock of a feed may be ahead of ours."""

MOST_PRICE = 1e6
"""Highest price of a GPU hour."""


class FeedProblem(enum.StrEnum):
    """Reason that a feed has no price that is new, good and recent."""

    MISSING = "missing"
    UNAVAILABLE = "unavailable"
    UNREADABLE = "unreadable"
    IMPLAUSIBLE = "implausible"
    STALE = "stale"


class _Entry(Model):
    """The value of a feed's key, as JSON."""

    price_per_gpu_hour: float = Field(gt=0, le=MOST_PRICE)
    time: str = Field(max_length=64)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FeedPrice:
    """A price that a feed has given.

    Attributes:
        price: of a GPU hour.
        time: since when it has held, seconds since 1970.
    """

    price: float
    time: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Result of reading a feed.

    Attributes:
        known: the last good price; None: there was none yet.
        problem: None: the feed has a good and recent price.
        message: the value, the reason and, after "To fix:", what to change; empty without a problem.
    """

    known: FeedPrice | None
    problem: FeedProblem | None = None
    message: str = ""


def read_feed(
    text: str | None,
    before: FeedPrice | None,
    *,
    now: float,
    stale_after: float,
    on_demand: float | None,
    why_missing: str = "there is no such key. To fix: write it",
) -> Reading:
    """The price in ``text``; where it cannot be used, the one from ``before`` and why.

    Args:
        text: the value; None: it is not there.
        before: the last good price.
        now: seconds since 1970.
        stale_after: seconds after which a price is old.
        on_demand: of a GPU hour of this type; None: not known, and not compared with.
        why_missing: said where ``text`` is None.
    """
    if text is None:
        return Reading(known=before, problem=FeedProblem.MISSING, message=why_missing)
    try:
        found = _decoded(text, now)
    except ContractError as error:
        fix = "" if "To fix:" in str(error) else f". To fix: write {_EXAMPLE}"
        return Reading(known=before, problem=FeedProblem.UNREADABLE, message=f"{error}{fix}")
    return judge(
        found,
        before,
        now=now,
        stale_after=stale_after,
        on_demand=on_demand,
        when_stale="see to what writes the ConfigMap",
    )


def judge(
    found: FeedPrice,
    before: FeedPrice | None,
    *,
    now: float,
    stale_after: float,
    on_demand: float | None,
    when_stale: str,
) -> Reading:
    """``found``, unless it is far from the on-demand price; where that is so, the price from ``before``.

    Arguments as of :func:`read_feed`; ``when_stale``: what to do where the price is old.
    """
    if not is_plausible(found.price, on_demand):
        assert on_demand is not None
        message = (
            f"{found.price:g} is not between {LEAST_OF_ON_DEMAND * on_demand:g} and "
            f"{MOST_ABOVE_ON_DEMAND * on_demand:g}, by the on-demand price {on_demand:g}. "
            "To fix: correct the price, or pricePerGpuHour of the GPU type's pools"
        )
        return Reading(known=before, problem=FeedProblem.IMPLAUSIBLE, message=message)
    if now - found.time > stale_after:
        message = (
            f"{found.price:g} of {shown_time(found.time)} is more than {stale_after:g} s old. "
            f"To fix: {when_stale}, or raise staleAfterSeconds"
        )
        return Reading(known=found, problem=FeedProblem.STALE, message=message)
    return Reading(known=found)


_EXAMPLE = '{"pricePerGpuHour": 0.74, "time": "2026-01-01T00:00:00Z"}'


def _decoded(text: str, now: float) -> FeedPrice:
    """The entry. Raises ContractError: it is none, or its time is none."""
    entry = decode_text(_Entry, text, limits=PRICE)
    try:
        moment = datetime.datetime.fromisoformat(entry.time)
        time = moment.timestamp() if moment.tzinfo is not None else None
    except (ValueError, OverflowError):
        time = None
    if time is None or time < 0:
        reason = f"{shown(entry.time)} is no time with a zone. To fix: write it as 2026-01-01T00:00:00Z"
        raise ContractError(Problem("time", reason))
    if time > now + MOST_AHEAD_SECONDS:
        reason = (
            f"{shown(entry.time)} is in the future. "
            "To fix: write the price when it holds, or correct the clock"
        )
        raise ContractError(Problem("time", reason))
    return FeedPrice(price=entry.price_per_gpu_hour, time=time)


def shown_time(time: float) -> str:
    """Seconds since 1970 as RFC 3339."""
    return datetime.datetime.fromtimestamp(time, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
