"""Sums of neighbouring layers: those in an interval, and the least values in windows that move along."""

import numpy as np


def window_least(values: np.ndarray, first: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """[k, j]: the least of values[k, first[k, j] .. j - 1]; infinite where there is none."""
    widths = ends - first
    level = np.frexp(np.maximum(widths, 1))[1] - 1
    layers = [values]
    for size in range(int(level.max())):
        step = 1 << size
        wider = layers[-1].copy()
        wider[:, :-step] = np.minimum(wider[:, :-step], layers[-1][:, step:])
        layers.append(wider)
    stacked = np.stack(layers)
    rows = np.arange(len(values))[:, None]
    begin = np.minimum(first, len(ends) - 1)
    last = np.maximum(ends - (1 << level), 0)
    least: np.ndarray = np.minimum(stacked[level, rows, begin], stacked[level, rows, last])
    return np.where(widths > 0, least, np.inf)


def loads_between(sums: np.ndarray, speeds: np.ndarray, low: float, high: float) -> np.ndarray:
    """Every load that some layers have on some rank, above ``low`` and up to ``high``, ascending.

    Args:
        sums: seconds of the first j layers, shape (L + 1,).
        speeds: of the ranks, shape (p,).
        low: seconds.
        high: seconds.
    """
    found = []
    for speed in np.unique(speeds):
        first = np.searchsorted(sums, sums + low * speed * (1 - 1e-12), side="right")
        end = np.searchsorted(sums, sums + high * speed * (1 + 1e-12), side="right")
        count = np.maximum(end - first, 0)
        begin = np.repeat(np.arange(len(sums)), count)
        ends = np.arange(len(begin)) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
        found.append((sums[ends] - sums[begin]) / speed)
    return np.unique(np.concatenate(found))
