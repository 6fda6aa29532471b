"""Options of ``ballast simulate --prices FOLDER``, a replay of price logs by the distribution ballast-lab."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

ONLY_HERE = ("start", "checkpoint_seconds", "hysteresis", "oracle")
"""Options of a replay only."""

BUILT_IN = "excerpt"
"""Name of the logs that come with Ballast."""


def spot_options(command: Command) -> Command:
    """The options of a replay, for the command."""
    for option in (
        click.option(
            "--oracle/--no-oracle",
            default=True,
            help="With --prices FOLDER: leave out the least cost with the future known, which takes most of "
            "the time.",
        ),
        click.option(
            "--hysteresis",
            type=float,
            metavar="TIMES",
            help="With --prices FOLDER: a move has to save this many times its cost. [default: 2]",
        ),
        click.option(
            "--checkpoint-seconds",
            type=float,
            help="With --prices FOLDER: to save a job; also its pause when it moves. [default: 5]",
        ),
        click.option(
            "--start",
            metavar="TIME",
            help="With --prices FOLDER: the moment of the logs at which the first job arrives, as "
            "2020-03-01T00:00:00Z. [default: the first price]",
        ),
    ):
        command = option(command)
    return command


def is_folder_of_prices(prices: str | None) -> bool:
    """Whether ``--prices`` names logs; prices themselves are TYPE=USD."""
    return prices is not None and (prices == BUILT_IN or "=" not in prices or Path(prices).is_dir())
