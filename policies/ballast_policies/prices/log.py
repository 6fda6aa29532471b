"""Prices and times in logs, which of them can be true, and the error of their parsers."""

import dataclasses
import math
import re
from datetime import UTC, datetime


class PriceLogError(ValueError):
    """A log cannot be used; the text names the file, the value and the reason."""


MOST_ABOVE_ON_DEMAND = 2.0
"""Spot prices are capped at the on-demand price, which differs between regions by less than this factor."""

LEAST_OF_ON_DEMAND = 0.02
"""Below this part of the on-demand price a spot price is an error: discounts of 8 times have been seen."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One row of a log: a price from a moment on; None: not offered from then on."""

    time: float
    usd: float | None


def is_plausible(usd: float, on_demand_usd: float | None) -> bool:
    """Whether a spot price can be true: from a fiftieth to twice the on-demand price, where it is known."""
    if not (math.isfinite(usd) and usd > 0):
        return False
    return on_demand_usd is None or LEAST_OF_ON_DEMAND <= usd / on_demand_usd <= MOST_ABOVE_ON_DEMAND


_ISO = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|[+-]\d\d:?\d\d)")
_DATE = re.compile(r"\d{1,2}/\d{1,2}/\d{4}")


def seconds_of(text: str, *, where: str) -> float:
    """Seconds since 1970 of ``2020-02-20T23:21:08.000Z``, or of a day ``2/24/2020``, its beginning in UTC.

    Raises:
        PriceLogError: it is neither.
    """
    try:
        if _ISO.fullmatch(text):
            return datetime.fromisoformat(text).timestamp()
        if _DATE.fullmatch(text):
            month, day, year = (int(part) for part in text.split("/"))
            return datetime(year, month, day, tzinfo=UTC).timestamp()
    except (ValueError, OverflowError) as error:
        raise PriceLogError(f"{where}: the time {text[:40]!r}: {error}") from error
    raise PriceLogError(
        f"{where}: the time {text[:40]!r} is not as 2020-02-20T23:21:08Z or, in a table of days, 2/24/2020"
    )
