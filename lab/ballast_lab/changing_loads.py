"""Models of how layers' costs change over a run in the six dynamic cases, for benchmarks and tests.

Each maps the progress of training (0 begin, 1 end) to the relative seconds of every layer, 1 being a
layer at the begin.  They are models of the six cases (DynMo), with constants named below, not
measurements: a running job measures its own layers.
"""

from collections.abc import Callable, Mapping

import numpy as np
from ballast_policies.planning.dynamics import gradual_sparsity

BACKWARD_SHARE = 2 / 3
"""Part of a layer's seconds: the backward takes twice the forward."""

Loads = Callable[[int, float, np.random.Generator], np.ndarray]
"""(layers, progress, generator) -> relative seconds, shape (layers,)."""


def pruning(layers: int, progress: float, generator: np.random.Generator) -> np.ndarray:
    """Global magnitude pruning: layers with smaller weights lose more of them.

    Weight magnitudes of layer i are half-normal with scale s_i from 0.5 to 1.5; one threshold for all
    layers meets the global sparsity. Products get faster in proportion once a layer is sparse enough
    for sparse kernels (75 %), which leaves a tenth that never shrinks.
    """
    return pruned_layers(generator.uniform(0.5, 1.5, layers), gradual_sparsity(progress))


def pruned_layers(scales: np.ndarray, sparsity: float) -> np.ndarray:
    """Relative seconds of layers after global magnitude pruning, by the scale of their weights.

    Args:
        scales: of each layer's half-normal weight magnitudes, shape (layers,).
        sparsity: fraction of all weights that is gone, 0 to 1.
    """
    low, high = 0.0, 10.0 * float(scales.max())
    for _ in range(60):
        threshold = (low + high) / 2
        if _half_normal(threshold / scales).mean() < sparsity:
            low = threshold
        else:
            high = threshold
    density = 1 - _half_normal(low / scales)
    return np.where(density > 0.25, 1.0, 0.1 + 0.9 * density)


def freezing(layers: int, progress: float, generator: np.random.Generator) -> np.ndarray:
    """A prefix of up to 80 % of the layers is frozen: only their forward is left (as in PipeTransformer)."""
    frozen = int(layers * 0.8 * progress)
    return np.where(np.arange(layers) < frozen, 1 - BACKWARD_SHARE, 1.0)


def sparse_attention(layers: int, progress: float, generator: np.random.Generator) -> np.ndarray:
    """Attention is 60 % of a layer (long sequences); its mask keeps less in deeper layers, at least 5 %."""
    depth = np.arange(layers) / max(1, layers - 1)
    settled = np.clip(1 - depth + generator.normal(0, 0.1, layers), 0.05, 1.0)
    return 0.4 + 0.6 * (1 + progress * (settled - 1))


def early_exit(layers: int, progress: float, generator: np.random.Generator) -> np.ndarray:
    """Tokens leave along the depth; at the end one in ten reaches the last layer."""
    depth = np.arange(layers) / max(1, layers - 1)
    return 1 - 0.9 * progress * depth


def mixture_of_experts(layers: int, progress: float, generator: np.random.Generator) -> np.ndarray:
    """Half of a layer waits for its fullest of 8 experts, up to three times the mean."""
    shares = generator.dirichlet(np.full(8, 4.0), layers)
    fullest = np.minimum(3.0, 8 * shares.max(axis=1))
    costs: np.ndarray = 0.5 + 0.5 * (1 + progress * (fullest - 1))
    return costs


def mixture_of_depths(layers: int, progress: float, generator: np.random.Generator) -> np.ndarray:
    """Every second layer routes only an eighth of the tokens through itself."""
    routed = np.arange(layers) % 2 == 1
    return np.where(routed, 1 - progress * 7 / 8, 1.0)


LOADS: Mapping[str, Loads] = {
    "pruning": pruning,
    "freezing": freezing,
    "sparseAttention": sparse_attention,
    "earlyExit": early_exit,
    "mixtureOfDepths": mixture_of_depths,
    "mixtureOfExperts": mixture_of_experts,
}
"""Loads by kind of change, as ``dynamics[].kind`` names it."""


def _half_normal(x: np.ndarray) -> np.ndarray:
    """Cumulative distribution of the magnitude of a standard normal: erf(x / sqrt 2).

    Abramowitz and Stegun 7.1.26, to 1.5e-7, for numpy has no erf.
    """
    z = x / np.sqrt(2)
    t = 1 / (1 + 0.3275911 * z)
    series = (((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592
    return np.asarray(1 - series * t * np.exp(-z * z))
