"""The parts of commands that the distribution ballast-lab registers, found without importing it."""

from typing import Any

import click
from ballast_policies.registry import LABORATORY, Registry, RegistryError

SIMULATIONS: Registry[Any] = Registry("simulation", group="ballast.simulations", row_type=object, rows={})


def from_lab(name: str, option: str, *, instead: str = "") -> Any:
    """What ballast-lab registers as ``lab.NAME``.

    Args:
        name: without the prefix.
        option: that asks for it, as on the command line, for the message.
        instead: an option that does without it.

    Raises:
        ClickException: it is not installed, or cannot be loaded.
    """
    try:
        return SIMULATIONS[f"lab.{name}"]
    except KeyError as error:
        raise lab_is_missing(option, instead=instead) from error
    except RegistryError as error:
        raise click.ClickException(f"{option}: {error}") from error


def lab_is_missing(option: str, *, instead: str = "") -> click.ClickException:
    """That ``option`` needs ballast-lab, and how to install it, or what does without it: ``instead``."""
    other = f", or choose {instead}" if instead else ""
    return click.ClickException(
        f"{option}: needs the Python distribution {LABORATORY!r}, which reproduces other people's results "
        f"and is not installed. To fix: pip install {LABORATORY}{other}"
    )
