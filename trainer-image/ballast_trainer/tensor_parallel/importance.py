"""Choice of the columns that a straggler leaves out: least changed, or random (section III-B)."""

import numpy as np
import torch
from ballast_policies.contract.job.parallelism import StragglersConfig
from ballast_policies.planning.tensor_parallel.resizing import keep_list, layer_ratio, updated_variation

from ballast_trainer.tensor_parallel.linear import SlicedLinear

PATIENCE = 3
"""Epochs after which a column that was left out comes first: the published rule has no such bound."""


class ColumnImportance:
    """How much each contraction column of one product has changed, and which are kept.

    Attributes:
        variation: delta, mean |change| of each column over the last epoch in which it was computed;
            None before the first epoch is over.
        kept: the columns computed since the last choice; None: all.
    """

    def __init__(self, linear: SlicedLinear, config: StragglersConfig, seed: int) -> None:
        """Start to watch.

        Args:
            linear: the layer whose contraction columns are chosen from.
            config: the rule of the choice.
            seed: of random choices; differs from product to product.
        """
        self._linear = linear
        self._config = config
        self._random = np.random.default_rng(seed)
        self._columns = linear.weight.shape[1]
        self._left_out_epochs = np.zeros(self._columns, dtype=np.int64)
        self._before: torch.Tensor | None = None
        self.variation: np.ndarray | None = None
        self.kept: np.ndarray | None = None

    def end_epoch(self) -> None:
        """Measure the change since the last call; columns that were left out keep their last figure."""
        weight = self._linear.weight.detach()
        if self._before is not None:
            fresh = (weight - self._before).abs().mean(0).cpu().numpy().astype(float)
            kept = np.arange(self._columns) if self.kept is None else self.kept
            old = fresh if self.variation is None else self.variation
            self.variation = updated_variation(old, fresh, kept)
            self._left_out_epochs += 1
            self._left_out_epochs[kept] = 0
        self._before = weight.clone()

    def choose(self, ratio: float, columns: int) -> np.ndarray:
        """Ascending columns to compute, of the first ``columns``, for a rank that leaves out ``ratio``.

        Args:
            ratio: gamma of the rank; varied by layer if so configured.
            columns: those that this rank has not handed over.
        """
        config = self._config
        variation = self._random.random(columns)
        overdue = None
        if config.selection == "priority" and self.variation is not None:
            variation = self.variation[:columns]
            overdue = self._left_out_epochs[:columns]
            if config.differentiated:
                ratio = layer_ratio(variation, ratio, iterations=config.epoch_steps)
        self.kept = keep_list(variation, ratio, pruned_epochs=overdue, patience=PATIENCE)
        return self.kept

    def keep_all(self) -> None:
        """Nothing is left out any more."""
        self.kept = None
