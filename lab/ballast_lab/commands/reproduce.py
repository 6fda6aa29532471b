"""``ballast reproduce``: lists published figures and tables, makes ours of them and judges it."""

import difflib
import json
import runpy
import sys
import textwrap
from pathlib import Path
from typing import Any
from unittest import mock

import click

from ballast_lab.catalogue import FIGURES, Figure
from ballast_lab.comparison import Comparison, near


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
        _run_all(data)
    elif name is None:
        _list()
    elif name not in FIGURES:
        near = [other for other in FIGURES if name.lower() in other]
        near = near or difflib.get_close_matches(name.lower(), FIGURES, n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else "."
        fix = "To fix: choose one that `ballast reproduce` lists"
        raise click.UsageError(f"{name!r} is no figure{hint} {fix}")
    else:
        try:
            why, _ = _run(FIGURES[name], _folder(FIGURES[name], data, alone=True))
        except NotHereError as error:
            raise click.UsageError(f"{name}: {error}") from error
        if why:
            raise click.ClickException(f"{name}: {why}")


def _list() -> None:
    rows = [("NAME", "SOURCE", "PUBLISHED", "--DATA", "PAGE")]
    rows += [
        (
            name,
            each.source,
            each.published or "-",
            each.artifact,
            each.page or f"not made: {each.why_not}",
        )
        for name, each in FIGURES.items()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(map(str.ljust, row, widths)).rstrip())


def _run_all(data: Path | None) -> None:
    """Each that can be run, then how many are inside their band and the names of the others.

    Raises:
        ClickException: a program failed, or more values are outside their band than is known.
    """
    names: dict[str, list[str]] = {kind: [] for kind in ("inside", "outside", "without a band", "failed")}
    away = []
    for name, figure in FIGURES.items():
        click.echo(f"\n== {name}: {figure.source} (published: {figure.published or '-'})")
        try:
            folder = _folder(figure, data, alone=False)
        except NotHereError as error:
            click.echo(f"not run: {error}")
            away.append(name)
            continue
        why, found = _run(figure, folder)
        if why:
            click.echo(f"failed: {why}")
        kind = "outside" if found and found.outside else "inside" if found else "without a band"
        names["failed" if why else kind].append(name)
    click.echo(f"\n{len(FIGURES)} figures, {len(away)} not run")
    for kind, those in names.items():
        click.echo(f"{kind}: {len(those)}" + (f": {', '.join(those)}" if those and kind != "inside" else ""))
    if names["failed"]:
        raise click.ClickException(
            f"{len(names['failed'])} of {len(FIGURES)} failed: {', '.join(names['failed'])}"
        )


def _folder(figure: Figure, data: Path | None, *, alone: bool) -> Path | None:
    """Folder of the figure's artifact.

    Raises:
        NotHereError: it is missing, or the program is.
    """
    if figure.why_not:
        raise NotHereError(f"{figure.source} is not made: {figure.why_not}")
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


def _run(figure: Figure, folder: Path | None) -> tuple[str, Comparison | None]:
    """Run it as the command line would and print what it makes.

    Returns:
        Why it failed, or nothing; what it compared, where it has a band.
    """
    arguments = [each.format(data=folder) for each in figure.arguments]
    path = [*sys.path] if figure.program.startswith("ballast_lab/") else [str(figure.path.parent), *sys.path]
    found = None
    with mock.patch.object(sys, "argv", [str(figure.path), *arguments]), mock.patch.object(sys, "path", path):
        try:
            if figure.part:
                part = runpy.run_path(str(figure.path))[figure.part]
                made = part(standalone_mode=False) if isinstance(part, click.Command) else part()
                found = None if made is None else _printed(made, figure.within)
            else:
                runpy.run_path(str(figure.path), run_name="__main__")
        except SystemExit as end:
            return (f"{figure.program} ended with {end.code}" if end.code else ""), None
        except Exception as error:  # the next figure of --all is run all the same
            return textwrap.shorten(f"{type(error).__name__}: {error}", 500), None
    if found is None:
        return "", None
    click.echo(f"inside their band: {len(found.points) - len(found.outside)} of {len(found.points)}")
    for each in found.outside:
        click.echo(f"outside: {each.what}: {each.ours:.4g}, not {each.low:.4g} to {each.high:.4g}")
    if not found.points:
        return "it judged nothing", found
    if found.outside and figure.known:
        click.echo(f"known of {figure.outside}: {figure.known}")
    if len(found.outside) > figure.outside:
        return f"{len(found.outside)} of {len(found.points)} outside their band", found
    return "", found


def _printed(found: Any, within: float) -> Comparison | None:
    """Print a table as text, or rows as JSON, one a line; what there is to judge of it."""
    if isinstance(found, str | Comparison):
        if str(found):
            click.echo(str(found))
        return found if isinstance(found, Comparison) else None
    rows = found if isinstance(found, list) else [found]
    for row in rows:
        rounded = json.loads(json.dumps(row), parse_float=lambda value: round(float(value), 4))
        click.echo(json.dumps(rounded))
    if not within:
        return None
    return Comparison(
        tuple(near(f"row {row}", each["published"], each["ours"], within) for row, each in enumerate(rows, 1))
    )
