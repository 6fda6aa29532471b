"""Measured layers in the saved state: lists of numbers, in a fixed order."""

import math
from collections.abc import Mapping
from typing import Any

from ballast_policies.contract.errors import shown
from ballast_policies.planning.launch.memory import MeasuredLayers

from ballast_operator.allocator.problem.layer_profiles import MOST_LAYERS, KindProfile


def saved_layers(profiles: Mapping[str, KindProfile]) -> dict[str, list[Any]]:
    """As JSON has them."""
    return {
        kind: [
            "/".join(profile.job),
            list(profile.layers.seconds),
            list(profile.layers.held_bytes),
            list(profile.layers.activation_bytes),
        ]
        for kind, profile in profiles.items()
    }


def read_layers(entry: Any) -> KindProfile:
    """One entry of :func:`saved_layers`.

    Raises:
        TypeError, ValueError: it is none.
    """
    job, seconds, held, kept = entry
    if not isinstance(job, str):
        raise ValueError(f"{shown(job)} is not the name of a job")
    rows = [[_amount(value) for value in row] for row in (seconds, held, kept)]
    count = len(rows[1])
    if not 0 < count <= MOST_LAYERS or any(len(row) not in (0, count) for row in rows):
        raise ValueError(f"{[len(row) for row in rows]} values for {count} layers")
    layers = MeasuredLayers(
        seconds=tuple(rows[0]), held_bytes=tuple(map(int, rows[1])), activation_bytes=tuple(map(int, rows[2]))
    )
    namespace, _, name = job.partition("/")
    return KindProfile((namespace, name), layers)


def _amount(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{shown(value)} is not an amount")
    return float(value)
