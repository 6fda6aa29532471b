"""ZERO-resizing: number and choice of the contraction columns that a straggler prunes (section III).

    gamma_i = (T_i - mean_k T_k) / M_i        equation 1; 0 for a rank that is not late

T_i seconds of rank i's iteration, M_i of its matrix products.  gamma is then made different for each
layer by how much its columns have changed (delta), and within a layer the columns that changed least
are left out.
"""

from collections.abc import Sequence
from math import floor

import numpy as np

LARGEST_RATIO = 0.9
"""More is not left out of a product, however late the rank: the result would be noise."""

MICRO_THRESHOLD = 1e-3
"""theta_iter: change per iteration below which a column is a candidate (III-B)."""

DECAY = 0.8
"""alpha: least share of gamma that every layer takes (III-B)."""


def resize_ratios(
    seconds: Sequence[float],
    product_seconds: Sequence[float],
    *,
    reference_seconds: float | None = None,
) -> tuple[float, ...]:
    """Gamma of every rank, equation 1, clipped to [0, 0.9].

    Args:
        seconds: T, by rank.
        product_seconds: M, by rank.
        reference_seconds: target of the late ranks; default: the mean. SEMI uses the least.

    Raises:
        ValueError: as many M as T are needed, each above 0.
    """
    T, M = np.asarray(seconds, dtype=float), np.asarray(product_seconds, dtype=float)
    if T.shape != M.shape or (M <= 0).any():
        raise ValueError(f"{len(T)} ranks need as many product seconds, all above 0, got {M.tolist()}")
    reference = float(T.mean()) if reference_seconds is None else reference_seconds
    return tuple(np.clip((T - reference) / M, 0.0, LARGEST_RATIO).tolist())


def excess_columns(columns: int, ratio: float) -> int:
    """Columns that a rank with this gamma gives up, of its own; it keeps one at least, however few it has."""
    return min(round(columns * ratio), columns - 1)


def layer_ratio(variation: np.ndarray, ratio: float, *, iterations: int) -> float:
    """Gamma of one layer: max(1 - #(delta > theta) / L, alpha gamma), at most 0.9 (Algorithm 1, 9-11).

    Args:
        variation: delta, mean change of each column over the last epoch, shape (L,).
        ratio: gamma of the rank.
        iterations: N_iter of an epoch; theta = N_iter x :data:`MICRO_THRESHOLD`.
    """
    changed = int((variation > iterations * MICRO_THRESHOLD).sum())
    return min(LARGEST_RATIO, max(1 - changed / len(variation), DECAY * ratio))


def keep_list(
    variation: np.ndarray,
    ratio: float,
    *,
    pruned_epochs: np.ndarray | None = None,
    patience: int | None = None,
) -> np.ndarray:
    """Columns that are computed, ascending: the L (1 - gamma) whose delta is largest (Algorithm 1, 12-14).

    The text calls this list the pruned columns, the algorithm the kept ones; here it is the kept ones.
    Ties go to the lower column.

    Args:
        variation: delta of each column, shape (L,).
        ratio: gamma of the layer.
        pruned_epochs: for how many epochs each column has been left out; only with ``patience``.
        patience: columns left out this long come first, the longest first. The published rule has no
            such guarantee: where kept columns keep changing, the others never return. With it no column
            is left out longer than patience + ceil(1 / (1 - gamma)) epochs.
    """
    columns = len(variation)
    kept = columns - floor(columns * ratio + 1e-9)
    overdue = np.zeros(columns)
    if patience is not None and pruned_epochs is not None:
        overdue = np.where(pruned_epochs >= patience, pruned_epochs, 0)
    order = np.lexsort((np.arange(columns), -np.asarray(variation), -overdue))
    return np.sort(order[:kept])


def updated_variation(variation: np.ndarray, fresh: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Delta after an epoch: measured again for kept columns, preserved for the others (III-B).

    A column that was left out has not changed, and would stay left out if that counted.
    """
    updated = np.array(variation, dtype=float)
    updated[kept] = np.asarray(fresh, dtype=float)[kept]
    return updated
