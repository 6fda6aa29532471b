"""``ballast reproduce``: other people's figures and tables, made again; ballast-lab has them."""

from pathlib import Path

import click

from ballast_operator.cli.laboratory import from_lab


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
