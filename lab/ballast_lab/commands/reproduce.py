"""``ballast reproduce``: published figures and tables by name, and the program that makes ours of each."""

import dataclasses
import difflib
import functools
import json
import runpy
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import click

HERE = Path(__file__).resolve()
INSTALLED, CHECKOUT = HERE.parents[2], HERE.parents[3]
"""The folder of the package ballast_lab; that of Ballast's repository, where this is a checkout."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A published figure or table.

    Attributes:
        source: the paper's name, and its figure or table.
        published: what it prints; for a curve or a table of many values, a band or where they are shown.
        program: makes ours; from the folder above ``ballast_lab``, or in the repository.
        arguments: of the program; ``{data}``: the folder of the artifact.
        part: a function of the program that returns the figure, in place of running all of it.
        page: has ours beside what is published.
        artifact: the name of the folder of other people's files that it reads; empty: none.
    """

    source: str
    published: str
    program: str
    arguments: tuple[str, ...] = ()
    part: str = ""
    page: str = ""
    artifact: str = ""

    @property
    def path(self) -> Path:
        """Of the program, whether it is there or not."""
        return (INSTALLED if self.program.startswith("ballast_lab/") else CHECKOUT) / self.program


def _gavel(name: str, at: str, what: str, *options: str) -> Figure:
    return Figure(
        source=f"Gavel, {what}",
        published="printed beside ours",
        program="lab/benchmarks/simulator/published.py",
        arguments=("--figure", name, "--at", at, *options),
        page="lab/docs/published.md",
    )


def _of_page(program: str, page: str, paper: str, part: str, what: str, published: str) -> Figure:
    """A part of a page that a program writes."""
    return Figure(source=paper + what, published=published, program=program, part=part, page=page)


_planner = functools.partial(
    _of_page,
    "lab/benchmarks/planning/published_page.py",
    "lab/docs/published-planners.md",
    "dissertation, ",
)
_prices = functools.partial(
    _of_page, "lab/benchmarks/prices/page.py", "lab/docs/spot-figures.md", "dissertation, "
)
_dynamic = functools.partial(
    _of_page, "benchmarks/trainer/published_page.py", "lab/docs/published-dynamic-models.md", ""
)


def _artifact(module: str, source: str, published: str, page: str, *options: str) -> Figure:
    """Made from the files of an artifact, in the folder of the module's name."""
    return Figure(
        source=source,
        published=published,
        program=f"ballast_lab/{module}.py",
        arguments=("--data", "{data}", *options),
        page=page,
        artifact=module.replace("_", "-"),
    )


SEEDS = ("--seeds", "0", "1", "2")
FIGURES = {
    "gavel-physical": _gavel("physical", "0", "its physical traces (table 5.3) in its own simulator"),
    "gavel-5.9": _gavel("5.9", "1.2", "figure 5.9 at 1.2 jobs/h"),
    "gavel-5.10": _gavel("5.10", "0.4", "figure 5.10 at 0.4 jobs/h"),
    "gavel-5.11": _gavel("5.11", "0.4", "figure 5.11 at 0.4 jobs/h"),
    "gavel-5.11-rho": _gavel("5.11-rho", "0.4", "figure 5.11 at 0.4 jobs/h, rho"),
    "gavel-5.12-5.13": Figure(
        source="Gavel, figures 5.12 and 5.13",
        published="printed beside ours",
        program="lab/benchmarks/simulator/published_hierarchical.py",
        page="lab/docs/published.md",
    ),
    "gavel-5.14": Figure(
        source="Gavel, figure 5.14",
        published="minutes for 5 teams with 2,048 jobs, up to 10 for 512 jobs that share",
        program="benchmarks/allocation/growth.py",
        arguments=("--trials", "1"),
        page="docs/policies.md",
    ),
    "gavel-cost": Figure(
        source="Gavel, section 5.7.3: cost with and without deadlines",
        published="1.4 and 1.2 times cheaper",
        program="lab/benchmarks/prices/gavel_cost.py",
        page="lab/docs/spot-figures.md",
    ),
    "gavel-fifo-single": _gavel("fifo-single", "1.2", "FIFO on one GPU at 1.2 jobs/h"),
    "gavel-fifo-multiple": _gavel("fifo-multiple", "0.4", "FIFO with gangs at 0.4 jobs/h"),
    "gavel-makespan": _gavel("makespan", "100", "makespan of 100 jobs", *SEEDS),
    "gavel-priorities": _gavel("priorities", "1", "priorities at 1 job/h", *SEEDS),
    "pipedream-2.2": _planner("pipedream", "table 2.2: PipeDream's configurations", "15-1"),
    "ptdp-4.1": _planner("parameters", "table 4.1: parameters", "1.7 to 1008 billion"),
    "ptdp-4.1-degrees": _planner("degrees", "table 4.1: degrees", "1 x 1 to 8 x 64"),
    "ptdp-4.2": _planner("days", "section 4.5.1 and table 4.2: days of training", "23 to 156 days"),
    "ptdp-4.6": _planner("bubbles", "figure 4.6: bubble by data-parallel size", "(n - d) / b'"),
    "ptdp-4.8": _planner("microbatches", "figure 4.8: microbatch size", "best at 4"),
    "ptdp-4.3.5": _planner("recomputed", "section 4.3.5: recomputing every c-th layer", "every 1 or 2"),
    "2bw-3.9": _planner("largest_model", "figure 3.9: the largest model", "almost 30 billion, 64 stages"),
    "amp-6-11": Figure(
        source="AMP, tables 6 to 11: the best measured steps",
        published="1.10, 1.54 and 1.77 times Megatron",
        program="lab/benchmarks/planning/published_page.py",
        part="amp",
        page="lab/docs/published-planners.md",
    ),
    "prices-6.1": _prices("cost_normalised", "table 6.1: speed per dollar", "0.4 to 1.8 of a K80's"),
    "prices-6.2": _prices("lifetimes", "figure 6.2: availability", "hours on AWS, at least daily on GCP"),
    "prices-6.3": _prices("discounts", "table 6.3: best-case discounts", "2.7 to 8.0"),
    "prices-6.5": _prices("dynamic", "figure 6.5: moving between machines", "up to 3.5, by moving 1.4"),
    "dynmo-cases": _dynamic("six_cases", "DynMo, reviews: six cases on 8 GPUs", "1.17 to 4.52"),
    "dynmo-table-1": _dynamic("overheads", "DynMo, supplement, table 1", "4 to 61 of 10,000 iterations"),
    "dynmo-table-2": _dynamic("scaling", "DynMo, supplement, table 2", "1.2 to 1.39"),
    "dynmo-figure-3": _dynamic("unstable_network", "DynMo, supplement, figure 3", "no numbers"),
    "dynmo-figure-4": _dynamic("repacking", "DynMo, supplement, figure 4", "no numbers; rises"),
    "semi-table-1": _dynamic("migration", "SEMI-migration, table I", "373 to 1,113 s an epoch"),
    "semi-late-ranks": _dynamic("late_ranks", "SEMI-migration, section V", "3.5 and 2.1 at chi 8"),
    "semi-accuracy": Figure(
        source="SEMI-migration, section V-B, on four real ranks",
        published="3.5 times as fast at chi 8, at -1.3 % of accuracy",
        program="benchmarks/trainer/stragglers.py",
        arguments=("--steps", "60", "--chi", "2", "--chi", "8"),
        page="docs/figures.md",
    ),
    "arena": _artifact(
        "arena", "Arena, simulated Philly trace", "printed below ours", "lab/docs/published-allocation.md"
    ),
    "cant-be-late": _artifact(
        "cant_be_late",
        "Can't Be Late, second half of the windows",
        "uniform progress and greedy, as built here",
        "lab/docs/spot-figures.md",
        "--windows",
        "75:",
    ),
    "sailor": _artifact(
        "sailor", "Sailor, its 18 measured plans", "measured, beside ours", "lab/docs/sailor.md"
    ),
    "shockwave": _artifact(
        "shockwave",
        "Shockwave, 120 jobs on 32 V100s",
        "printed below ours",
        "lab/docs/published-allocation.md",
    ),
    "skynomad": _artifact(
        "skynomad", "SkyNomad, all of its cells", "1.077 of the optimum, mean", "lab/docs/spot-figures.md"
    ),
}


class NotHereError(Exception):
    """A figure cannot be run here; the text says why, and what it needs."""


def reproduce(name: str | None, data: Path | None, *, everything: bool) -> None:
    """List the figures, or run one or all of them.

    Args:
        name: of a figure; None: list them.
        data: has the artifacts' folders, or is the one that ``name`` reads.
        everything: all that can be run; says of the others why not.

    Raises:
        ClickException: the name is unknown, the figure cannot be run here, or a program failed.
    """
    if name is not None and everything:
        raise click.UsageError(f"--all runs every figure, {name!r} names one. To fix: leave one of them out")
    if everything:
        failed = [name for name, why in _run_all(data) if why]
        if failed:
            raise click.ClickException(f"{len(failed)} of {len(FIGURES)} failed: {', '.join(failed)}")
    elif name is None:
        _list()
    elif name not in FIGURES:
        near = [other for other in FIGURES if name.lower() in other]
        near = near or difflib.get_close_matches(name.lower(), FIGURES, n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise click.UsageError(f"{name!r} is no figure{hint} `ballast reproduce` lists them")
    else:
        try:
            why = _run(FIGURES[name], _folder(FIGURES[name], data, alone=True))
        except NotHereError as error:
            raise click.UsageError(f"{name}: {error}") from error
        if why:
            raise click.ClickException(f"{name}: {why}")


def _list() -> None:
    rows = [("NAME", "SOURCE", "PUBLISHED", "--DATA", "PAGE")]
    rows += [(name, each.source, each.published, each.artifact, each.page) for name, each in FIGURES.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(map(str.ljust, row, widths)).rstrip())


def _run_all(data: Path | None) -> Iterator[tuple[str, str]]:
    """(name, why it failed), of those that were run."""
    for name, figure in FIGURES.items():
        click.echo(f"\n== {name}: {figure.source} (published: {figure.published})")
        try:
            folder = _folder(figure, data, alone=False)
        except NotHereError as error:
            click.echo(f"not run: {error}")
            continue
        why = _run(figure, folder)
        if why:
            click.echo(f"failed: {why}")
        yield name, why


def _folder(figure: Figure, data: Path | None, *, alone: bool) -> Path | None:
    """Where the figure's artifact is.

    Raises:
        NotHereError: it is missing, or the program is.
    """
    if not figure.path.is_file():
        raise NotHereError(
            f"{figure.program} is in Ballast's repository alone. "
            "To fix: install ballast-lab from a clone of it"
        )
    if not figure.artifact:
        return None
    if data is None:
        raise NotHereError(
            f"reads the files that `python -m {figure.program[:-3].replace('/', '.')} --help` names, which "
            "are not part of Ballast. To fix: --data FOLDER"
        )
    if (data / figure.artifact).is_dir():
        return data / figure.artifact
    if alone:
        return data
    raise NotHereError(f"{data} has no folder {figure.artifact}")


def _run(figure: Figure, folder: Path | None) -> str:
    """Run it as the command line would and print what it makes; why it failed, or nothing."""
    arguments = [each.format(data=folder) for each in figure.arguments]
    path = [*sys.path] if figure.program.startswith("ballast_lab/") else [str(figure.path.parent), *sys.path]
    with mock.patch.object(sys, "argv", [str(figure.path), *arguments]), mock.patch.object(sys, "path", path):
        try:
            if figure.part:
                _print(runpy.run_path(str(figure.path))[figure.part]())
            else:
                runpy.run_path(str(figure.path), run_name="__main__")
        except SystemExit as end:
            return f"{figure.program} ended with {end.code}" if end.code else ""
        except Exception as error:  # the next figure of --all is run all the same
            return textwrap.shorten(f"{type(error).__name__}: {error}", 500)
    return ""


def _print(found: Any) -> None:
    """A table as text, or rows as JSON, one a line."""
    if isinstance(found, str):
        click.echo(found)
        return
    for row in found if isinstance(found, list) else [found]:
        rounded = json.loads(json.dumps(row), parse_float=lambda value: round(float(value), 4))
        click.echo(json.dumps(rounded))
