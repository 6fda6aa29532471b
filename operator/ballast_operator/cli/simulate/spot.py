"""Options of ``ballast simulate --prices FOLDER``, a replay of price logs by the distribution ballast-lab."""

from pathlib import Path

import click

from ballast_operator.cli.simulate.input import all_of

ONLY_HERE = ("start", "checkpoint_seconds", "hysteresis", "oracle")
"""Options of a replay only."""

BUILT_IN = "excerpt"
"""Name of the logs that come with Ballast."""


spot_options = all_of(
    click.option(
        "--start",
        metavar="TIME",
        help="With --prices FOLDER: the moment of the logs at which the first job arrives, as "
        "2020-03-01T00:00:00Z. [default: the first price]",
    ),
    click.option(
        "--checkpoint-seconds",
        type=float,
        help="With --prices FOLDER: to save a job; also its pause when it moves. [default: 5]",
    ),
    click.option(
        "--hysteresis",
        type=float,
        metavar="TIMES",
        help="With --prices FOLDER: a move has to save this many times its cost. [default: 1]",
    ),
    click.option(
        "--oracle/--no-oracle",
        default=True,
        help="With --prices FOLDER: leave out the least cost with the future known, which takes most of "
        "the time.",
    ),
)
"""The options of a replay."""


def is_folder_of_prices(prices: str | None) -> bool:
    """Whether ``--prices`` names logs; prices themselves are TYPE=USD."""
    return prices is not None and (prices == BUILT_IN or "=" not in prices or Path(prices).is_dir())
