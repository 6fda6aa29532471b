"""Published values beside ours, each with the band in which ours has to be."""

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """One value of a figure or table.

    Attributes:
        what: where it stands.
        published: as printed.
        ours: our value of it.
        low, high: the band, ends included.
    """

    what: str
    published: str
    ours: float
    low: float
    high: float

    @property
    def inside(self) -> bool:
        """True if ours is in the band; a value that is not a number is not."""
        return self.low <= self.ours <= self.high


def near(what: str, published: float, ours: float, part: float = 0.05) -> Point:
    """A value that has to be within ``part`` of a published one, 0.05: 5 %."""
    low, high = sorted((published * (1 - part), published * (1 + part)))
    return Point(what=what, published=f"{published:g}", ours=ours, low=low, high=high)


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """A figure or table that is judged.

    Attributes:
        points: the values that have a band.
        text: what is printed, where that is another table.
    """

    points: tuple[Point, ...]
    text: str = ""

    def __str__(self) -> str:
        return self.text or table(
            ("", "published", "ours", "band"),
            [
                (each.what, each.published, f"{each.ours:.4g}", f"{each.low:.4g} to {each.high:.4g}")
                for each in self.points
            ],
        )

    @property
    def outside(self) -> tuple[Point, ...]:
        """The values that are not in their band."""
        return tuple(each for each in self.points if not each.inside)


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Table in Markdown."""
    names = list(head)
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])
