"""Costs as a picture: one page with inline SVG that needs nothing else."""

import html
from collections.abc import Sequence

from ballast_operator.report.costs import Costs

MOST_JOBS = 40
"""Jobs drawn, the dearest first."""

WIDTH, LABEL, BAR = 760.0, 280.0, 22
COLOURS = {
    "training": "#4878a8",
    "start-up": "#e8a33d",
    "lost steps": "#c44e52",
    "data": "#6aa56a",
    "jobs": "#4878a8",
    "deleted jobs": "#9db7d5",
    "idle": "#c9c9c9",
    "cost": "#4878a8",
}

Bar = tuple[str, Sequence[tuple[str, float]]]


def as_html(found: Costs) -> str:
    """The page: pools by what their bill was for, teams, and the dearest jobs with their waste."""
    pools: list[Bar] = [
        (
            f"{pool.pool} ({pool.gpu_type})",
            [("jobs", pool.jobs), ("deleted jobs", pool.deleted_jobs), ("idle", pool.idle)],
        )
        for pool in found.pools
    ]
    teams: list[Bar] = [(team.team or "(none)", [("cost", team.cost)]) for team in found.teams]
    dearest = sorted(found.jobs, key=lambda job: (-job.cost, job.namespace, job.job))
    jobs: list[Bar] = [(f"{job.namespace}/{job.job}", job.parts) for job in dearest[:MOST_JOBS]]
    more = len(found.jobs) - len(jobs)
    parts = [
        _chart("Pools: bill = jobs + deleted jobs + idle", pools),
        _chart("Teams", teams),
        _chart(f"Jobs{f', without {more} cheaper ones' if more else ''}", jobs),
    ]
    title = f"Costs up to {html.escape(found.at)}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        "<style>body{font:14px sans-serif;margin:24px}text{font-size:12px}</style></head>"
        f"<body><h1>{title}</h1>{''.join(parts)}</body></html>\n"
    )


def _chart(title: str, bars: Sequence[Bar]) -> str:
    heading = f"<h2>{html.escape(title)}</h2>"
    if not bars:
        return f"{heading}<p>none</p>"
    most = max((sum(max(0.0, value) for _, value in parts) for _, parts in bars), default=0.0) or 1.0
    shapes = []
    for row, (name, parts) in enumerate(bars):
        y, x = row * BAR, LABEL
        shapes.append(f'<text x="{LABEL - 8}" y="{y + 15}" text-anchor="end">{html.escape(name)}</text>')
        for kind, value in parts:
            width = max(0.0, value) / most * WIDTH
            shapes.append(
                f'<rect x="{x:.1f}" y="{y + 2}" width="{width:.1f}" height="{BAR - 5}" '
                f'fill="{COLOURS[kind]}"><title>{html.escape(name)}, {kind}: {value:,.2f}</title></rect>'
            )
            x += width
        shapes.append(f'<text x="{x + 6:.1f}" y="{y + 15}">{sum(value for _, value in parts):,.2f}</text>')
    kinds = dict.fromkeys(kind for _, parts in bars for kind, _ in parts)
    legend = " ".join(f'<span style="color:{COLOURS[kind]}">&#9632;</span> {kind}' for kind in kinds)
    size = f'width="{LABEL + WIDTH + 100:.0f}" height="{len(bars) * BAR + 4}"'
    return f"{heading}<p>{legend}</p><svg {size}>{''.join(shapes)}</svg>"
