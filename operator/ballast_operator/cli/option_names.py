"""Names of command-line options in place of the settings that messages of ``ballast_policies`` name."""

import math
import sys
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click


def printable(text: str) -> str:
    """The text without what a terminal would obey: escape sequences, other control and format characters.

    A trainer's message reaches the terminal of the cluster's administrator; each such character but a
    line's end becomes U+FFFD.
    """
    return "".join(
        "\N{REPLACEMENT CHARACTER}" if unicodedata.category(c)[0] == "C" and c != "\n" else c for c in text
    )


def import_from_here(policy: str) -> None:
    """Let ``module:function`` name modules in the working directory, as ``python -m`` does."""
    here = str(Path.cwd())
    if ":" in policy and here not in sys.path:
        sys.path.insert(0, here)


class Number(click.FloatRange):
    """A number within bounds; click's own lets ``nan`` pass, which is in no order with them."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number. Raises BadParameter: it is none, infinite, or out of bounds."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{number} is no finite number. To fix: give one", param, ctx)
        return number


class NewFile(click.Path):
    """A file to write, whose folder is there: looked at before what is to be written is worked out."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path. Raises BadParameter: it is a folder, is in none, or may not be written."""
        path = Path(str(super().convert(value, param, ctx)))
        if not path.parent.is_dir():
            self.fail(f"there is no folder {path.parent}. To fix: make it", param, ctx)
        return path


class Database(click.Path):
    """A SQLite file, or ``postgresql://...``, which is looked at when it is used; as text."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text. Raises BadParameter: it is a folder."""
        return str(value if "://" in str(value) else super().convert(value, param, ctx))


def with_option(message: str, options: Mapping[str, str]) -> str:
    """``message`` with the setting that it begins with, if it does, replaced by its option.

    ``options``: setting -> option, where that is not ``--round-seconds`` for ``round_seconds``.
    """
    field, colon, rest = message.partition(":")
    if not colon or not field.isidentifier():
        return message
    return f"{options.get(field, '--' + field.replace('_', '-'))}:{rest}"
