"""Checks of what a user gives the builders of the registered models."""

import math

from ballast_trainer.data.corpus import longest_context


def check_arguments(*, layers: int, context: int, dropout: float, **sizes: int) -> None:
    """Refuse what no model can be built of, before a layer is.

    Args:
        layers: of the model, its two ends among them.
        context: positions of a sample.
        dropout: probability.
        sizes: further counts by name, e.g. the width.

    Raises:
        ValueError: names the argument, its value and what it may be.
    """
    for name, value in {"layers": layers, "context": context, **sizes}.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} {value!r} is no whole number from 1 on")
    if context > longest_context():
        raise ValueError(f"context {context}: the built-in text has samples of at most {longest_context()}")
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise ValueError(f"dropout {dropout!r} is no probability from 0 to below 1")


def check_positive(**numbers: float) -> None:
    """Refuse numbers that are not finite and above 0.

    Raises:
        ValueError: names the argument and its value.
    """
    for name, value in numbers.items():
        usable = isinstance(value, int | float) and not isinstance(value, bool)
        if not usable or not 0 < value < math.inf:
            raise ValueError(f"{name} {value!r} is no number above 0")
