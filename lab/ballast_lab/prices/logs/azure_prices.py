"""Tables of Azure's spot prices: a row for each day, a column for each VM size; one file a region."""

import csv
import itertools
from collections.abc import Iterator

from ballast_policies.prices.offers import PriceLogError, seconds_of, usd

from ballast_lab.prices.history import Point, PriceRow

MOST_COLUMNS = 200


def parse_azure_prices(text: str, *, region: str, source: str) -> Iterator[PriceRow]:
    """The prices that change: a size without a price in a row is not offered from that day on.

    Raises:
        PriceLogError: it is not such a table, or a cell is wrong.
    """
    rows = csv.reader(text.splitlines())
    try:
        header = next(rows, [])
        if not header or header[0].strip() != "Date" or not 2 <= len(header) <= MOST_COLUMNS:
            raise PriceLogError(f"{source}: the first line must be Date and VM sizes, {MOST_COLUMNS} at most")
        sizes = [name.strip() for name in header[1:]]
        if len(set(sizes)) < len(sizes) or "" in sizes:
            raise PriceLogError(f"{source}: a VM size is there twice, or has no name")
        last: dict[str, float | None] = {}
        for number, row in enumerate(rows, start=2):
            if not any(cell.strip() for cell in row):
                continue
            where = f"{source}, line {number}"
            if len(row) > len(header):
                raise PriceLogError(f"{where}: {len(row)} cells, and the first line has {len(header)}")
            time = seconds_of(row[0].strip(), where=where)
            for size, cell in itertools.zip_longest(sizes, row[1:], fillvalue=""):
                price = usd(cell, where=f"{where}, {size}") if cell.strip() else None
                if size in last and last[size] == price:
                    continue
                last[size] = price
                yield PriceRow(
                    cloud="azure",
                    region=region,
                    zone=region,
                    instance=size,
                    point=Point(time=time, usd=price),
                )
    except csv.Error as error:
        raise PriceLogError(f"{source}: not CSV: {error}") from error
