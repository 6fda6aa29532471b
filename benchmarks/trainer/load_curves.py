"""Times of the layers of six dynamic models, which get cheaper while they train: curves for the benchmarks.

The paper of the six cases (DynMo; reviews and supplement) publishes speed-ups, not loads.  So each case
here is a family with one parameter, its *strength*, and the shape that the case has by its nature; the
strength is found by search, so that on the paper's 8 stages (64 layers) the settled model's largest
stage under the split of the start, over its largest under the best split, is the published speed-up.
The same curves then run on other numbers of ranks and layers, where less (or more) can be gained.

This file is no benchmark itself; ``speedup.py`` imports it.
"""

import functools
from collections.abc import Callable

import numpy as np
from ballast_lab.changing_loads import pruned_layers
from ballast_policies.planning.balancers.exact import exact_partition
from ballast_policies.planning.partition import even_partition

PUBLISHED = {
    "freezing": 2.23,
    "pruning": 3.18,
    "sparseAttention": 4.02,
    "earlyExit": 4.52,
    "mixtureOfExperts": 1.23,
    "mixtureOfDepths": 1.17,
}
"""Speed-ups by rebalancing that the paper reports, by case."""

AT_KNOWN_STEPS = {"freezing", "pruning"}
"""Cases whose loads a schedule changes; those of the others change by what is learnt, at no known step."""

FORWARD, BACKWARD = 1 / 3, 2 / 3
"""Parts of an unchanged layer's seconds."""

Curve = Callable[[int, float, float], np.ndarray]
"""(layers, progress 0..1, strength) -> relative seconds, shape (layers, 2): forward, backward."""


def _depth(layers: int) -> np.ndarray:
    return np.arange(layers) / max(1, layers - 1)


def _both(cost: np.ndarray) -> np.ndarray:
    return np.stack([FORWARD * cost, BACKWARD * cost], axis=1)


def freezing(layers: int, progress: float, strength: float) -> np.ndarray:
    """A prefix of ``strength / 16`` of the layers freezes: their backward goes, their forward stays."""
    frozen = np.arange(layers) < round(min(1.0, strength / 16) * progress * layers)
    return np.stack([np.full(layers, FORWARD), np.where(frozen, 0.0, BACKWARD)], axis=1)


def pruning(layers: int, progress: float, strength: float) -> np.ndarray:
    """90 % of all weights go by magnitude; scales fall as e^(-strength depth / 4)."""
    sparsity = 0.9 * (1 - (1 - progress) ** 3)
    return _both(pruned_layers(np.exp(-strength / 4 * _depth(layers)), sparsity))


def sparse_attention(layers: int, progress: float, strength: float) -> np.ndarray:
    """Attention is 98 % of a layer (long sequences); at depth d its mask keeps e^(-strength d)."""
    return _both(0.02 + 0.98 * np.exp(-progress * strength * _depth(layers)))


def early_exit(layers: int, progress: float, strength: float) -> np.ndarray:
    """Loads if e^(-strength d) of the tokens are left at depth d."""
    return _both(np.exp(-progress * strength * _depth(layers)))


def mixture_of_experts(layers: int, progress: float, strength: float) -> np.ndarray:
    """A layer waits for its fullest of 8 experts; routing, and so which layers are slow, drifts on.

    Shares are Dirichlet with concentration 8 / strength, alike in every sixteenth of the layers, and drawn
    again for every eighth of the progress.
    """
    generator = np.random.default_rng(round(8 * progress))
    shares = generator.dirichlet(np.full(8, 8 / strength), 16)
    fullest = 8 * shares.max(axis=1)[np.arange(layers) * 16 // layers]
    return _both(0.4 + 0.6 * (fullest if progress > 0 else np.ones(layers)))


def mixture_of_depths(layers: int, progress: float, strength: float) -> np.ndarray:
    """Every second layer lets tokens pass by, up to 7 of 8, more of them in deep layers."""
    routed = np.arange(layers) % 2 == 1
    passed = 7 / 8 * progress * np.minimum(1.0, strength / 8 * _depth(layers))
    return _both(np.where(routed, 1 - passed, 1.0))


CURVES: dict[str, Curve] = {
    "freezing": freezing,
    "pruning": pruning,
    "sparseAttention": sparse_attention,
    "earlyExit": early_exit,
    "mixtureOfExperts": mixture_of_experts,
    "mixtureOfDepths": mixture_of_depths,
}


def load_ratio(seconds: np.ndarray, ranks: int) -> float:
    """Largest stage under the even split over the largest under the best one; ``seconds`` by layer."""
    even = even_partition(len(seconds), ranks).loads(seconds).max()
    return float(even / exact_partition(seconds, ranks).loads(seconds).max())


@functools.cache
def strength_of(case: str) -> tuple[float, float]:
    """The strength whose settled load ratio is nearest to the published speed-up, and that ratio.

    Of 64 layers on 8 stages; of mixture of experts, which never settles, the mean over its eight draws.
    """
    settled = [number / 8 for number in range(1, 9)] if case == "mixtureOfExperts" else [1.0]
    tried = np.linspace(0.1, 16.0, 160)
    ratios = np.array(
        [
            np.mean([load_ratio(CURVES[case](64, at, strength).sum(axis=1), 8) for at in settled])
            for strength in tried
        ]
    )
    best = int(np.argmin(np.abs(ratios - PUBLISHED[case])))
    return float(tried[best]), float(ratios[best])


def training(case: str, *, layers: int, steps: int, stretch: int) -> np.ndarray:
    """Relative seconds over a training, shape (steps, layers, 2).

    The change begins with the second stretch of ``stretch`` steps and is complete after five eighths of
    the training; within a stretch nothing changes.  Mixture of experts drifts to the end.
    """
    strength, _ = strength_of(case)
    stretches = -(-steps // stretch)
    rows = []
    for number in range(stretches):
        done = number / max(1, stretches - 1)
        progress = done if case == "mixtureOfExperts" else min(1.0, done / (5 / 8))
        rows += [CURVES[case](layers, progress, strength)] * stretch
    return np.stack(rows[:steps])
