"""Emulated GPU speed: padding that makes a stage's work take as long as on a slower device.

A process node without GPUs gives its pods a slow-down factor by model family.  The trainer
measures the CPU seconds that a stage's thread really used and sleeps until factor times as long
has passed.  So a layer that gets cheaper really gets faster; nothing is scripted.  Everything that
is printed or reported says that it is emulated.
"""

import dataclasses
import json
import time
from collections.abc import Mapping

from ballast_policies.contract import EMULATED_SLOWDOWN_ENV

from ballast_trainer.errors import ConfigurationError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedSpeed:
    """Pads work to ``factor`` times its own CPU seconds."""

    factor: float

    def pad(self, began: float, cpu_seconds: float) -> None:
        """Sleep until ``factor * cpu_seconds`` have passed since ``began`` (``time.perf_counter()``)."""
        rest = began + self.factor * cpu_seconds - time.perf_counter()
        if rest > 0:
            time.sleep(rest)


def emulated_speed(environment: Mapping[str, str], family: str) -> EmulatedSpeed | None:
    """The speed to emulate for a model family, or None where nothing is emulated.

    Raises:
        ConfigurationError: the variable is not a JSON object of factors of at least 1.
    """
    text = environment.get(EMULATED_SLOWDOWN_ENV)
    if not text:
        return None
    try:
        factors = json.loads(text)
        factor = float(factors.get(family, factors.get("default", 1.0)))
    except (ValueError, TypeError, AttributeError) as error:
        reason = f"{text!r} is not a JSON object of factors by model family ({error})"
        raise ConfigurationError(EMULATED_SLOWDOWN_ENV, reason) from error
    if not factor >= 1:
        raise ConfigurationError(EMULATED_SLOWDOWN_ENV, f"factor {factor} of {family!r} is below 1")
    return EmulatedSpeed(factor=factor)
