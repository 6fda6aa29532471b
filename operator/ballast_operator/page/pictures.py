"""Shapes of the page's pictures: positions in percent of the width, so that texts keep their size."""

import dataclasses
import zlib
from collections.abc import Iterable, Sequence

from ballast_operator.history.recent import Partition, Span

COLOURS = 8
"""Classes ``c0`` to ``c7`` of the style sheet."""

MOST_LANES, MOST_BARS = 24, 400


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A rectangle: ``x`` and ``width`` in percent, ``lane`` counted from the top."""

    x: float
    width: float
    lane: int
    colour: int
    label: str
    title: str
    link: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """Bars in lanes; ``left_out``: bars for which there was no room."""

    bars: tuple[Bar, ...]
    lanes: int
    left_out: int = 0


def timeline(spans: Iterable[tuple[Span, str, str]], *, start: float, end: float) -> Picture:
    """Timeline of GPU holders: a lane for those that do not overlap; each span has a name, perhaps a link."""
    length = max(end - start, 1e-9)
    ends: list[float] = []
    bars: list[Bar] = []
    within = [each for each in spans if each[0].start <= end and (each[0].end or end) >= start]
    ordered = sorted(within, key=lambda each: (each[0].start, each[1]))
    left_out = max(0, len(ordered) - MOST_BARS)
    for span, name, link in ordered[-MOST_BARS:]:
        until = end if span.end is None else min(span.end, end)
        since = max(span.start, start)
        lane = next((number for number, free in enumerate(ends) if free <= since), len(ends))
        if lane >= MOST_LANES:
            left_out += 1
            continue
        ends[lane : lane + 1] = [until]
        x, width = 100 * (since - start) / length, 100 * (until - since) / length
        text = (
            f"{name}: {span.gpus} GPUs of {span.pool}, launch {span.launch}, {duration(until - span.start)}"
        )
        bars.append(
            Bar(
                x=x,
                width=max(width, 0.3),
                lane=lane,
                colour=zlib.crc32(name.encode("utf-8", "replace")) % COLOURS,  # the same for the same name
                label=name if width > 12 else "",
                title=text,
                link=link,
            )
        )
    return Picture(bars=tuple(bars), lanes=max(1, len(ends)), left_out=left_out)


def stages(partition: Partition) -> Picture:
    """The layers of a pipeline, each stage as wide as it has layers."""
    layers = max((end for _, _, end in partition.stages), default=1) or 1
    bars = []
    for rank, first, end in partition.stages:
        names = f"{first}" if end == first + 1 else f"{first}-{end - 1}"
        width = 100 * (end - first) / layers
        bars.append(
            Bar(
                x=100 * first / layers,
                width=width,
                lane=0,
                colour=rank % COLOURS,
                label=names if width > 6 else "",
                title=f"rank {rank}: layers {names}",
            )
        )
    return Picture(bars=tuple(bars), lanes=1)


def duration(seconds: float) -> str:
    """``4 s``, ``12 min``, ``3.5 h``, ``2.1 d``."""
    seconds = max(0.0, seconds)
    for unit, size in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size * (1 if unit == "min" else 1.5):
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.0f} s"


def parts(values: Sequence[tuple[str, float]]) -> Picture:
    """Bar of several parts, each as wide as its share of their sum."""
    total, x, bars = sum(max(0.0, value) for _, value in values), 0.0, []
    for number, (name, value) in enumerate(values):
        width = 100 * max(0.0, value) / total if total > 0 else 0.0
        if width > 0:
            title = f"{name}: {width:.1f} %"
            bars.append(
                Bar(x=x, width=width, lane=0, colour=number, label=name if width > 14 else "", title=title)
            )
        x += width
    return Picture(bars=tuple(bars), lanes=1)
