"""Measured layers in the saved state: lists of numbers, in a fixed order."""

import math
from collections.abc import Mapping
from typing import Any

from ballast_policies.contract.errors import shown
from ballast_policies.planning.memory.measured_layers import MeasuredLayers

from ballast_operator.allocator.problem.layer_profiles import MOST_LAYERS, KindProfile
from ballast_operator.kube.kinds import key_of_job

ADDED = ("output_bytes", "gradient_bytes", "repeated_bytes", "weight_bytes")
"""Columns that older operators do not write."""


def saved_layers(profiles: Mapping[str, KindProfile]) -> dict[str, list[Any]]:
    """As JSON has them."""
    return {
        kind: [
            "/".join(profile.job),
            list(profile.layers.seconds),
            list(profile.layers.held_bytes),
            list(profile.layers.activation_bytes),
            *(list(getattr(profile.layers, name)) for name in ADDED),
        ]
        for kind, profile in profiles.items()
    }


def read_layers(entry: Any) -> KindProfile:
    """One entry of :func:`saved_layers`.

    Raises:
        TypeError, ValueError: it is none.
    """
    job, *columns = entry
    if not isinstance(job, str):
        raise ValueError(f"{shown(job)} is not the name of a job")
    if len(columns) not in (3, 6, 3 + len(ADDED)):
        raise ValueError(f"{len(columns)} columns, 3, 6 or {3 + len(ADDED)} are expected")
    rows = [[_amount(value) for value in row] for row in columns]
    count = len(rows[1])
    if not 0 < count <= MOST_LAYERS or any(len(row) not in (0, count) for row in rows):
        raise ValueError(f"{[len(row) for row in rows]} values for {count} layers")
    layers = MeasuredLayers(
        seconds=tuple(rows[0]),
        held_bytes=tuple(map(int, rows[1])),
        activation_bytes=tuple(map(int, rows[2])),
        **{name: tuple(map(int, row)) for name, row in zip(ADDED, rows[3:], strict=False)},
    )
    return KindProfile(key_of_job(job), layers)


def _amount(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{shown(value)} is not an amount")
    return float(value)
