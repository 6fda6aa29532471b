"""Service levels: figure -> the range it has to be in, and how a run compares."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RANGES = Path(__file__).with_name("ranges.json")
"""Figure -> {"least" or "most": value, "what": sentence}."""

QUICK_RANGES = Path(__file__).with_name("quick_ranges.json")
"""The same, for counts and ratios of a short run: they depend little on the machine."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure beside its range.

    Attributes:
        value: None: it has a range, and was not measured.
        within: whether it is inside; None: it has no range.
    """

    name: str
    value: float | None
    limit: str = ""
    what: str = ""
    within: bool | None = None

    def as_json(self) -> dict[str, Any]:
        """Values for ``--output json``."""
        return dataclasses.asdict(self)

    def text(self) -> str:
        """One line of the table."""
        verdict = {True: "ok", False: "OUT OF RANGE", None: ""}[self.within]
        value = "not there" if self.value is None else f"{self.value:.3f}"
        return f"{self.name:36} {value:>10}  {self.limit:10} {verdict:13} {self.what}".rstrip()


def compare(figures: Mapping[str, float], path: Path) -> list[Row]:
    """A row for each range, in the order of the file, then for each figure without one."""
    ranges = json.loads(path.read_text())
    rows = []
    for name, limits in ranges.items():
        value, least, most = figures.get(name), limits.get("least"), limits.get("most")
        within = value is not None and limits.get("least", value) <= value <= limits.get("most", value)
        limit = f">= {least:g}" if least is not None else f"<= {most:g}"
        rows.append(Row(name=name, value=value, limit=limit, what=limits["what"], within=within))
    return rows + [Row(name=name, value=value) for name, value in figures.items() if name not in ranges]
