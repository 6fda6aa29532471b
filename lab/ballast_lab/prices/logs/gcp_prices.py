"""Google Cloud's constant preemptible prices, from the headers of logs of attempts to start machines."""

import re
from collections.abc import Iterator

from ballast_policies.prices.offers import MOST_GPUS, PriceLogError, usd

from ballast_lab.prices.history import Point, PriceRow

_HEADER = re.compile(
    r"Zone: (?P<zone>[a-z0-9-]{1,60}), GPU type: (?P<type>[a-z0-9-]{1,60}), "
    r"Number of GPUs: (?P<gpus>\d{1,4}), Price per hour: (?P<price>\S{1,40})"
)


def parse_gcp_prices(text: str, *, start: float, source: str) -> Iterator[PriceRow]:
    """The prices of the header lines, from ``start`` on; an instance is its GPU type and number, as v100 x 8.

    Raises:
        PriceLogError: a header line is wrong.
    """
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.startswith("Zone: "):
            continue
        where = f"{source}, line {number}"
        found = _HEADER.fullmatch(line.strip()[:400])
        if found is None or not 1 <= int(found["gpus"]) <= MOST_GPUS:
            raise PriceLogError(
                f"{where}: {line[:80]!r} is not 'Zone: Z, GPU type: T, Number of GPUs: N, Price per hour: $P'"
            )
        yield PriceRow(
            cloud="gcp",
            region=found["zone"].rpartition("-")[0],
            zone=found["zone"],
            instance=f"{found['type']} x {int(found['gpus'])}",
            point=Point(time=start, usd=usd(found["price"], where=where)),
        )
