"""``ballast reproduce``, and the parts of commands that ballast-lab registers, found without importing it."""

from pathlib import Path
from typing import Any

import click
from ballast_policies.registry import LABORATORY, Registry, RegistryError

SIMULATIONS: Registry[Any] = Registry("simulation", group="ballast.simulations", row_type=object, rows={})


def from_lab(name: str, option: str, *, instead: str = "") -> Any:
    """Function that ballast-lab registers as ``lab.NAME``. Raises ClickException: it is missing, or fails."""
    try:
        return SIMULATIONS[f"lab.{name}"]
    except KeyError as error:
        raise lab_is_missing(option, instead=instead) from error
    except RegistryError as error:
        raise click.ClickException(f"{option}: {error}") from error


def lab_is_missing(option: str, *, instead: str = "") -> click.ClickException:
    """Message that ``option`` needs ballast-lab, how to install it, or what does without it: ``instead``."""
    other = f", or choose {instead}" if instead else ""
    return click.ClickException(
        f"{option}: needs the Python distribution {LABORATORY!r}, which reproduces other people's results "
        f"and is not installed. To fix: pip install {LABORATORY}{other}"
    )


@click.command()
@click.argument("figure", required=False)
@click.option(
    "--data",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Has the folders of the papers' artifacts (arena, sailor, ...), or is the one that FIGURE reads.",
)
@click.option(
    "--all", "everything", is_flag=True, help="All that can be run here, and of the others why not."
)
def reproduce(figure: str | None, data: Path | None, everything: bool) -> None:
    """Make a published FIGURE or table again, by name; without one: list them.

    In the list: where it was published and with which values, the folder that it needs (--data), and the page
    that has ours beside it. Curves are run at one point that takes a laptop minutes.
    """
    from_lab("reproduce", "ballast reproduce")(figure, data, everything=everything)
