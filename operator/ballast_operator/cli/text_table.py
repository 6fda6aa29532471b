"""Tables on a terminal, whose cells are text as it is: brackets are no markup."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ballast_operator.cli.option_names import printable

WIDE_COLUMNS = 140
"""Width from which on each row is one line; below, figures are stacked."""
NARROW_COLUMNS = 64
"""Below this width all figures of a row are in one cell."""


def text_table(
    title: str,
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    breaks: Sequence[str] = (),
    left: int = 1,
    **layout: Any,
) -> Table:
    """A table; ``left`` columns are justified left, the others right.

    ``breaks``: headings of columns whose cells may be broken anywhere, e.g. names. ``layout``: of rich's
    table.
    """
    table = Table(title=escape(printable(title)), title_justify="left", **layout)
    for index, heading in enumerate(headings):
        table.add_column(
            heading,
            justify="left" if index < left else "right",
            no_wrap=heading not in breaks,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def stacked(texts: Sequence[str], size: int) -> list[str]:
    """``size`` texts in a cell, one below the other."""
    return ["\n".join(texts[first : first + size]) for first in range(0, len(texts), size)]


def averages_table(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    """A name and a value a line."""
    table = text_table(title, ("", ""), rows, breaks=("",), show_header=False)
    table.columns[0].style = "bold"
    return table
