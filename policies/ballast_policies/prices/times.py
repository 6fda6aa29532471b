"""Times in logs."""

import re
from datetime import UTC, datetime

from ballast_policies.prices.errors import PriceLogError

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
