"""A picture of a simulation: which GPUs ran which jobs when, and how long jobs took.

``.png`` by matplotlib; ``.html`` as one page with inline SVG that needs nothing else.
"""

import colorsys
import html
import itertools
from pathlib import Path

import numpy as np

from ballast_policies.simulator.result import HOUR, Result, Segment

FORMATS = (".png", ".html")
"""Endings of a picture's file name."""


def draw(result: Result, path: Path) -> None:
    """Write the picture; the result must have its time line.

    Raises:
        ValueError: the file name ends neither in .png nor in .html.
        ModuleNotFoundError: a .png was asked for and matplotlib is not installed.
    """
    if path.suffix == ".html":
        path.write_text(as_html(result))
    elif path.suffix == ".png":
        _draw_png(result, path)
    else:
        raise ValueError(f"{path.name} ends neither in .png nor in .html")


def lanes(result: Result) -> list[tuple[Segment, int]]:
    """(segment, its first GPU, types in order): a place for each gang, so that a picture has no overlaps.

    The simulator counts GPUs of a type and does not number them; the numbers are for drawing only.
    Gangs that do not fit a run of free numbers (and the second of a pair) share lanes.
    """
    free_at = [np.zeros(gpus) for gpus in result.cluster.values()]
    begins = list(_begins(result).values())
    placed = []
    for segment in sorted(result.timeline, key=lambda s: (s.start, -s.gpus, s.row)):
        lane, size = free_at[segment.column], segment.gpus
        first = _first_run(lane <= segment.start + 1.0, size)
        lane[first : first + size] = np.maximum(lane[first : first + size], segment.end)
        placed.append((segment, begins[segment.column] + first))
    return placed


def _begins(result: Result) -> dict[str, int]:
    """GPU type -> number of its first GPU."""
    return dict(zip(result.cluster, itertools.accumulate(result.cluster.values(), initial=0), strict=False))


def _first_run(free: np.ndarray, size: int) -> int:
    run = 0
    for i, is_free in enumerate(free.tolist()):
        run = run + 1 if is_free else 0
        if run == size:
            return i - size + 1
    return 0


def _colour(row: int) -> str:
    red, green, blue = colorsys.hls_to_rgb((row * 0.6180339887) % 1.0, 0.45 + 0.2 * (row % 3) / 2, 0.6)
    return f"#{int(red * 255):02x}{int(green * 255):02x}{int(blue * 255):02x}"


def _cdf(result: Result) -> tuple[np.ndarray, np.ndarray]:
    took = np.sort([job.completion_time for job in result.jobs if job.completion_time is not None]) / HOUR
    return took, np.arange(1, len(took) + 1) / max(1, len(took))


def _draw_png(result: Result, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(12, 9), gridspec_kw={"height_ratios": [3, 1]}, layout="constrained"
    )
    for segment, first in lanes(result):
        span = (segment.start / HOUR, (segment.end - segment.start) / HOUR)
        top.broken_barh([span], (first, segment.gpus), facecolors=_colour(segment.row), linewidth=0)
    for gpu_type, start in _begins(result).items():
        top.axhline(start, color="black", linewidth=0.8)
        top.text(0, start + 0.3, gpu_type, va="bottom", fontweight="bold")
    top.set(title=f"{result.workload}: {result.policy}", xlabel="hours", ylabel="GPUs")
    top.set_ylim(0, sum(result.cluster.values()))
    bottom.step(*_cdf(result), where="post")
    bottom.set(xlabel="completion time (hours)", ylabel="fraction of jobs", ylim=(0, 1))
    bottom.grid(visible=True, alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def as_html(result: Result) -> str:
    """Page with the time line, the distribution of completion times, and the averages."""
    width, row_height = 1100.0, max(2.0, min(12.0, 600 / sum(result.cluster.values())))
    end = max((segment.end for segment in result.timeline), default=1.0)
    shapes = []
    names = {
        int(job.name.removeprefix("job-")): f"{job.name}: {job.type}, {job.gpus} GPUs" for job in result.jobs
    }
    for segment, first in lanes(result):
        x, w = segment.start / end * width, (segment.end - segment.start) / end * width
        y, h = first * row_height, segment.gpus * row_height
        title = html.escape(names.get(segment.row, f"job-{segment.row}"))
        hours = f"{segment.start / HOUR:.2f} h to {segment.end / HOUR:.2f} h"
        shapes.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(w, 0.3):.1f}" height="{h:.1f}" '
            f'fill="{_colour(segment.row)}"><title>{title}, {hours}</title></rect>'
        )
    for gpu_type, start in _begins(result).items():
        y = start * row_height
        shapes.append(f'<line x1="0" x2="{width}" y1="{y:.1f}" y2="{y:.1f}" stroke="black"/>')
        shapes.append(f'<text x="4" y="{y + 14:.1f}" font-weight="bold">{html.escape(gpu_type)}</text>')
    height = sum(result.cluster.values()) * row_height
    took, fraction = _cdf(result)
    longest = float(took[-1]) if len(took) else 1.0
    points = " ".join(
        f"{t / longest * width:.1f},{200 - 200 * f:.1f}" for t, f in zip(took, fraction, strict=True)
    )
    facts = (
        f"average completion time {result.average_completion_time / HOUR:.2f} h, "
        f"makespan {result.makespan / HOUR:.2f} h, utilisation {result.utilisation:.1%}"
    )
    title = html.escape(f"{result.workload}: {result.policy}")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        "<style>body{font:14px sans-serif;margin:24px}svg{background:#f6f6f6}</style></head><body>"
        f"<h1>{title}</h1><p>{html.escape(facts)}</p>"
        f"<h2>Jobs on GPUs, {end / HOUR:.1f} hours</h2>"
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}">'
        f"{''.join(shapes)}</svg>"
        f"<h2>Fraction of jobs done within, up to {longest:.1f} hours</h2>"
        f'<svg viewBox="0 0 {width:.0f} 200" width="{width:.0f}" height="200">'
        f'<polyline fill="none" stroke="#1f5fa8" stroke-width="2" points="0,200 {points}"/></svg>'
        "</body></html>\n"
    )
