"""Gradual global magnitude pruning (Zhu and Gupta 2017, equation 1), of weights, neurons or heads.

At the steps t0, t0 + dt, ..., t0 + n dt the sparsity of all of them together becomes
``S_t = S_f + (S_i - S_f) (1 - (t - t0) / (n dt))^3``: those of smallest magnitude over the whole model go, so
layers get cheaper unevenly.  A pruned weight, its gradient and its optimizer state are zero from then on; a
pruned neuron or head is removed.

The k largest magnitudes over all ranks are found exactly, without gathering them: for numbers that are not
negative, a larger float32 is a larger integer.  Three rounds of histograms over 11, 10 and 10 bits, summed
over the ranks, find the k-th largest bit by bit; ties are kept in the order of (layer, index).  The result
equals a stable top-k over the concatenated weights of one process, in O(bins) memory per rank.
"""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from ballast_policies.contract.job.dynamics import DynamicConfig, PruningSettings, Structure
from ballast_policies.planning.dynamics import gradual_sparsity
from torch import nn

from ballast_trainer.distributed.process_group import World
from ballast_trainer.dynamics.protocol import Dynamic
from ballast_trainer.dynamics.pruning import heads, neurons
from ballast_trainer.dynamics.pruning.neurons import as_linear, replace_linears
from ballast_trainer.dynamics.pruning.sparse_linear import PrunableLinear
from ballast_trainer.dynamics.schedule import ChangeSteps, whole_units
from ballast_trainer.layers.layer import Layer, LayerSet
from ballast_trainer.models.blocks import lacking


def build_pruning(config: DynamicConfig, layer_count: int) -> "GradualPruning":
    """Pruning of what ``pruning.structure`` names."""
    settings = config.pruning or PruningSettings()
    return _KINDS[settings.structure](config, layer_count)


class GradualPruning(Dynamic):
    """Prunes up to ``target`` of the units from ``startStep`` to ``endStep``."""

    measures: str | None = "pruned"

    def __init__(self, config: DynamicConfig, layer_count: int) -> None:
        assert config.target is not None
        self._steps = ChangeSteps.of(config)
        self._target = config.target
        self._initial = (config.pruning or PruningSettings()).initial_sparsity
        self._layer_count = layer_count

    def without_effect(self, total_steps: int) -> str:
        """Nothing is pruned by the end."""
        progress = self._steps.progress(total_steps - 1)
        sparsity = gradual_sparsity(progress, final=self._target, initial=self._initial)
        return self._steps.too_late(total_steps) or ("" if sparsity > 0 else "target 0 prunes nothing")

    def counts(self, layer: Layer) -> tuple[int, int]:
        """Number of units that a layer had, and of those left."""
        raise NotImplementedError

    def magnitudes(self, layer: Layer) -> torch.Tensor:
        """Magnitudes of the units that can be pruned, flat."""
        raise NotImplementedError

    def keep(self, layer: Layer, mask: torch.Tensor) -> None:
        """Prune all units but those of a mask over :meth:`magnitudes`."""
        raise NotImplementedError

    def resumed(self, step: int, layers: LayerSet, world: World) -> None:
        """A checkpoint that was not pruned as far as the steps say is pruned at once."""
        if self._steps.last_at(step - 1) is not None:
            self._prune(step - 1, layers, world)

    def apply(self, step: int, layers: LayerSet, world: World) -> bool:
        """Prune to the sparsity that is due at ``step``."""
        return self._steps.acts_at(step) and self._prune(step, layers, world)

    def measured(self, layers: LayerSet) -> dict[str, dict[int, Any]]:
        """Fraction of each layer's units that is gone."""
        counted = {layer.index: self.counts(layer) for layer in layers}
        return {"layers": {index: 1 - left / had for index, (had, left) in counted.items() if had}}

    def idle(self, figures: Mapping[str, Mapping[int, Any]]) -> str:
        """All is left."""
        return "" if any(figures["layers"].values()) else "nothing is pruned"

    def _prune(self, step: int, layers: LayerSet, world: World) -> bool:
        sparsity = gradual_sparsity(self._steps.progress(step), initial=self._initial, final=self._target)
        counted = [self.counts(layer) for layer in layers]
        total = torch.tensor(
            [sum(had for had, _ in counted), sum(left for _, left in counted)],
            dtype=torch.int64,
            device=world.device,
        )
        # What replicas hold, too, counts once.
        had, left = world.pipeline.all_reduce(total).tolist()
        keep = whole_units(had * (1 - sparsity))
        if left <= keep:
            return False
        found: Mapping[int, torch.Tensor] = {
            layer.index: self.magnitudes(layer)
            for layer, (units, _) in zip(layers, counted, strict=True)
            if units
        }
        for index, mask in largest_masks(world, found, keep, self._layer_count).items():
            self.keep(layers[index], mask)
        return True


class UnitPruning(GradualPruning):
    """Prunes whole units of a part of the blocks: neurons of the MLP, or heads of the attention.

    Attributes:
        path: member of a block that tells where the part is.
        units: the module that prepares and finds them: ``neurons`` or ``heads``.
    """

    path: str
    units: ModuleType

    def _part(self, block: nn.Module) -> nn.Module:
        return block.get_submodule(getattr(block, self.path)())

    def lacks(self, index: int, module: nn.Module) -> str:
        """A part whose units can be told apart."""
        return lacking(module, (self.path,)) or str(self.units.lacks(module, self._part(module)))

    def prepare(self, index: int, module: nn.Module) -> nn.Module:
        """Let the block's part lose units."""
        if not self.lacks(index, module):
            self.units.prepare(self._part(module))
        return module

    def reapply(self, step: int, layers: LayerSet) -> None:
        """Layers that were received or loaded may have lost units."""
        for layer in layers:
            for found in self.units.prepared(layer.module):
                found.follow_shapes()

    def counts(self, layer: Layer) -> tuple[int, int]:
        """Units."""
        found = self.units.prepared(layer.module)
        return sum(one.had for one in found), sum(one.kept for one in found)

    def magnitudes(self, layer: Layer) -> torch.Tensor:
        """Magnitudes of the units that are left."""
        return torch.cat([one.scores() for one in self.units.prepared(layer.module)])

    def keep(self, layer: Layer, mask: torch.Tensor) -> None:
        """Remove the others."""
        found = self.units.prepared(layer.module)
        for one, part in zip(found, mask.split([one.kept for one in found]), strict=True):
            one.remove(part, layer)


class NeuronPruning(UnitPruning):
    """Prunes inner neurons of the blocks' MLPs."""

    path = "mlp_path"
    units = neurons


class HeadPruning(UnitPruning):
    """Prunes heads of the blocks' attention."""

    path = "attention_path"
    units = heads


def prunable(module: nn.Module) -> list[PrunableLinear]:
    """The prunable layers inside a module, in the order of its definition."""
    return [child for child in module.modules() if isinstance(child, PrunableLinear)]


class WeightPruning(GradualPruning):
    """Prunes weights of linear layers."""

    def lacks(self, index: int, module: nn.Module) -> str:
        """A linear layer anywhere inside."""
        found = any(as_linear(child) is not None for child in module.modules())
        return "" if found else "no linear layer (nn.Linear, or transformers' Conv1D)"

    def prepare(self, index: int, module: nn.Module) -> nn.Module:
        """Replace each linear layer by a prunable one that takes over its parameters."""
        whole = as_linear(module)
        if whole is not None:
            return PrunableLinear(whole)
        replace_linears(module, PrunableLinear)
        return module

    def counts(self, layer: Layer) -> tuple[int, int]:
        """Weights."""
        found = prunable(layer.module)
        return sum(p.mask.numel() for p in found), sum(int(p.mask.sum()) for p in found)

    def magnitudes(self, layer: Layer) -> torch.Tensor:
        """The weights themselves, pruned ones as zeros."""
        return torch.cat([linear.dense().reshape(-1) for linear in prunable(layer.module)])

    def keep(self, layer: Layer, mask: torch.Tensor) -> None:
        """Prune the others, and their optimizer state."""
        offset = 0
        for linear in prunable(layer.module):
            part = mask[offset : offset + linear.mask.numel()].view_as(linear.mask)
            offset += part.numel()
            old = linear.learnt
            state = {} if layer.optimizer is None else layer.optimizer.state.get(old, {})
            full = {key: linear.dense(v) for key, v in state.items() if _is_shaped(v, old)}
            linear.prune(part)
            compacted = {key: linear.compact(value) for key, value in full.items()}
            layer.replace_parameter(old, linear.learnt, compacted)

    def after_backward(self, layers: LayerSet) -> None:
        """A pruned weight has no gradient."""
        for layer in layers:
            for linear in prunable(layer.module):
                if linear.values is None and linear.learnt.grad is not None:
                    linear.learnt.grad.mul_(linear.mask)

    def after_optimizer(self, layers: LayerSet) -> None:
        """The weights have changed."""
        for layer in layers:
            for linear in prunable(layer.module):
                linear.weight_changed()


def _is_shaped(value: Any, parameter: nn.Parameter) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape


_KINDS: Mapping[Structure, type[GradualPruning]] = {
    Structure.WEIGHTS: WeightPruning,
    Structure.NEURONS: NeuronPruning,
    Structure.HEADS: HeadPruning,
}


_ROUNDS = ((20, 11), (10, 10), (0, 10))
"""Shift and width of the bits that each round looks at, from the most significant."""


def largest_masks(
    world: World, weights: Mapping[int, torch.Tensor], keep: int, layer_count: int
) -> dict[int, torch.Tensor]:
    """Masks of the ``keep`` largest magnitudes over the weights of all ranks; collective.

    Args:
        world: the ranks.
        weights: this rank's weights by layer, one flat vector each; their float32 magnitudes are compared.
        keep: how many stay, over all ranks.
        layer_count: layers of the whole model.

    Returns:
        A bool vector per layer held; ``keep`` elements are True over all ranks.
    """
    bits = {index: weight.detach().abs().float().view(torch.int32) for index, weight in weights.items()}
    threshold, above = _kth_largest(world, bits, keep)
    ties = torch.zeros(layer_count, dtype=torch.int64, device=world.device)
    for index, values in bits.items():
        ties[index] = (values == threshold).sum()
    world.pipeline.all_reduce(ties)
    before = torch.cumsum(ties, 0) - ties
    masks = {}
    for index, values in bits.items():
        tied = values == threshold
        quota = keep - above - int(before[index])
        kept_ties = tied & (torch.cumsum(tied, 0) <= quota)
        masks[index] = (values > threshold) | kept_ties
    return masks


def _kth_largest(world: World, bits: Mapping[int, torch.Tensor], k: int) -> tuple[int, int]:
    """The k-th largest value, and how many are above it; for k = 0 the largest integer, and none."""
    if k <= 0:
        return torch.iinfo(torch.int32).max, 0
    prefix, above = 0, 0
    for shift, width in _ROUNDS:
        counts = torch.zeros(1 << width, dtype=torch.int64, device=world.device)
        for values in bits.values():
            matching = values[(values >> (shift + width)) == prefix]
            counts += torch.bincount((matching >> shift) & ((1 << width) - 1), minlength=1 << width)
        world.pipeline.all_reduce(counts)
        # From the largest bin down: the first at which k values are reached.
        reached = torch.cumsum(counts.flip(0), 0) + above
        place = int((reached >= k).int().argmax())
        above = int(reached[place] - counts.flip(0)[place])
        prefix = (prefix << width) | ((1 << width) - 1 - place)
    return prefix, above
