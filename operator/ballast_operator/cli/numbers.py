"""Numbers as options of commands."""

import math
from typing import Any

import click


class Number(click.FloatRange):
    """A number within bounds; click's own lets ``nan`` pass, which is in no order with them."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number.

        Raises:
            click.BadParameter: it is none, infinite, or out of bounds.
        """
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{number} is no finite number. To fix: give one", param, ctx)
        return number
