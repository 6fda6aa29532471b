"""Emulated GPU speed: padding that makes a stage's work take as long as on a slower device.

A process node without GPUs gives its pods a slow-down factor by model family.  The trainer
measures the CPU seconds that a stage's thread has used and sleeps until factor times as long
has passed.  So a layer that gets cheaper also gets faster.  Everything
printed or reported is marked as emulated.
"""

import dataclasses
import time
from collections.abc import Mapping

from ballast_policies.contract.decode import parse_json
from ballast_policies.contract.limits import MESSAGE
from ballast_policies.contract.messages import EMULATED_SLOWDOWN_ENV

from ballast_trainer.errors import ConfigurationError

EMULATED_STRAGGLER_ENV = "BALLAST_EMULATED_STRAGGLER"
"""Variable: factor of the time of this rank's tensor-parallel products, on top of its slow-down."""

_MOST = 1e6
"""A millisecond's work then takes a quarter of an hour."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedSpeed:
    """Pads work to ``factor`` times its own CPU seconds.

    Attributes:
        factor: of all work of a stage.
        products: how many times slower still the products of tensor-parallel layers are: a straggler
            as Wang et al. (arXiv 2401.11469) emulate it.
    """

    factor: float
    products: float = 1.0

    def of_products(self) -> "EmulatedSpeed":
        """The speed of products."""
        return EmulatedSpeed(factor=self.factor * self.products)

    def pad(self, began: float, cpu_seconds: float) -> None:
        """Sleep until ``factor * cpu_seconds`` have passed since ``began`` (``time.perf_counter()``)."""
        rest = began + self.factor * cpu_seconds - time.perf_counter()
        if rest > 0:
            time.sleep(rest)


def emulated_speed(environment: Mapping[str, str], family: str) -> EmulatedSpeed | None:
    """The speed to emulate for a model family, or None where nothing is emulated.

    Raises:
        ConfigurationError: a variable is no factor of at least 1, or no JSON object of such.
    """
    text, products = environment.get(EMULATED_SLOWDOWN_ENV), environment.get(EMULATED_STRAGGLER_ENV)
    if not text and not products:
        return None
    return EmulatedSpeed(factor=_factor(text or "{}", family), products=_products(products or "1"))


def _products(text: str) -> float:
    try:
        factor = float(text)
    except ValueError as error:
        raise ConfigurationError(
            EMULATED_STRAGGLER_ENV, f"{text!r} is not a factor. To fix: e.g. 8"
        ) from error
    return _usable(EMULATED_STRAGGLER_ENV, "factor", factor)


def _factor(text: str, family: str) -> float:
    try:
        factors = parse_json(text, limits=MESSAGE)
        factor = float(factors.get(family, factors.get("default", 1.0)))
    except (ValueError, TypeError, AttributeError) as error:
        reason = (
            f"{text!r} is not a JSON object of factors by model family ({error}). "
            'To fix: e.g. {"default": 10}'
        )
        raise ConfigurationError(EMULATED_SLOWDOWN_ENV, reason) from error
    return _usable(EMULATED_SLOWDOWN_ENV, f"factor of {family!r}", factor)


def _usable(variable: str, what: str, factor: float) -> float:
    if not 1 <= factor <= _MOST:
        reason = f"{what} {factor} is not one. To fix: a number from 1 to {_MOST:g}"
        raise ConfigurationError(variable, reason)
    return factor
