"""Write lab/docs/published.md and its plots from the runs that were kept; what ``mechanism`` has is run.

python lab/benchmarks/simulator/published_page.py
"""

import json
import statistics
import sys
import tomllib
from pathlib import Path
from typing import Any

import mechanism
import published_hierarchical as hierarchical
from published import KEPT, compared
from published_figures import FIGURES, Curve, published

WORDS = tomllib.loads(Path(__file__).with_name("published_words.toml").read_text())
DOCS = Path(__file__).resolve().parents[2] / "docs"
NOTABLE = 0.05
"""A deviation above this needs a reason."""

Row = tuple[str, str, str, float, float, str, float]
"""Figure, label, at, published, ours, seeds, wall seconds of one run."""


def rows_of(figure: str, runs: list[dict[str, Any]]) -> list[Row]:
    """A row for each point; where several seeds were published together, their mean."""
    if figure in hierarchical.FIGURES:
        return [
            (
                figure,
                run["curve"],
                f"{run['at']:g} jobs",
                sum(hierarchical.published(figure, run["curve"], int(run["at"]))),
                run["values"]["total"],
                "0",
                run["wall_seconds"],
            )
            for run in runs
        ]
    chosen, rows = FIGURES[figure], []
    for curve in chosen.curves:
        for at in sorted({run["at"] for run in runs if run["curve"] == curve.key}):
            mine = [run for run in runs if run["curve"] == curve.key and run["at"] == at]
            mine = [run for run in mine if run["seed"] in chosen.seeds]
            if not mine:
                continue
            seeds = " ".join(str(run["seed"]) for run in mine)
            seconds = statistics.mean(run["wall_seconds"] for run in mine)
            for k, (kind, _, theirs) in enumerate(compared(mine[0])):
                if theirs is None:
                    continue
                ours = statistics.mean(compared(run)[k][1] for run in mine)
                label = f"{curve.label}, {kind}" if kind else curve.label
                rows.append((figure, label, place(figure, curve, at), theirs, ours, seeds, seconds))
    return rows


def place(figure: str, curve: Curve, at: float) -> str:
    if figure == "physical":
        return "100 jobs" if "duration" in curve.key or curve.key == "gandiva" else "96 jobs"
    return f"{at:g} jobs" if figure == "makespan" else f"{at:g} jobs/h"


def deviation(row: Row) -> float:
    return row[4] / row[3] - 1.0


def not_run(figure: str, runs: list[dict[str, Any]]) -> list[str]:
    """Curves with published points that were not run, and how many."""
    lines = []
    places = {
        "makespan": [100.0 * i for i in range(1, 8)],
        "priorities": [0.2 * i for i in range(1, 16)],
    }.get(figure, [round(0.2 * i, 1) for i in range(1, 31)])
    for curve in FIGURES[figure].curves if figure != "physical" else ():
        kind = "low" if figure == "priorities" else ""
        there = [at for at in places if published(figure, curve.key, round(at, 1), kind) is not None]
        ran = {(run["at"], run["seed"]) for run in runs if run["curve"] == curve.key}
        missing = [at for at in there if not any(abs(at - at_) < 1e-9 for at_, _ in ran)]
        if missing:
            lines.append(f"{curve.label} ({len(missing)})")
        some = sorted({at for at, _ in ran if {s for a, s in ran if a == at} < set(FIGURES[figure].seeds)})
        if some:
            lines.append(f"{curve.label}, not all seeds ({len(some)})")
    return lines


def reason(row: Row) -> str:
    figure, label, at = row[:3]
    for known in WORDS["reasons"]:
        places = known["at"].split()
        if figure in known["figures"] and known["label"] in label and (not places or at.split()[0] in places):
            return known["text"].strip()
    sys.exit(
        f"no reason for {figure}, {label} at {at}: {deviation(row):+.1%}. "
        "To fix: add one to published_words.toml"
    )


def draw(figure: str, rows: list[Row]) -> Path:
    from matplotlib import pyplot

    picture, axes = pyplot.subplots(figsize=(7.5, 4.5), layout="constrained")
    for number, label in enumerate(dict.fromkeys(row[1] for row in rows)):
        mine = [row for row in rows if row[1] == label]
        axes.plot([], [], color=f"C{number}", label=label)
        line = published_line(figure, label)
        axes.plot(*line, "--", color=f"C{number}", linewidth=1)
        axes.plot(
            [float(row[2].split()[0]) for row in mine], [row[4] for row in mine], "o", color=f"C{number}"
        )
    unit = "rho" if figure == "5.11-rho" else "sum of levels" if figure in hierarchical.FIGURES else "hours"
    axes.set(title=WORDS["titles"][figure], xlabel=rows[0][2].split(" ", 1)[1], ylabel=unit)
    if figure not in hierarchical.FIGURES:
        axes.set_ylim(0, 1.15 * max(max(row[3], row[4]) for row in rows))
    axes.plot([], [], "k--", linewidth=1, label="published")
    axes.plot([], [], "ko", label="ours")
    axes.legend(fontsize="small")
    file = DOCS / "pictures" / f"published-{figure}.png"
    picture.savefig(file, dpi=80, metadata={"Software": None})
    pyplot.close(picture)
    return file


def published_line(figure: str, label: str) -> tuple[list[float], list[float]]:
    """Places and values of all published points of a curve."""
    if figure in hierarchical.FIGURES:
        counts = range(1, 19)
        return list(map(float, counts)), [sum(hierarchical.published(figure, label, n)) for n in counts]
    points = []
    for curve in FIGURES[figure].curves:
        if label == curve.label or (label.startswith(f"{curve.label}, ") and figure == "priorities"):
            kind = label.rsplit(" ", 1)[1] if figure == "priorities" else ""
            for tenth in [round(0.2 * i, 1) for i in range(1, 31)] + [100.0 * i for i in range(1, 8)]:
                value = published(figure, curve.key, tenth, kind)
                if value is not None:
                    points.append((tenth, value))
    return [at for at, _ in points], [value for _, value in points]


def table(rows: list[Row]) -> list[str]:
    """A line for each curve; the points are in the runs that are kept, and in the picture."""
    lines = [
        "| curve | points | median deviation | largest | there: published, ours |",
        "|---|---|---|---|---|",
    ]
    for label in dict.fromkeys(row[1] for row in rows):
        mine = [row for row in rows if row[1] == label]
        worst = max(mine, key=lambda row: abs(deviation(row)))
        median = statistics.median(abs(deviation(row)) for row in mine)
        mark = " *" if abs(deviation(worst)) > NOTABLE else ""
        lines.append(
            f"| {label} | {len(mine)} | {median:.1%} | {deviation(worst):+.1%}{mark} "
            f"| {worst[2]}: {worst[3]:.2f}, {worst[4]:.2f} |"
        )
    return lines


def named(rows: list[Row]) -> str:
    """Curves with the points of these rows, and how far they are off."""
    parts = []
    for label in dict.fromkeys(row[1] for row in rows):
        mine = [row for row in rows if row[1] == label]
        off = sorted(deviation(row) for row in mine)
        far = f"{off[0]:+.1%}" if len(off) == 1 else f"{off[0]:+.1%} to {off[-1]:+.1%}"
        unit = mine[0][2].split(" ", 1)[1]
        places = [row[2].split()[0] for row in mine]
        where = ", ".join(places) if len(places) < 4 else f"{len(places)} points, {places[0]} to {places[-1]}"
        parts.append(f"{label} at {where} {unit} ({far})")
    return "; ".join(parts)


def main() -> None:
    kept = [run for run in json.loads(KEPT.read_text()) if run["rules"] in ("published", "gavel", "")]
    parts, summary, skipped = [], [], []
    reasons: dict[str, int] = {}
    for figure, title in WORDS["titles"].items():
        runs = [run for run in kept if run["figure"] == figure]
        if figure == "5.11":
            runs = [{**run, "figure": "5.11"} for run in kept if run["figure"] in ("5.11", "5.11-rho")]
        if not runs:
            skipped.append(f"- {title}: nothing")
            continue
        rows = rows_of(figure, runs)
        off = sorted(abs(deviation(row)) for row in rows)
        summary.append(
            f"| {figure} | {title} | {len(rows)} | {statistics.median(off):.1%} | {off[-1]:.1%} "
            f"| {sum(x <= NOTABLE for x in off)} |"
        )
        parts += ["", f"## {figure}: {title}", ""]
        if figure != "physical":
            parts += [f"![{title}](pictures/{draw(figure, rows).name})", ""]
        parts += table(rows)
        notable = [row for row in rows if abs(deviation(row)) > NOTABLE]
        for words in dict.fromkeys(reason(row) for row in notable):
            number = reasons.setdefault(words, len(reasons) + 1)
            parts += ["", f"\\* {named([row for row in notable if reason(row) == words])}: reason {number}."]
        if figure in FIGURES and figure != "physical":
            missing = not_run(figure, runs)
            skipped += [f"- {figure}: {'; '.join(missing)}"] if missing else []
    head = ["| figure | what | points | median | largest | within 5 % |", "|---|---|---|---|---|---|"]
    lines = [
        WORDS["head"].strip(),
        "",
        *head,
        *summary,
        *parts,
        "",
        "## Ratios in the text, the physical cluster, rounds and estimates",
        *(
            line
            for part in ("headlines", "physical", "renewals", "rounds", "estimated")
            for line in ("", WORDS["mechanism"][part], "", str(getattr(mechanism, part)()))
        ),
        "",
        "## Reasons",
        "",
        *(f"{number}. {words}" for words, number in reasons.items()),
        "",
        "## Published points that were not run",
        "",
        *skipped,
        "",
        WORDS["not_compared"].strip(),
    ]
    (DOCS / "published.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
