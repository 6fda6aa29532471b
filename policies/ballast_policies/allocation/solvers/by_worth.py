"""Large programs that maximise worth and demand nothing: smoothed prices, then the few jobs near a tie."""

import dataclasses

import numpy as np

from ballast_policies.allocation.solvers import restricted_program
from ballast_policies.allocation.solvers.dense_program import Rows
from ballast_policies.allocation.solvers.restricted_program import Restricted
from ballast_policies.allocation.solvers.smoothed_prices import LOWEST_TEMPERATURE, smoothed_prices


def solve(rows: Rows) -> Restricted | None:
    """Optimal shares and multipliers of a program without gain and demands; None: this method found none."""
    assert rows.value is not None
    open_types = np.flatnonzero(rows.capacity > 0)
    if not len(open_types):
        return None
    kept = np.append(open_types, len(rows.capacity))
    some = rows
    if len(open_types) < len(rows.capacity):
        some = dataclasses.replace(
            rows,
            rates=rows.rates[:, kept],
            usable=rows.usable[:, kept],
            value=rows.value[:, kept],
            absent=rows.absent[:, kept],
            capacity=rows.capacity[open_types],
            lift=rows.lift[open_types],
        )
    prices = smoothed_prices(some)
    found = None if prices is None else restricted_program.solve(some, prices, precision=LOWEST_TEMPERATURE)
    if found is None or some is rows:
        return found
    X, every = np.zeros((len(rows), len(rows.capacity))), np.zeros(len(rows.capacity))
    X[:, open_types], every[open_types] = found.X, found.prices
    # A type without a GPU costs the price that its highest-paying job would accept.
    worth = rows.value[:, :-1] / rows.gpus[:, None]
    closed = rows.capacity <= 0
    every[closed] = worth[:, closed].max(axis=0)
    return dataclasses.replace(found, X=X, prices=every)
