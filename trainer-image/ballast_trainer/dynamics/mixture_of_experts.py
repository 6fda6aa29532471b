"""Mixture of experts: each position goes to the ``topK`` of ``count`` experts that its router prefers.

An expert is a copy of the block's own MLP, as wide as it (sparse upcycling, Komatsuzaki et al. 2023), so any
MLP can have experts.  The experts of a layer run over as many slots each as the fullest of them has positions
(Tutel's adaptive capacity), which is what grouped kernels and expert-parallel ranks wait for: uneven routing
costs compute, and the load of a layer follows from its router.  With ``dropTokens`` an expert has at most
``capacityFactor`` times the mean; what is above passes the layer by (Switch Transformer), first choices
first.  With ``parallel`` the replicas of a stage share its experts (:mod:`expert_parallelism`): each rank
computes the tokens of those placed on it, and no slots are filled up.

Balance: the auxiliary loss of Switch Transformer (equation 4); a bias on the choice alone, which falls for
experts above the mean and rises for those below (DeepSeek-V3's loss-free balancing); or nothing.
"""

import copy
import math
from typing import Any

import torch
from ballast_policies.contract.job.dynamics import DynamicConfig, ExpertsSettings, LoadBalance
from torch import nn

from ballast_trainer.distributed.process_group import World
from ballast_trainer.dynamics.block_change import BlockChange, ChangingModule, with_side_loss
from ballast_trainer.dynamics.expert_parallelism import SharedExperts, expert_output
from ballast_trainer.layers.layer import LayerSet
from ballast_trainer.layers.running import CURRENT_FORWARD
from ballast_trainer.models.blocks import expert_loads, set_submodule

_ROUTER_DEVIATION = 0.02
TOKEN_IMBALANCE = "tokenImbalance"


class Experts(ChangingModule):
    """Routed copies of an MLP, [..., D] -> [..., D].

    Attributes:
        loads: positions that chose each expert, in the newest forward.
        dropped: fraction of these choices that were above the capacity.
        bias: added to the router's scores in the choice, by expert.
        shared: the ranks that share the experts; None: this one computes all of them.
        counts: choices by expert since the last optimizer step, where the bias follows them.
    """

    bias: torch.Tensor
    counts: torch.Tensor

    def __init__(self, mlp: nn.Module, width: int, settings: ExpertsSettings) -> None:
        super().__init__()
        self.settings = settings
        self.router = nn.Linear(width, settings.count, bias=False)
        # Nearly even scores to begin with.
        nn.init.normal_(self.router.weight, std=_ROUTER_DEVIATION)
        self.experts = nn.ModuleList(copy.deepcopy(mlp) for _ in range(settings.count))
        self.register_buffer("bias", torch.zeros(settings.count))
        self.register_buffer("counts", torch.zeros(settings.count, dtype=torch.int64))
        self.shared: SharedExperts | None = None
        self.loads: list[int] = []
        self.dropped = 0.0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Route each position, run the experts over the fullest one's slots, put back."""
        settings, count, chosen = self.settings, self.settings.count, self.settings.top_k
        flat = hidden.reshape(-1, hidden.shape[-1])
        scores = torch.softmax(self.router(flat).float(), dim=-1)
        picked = torch.topk(scores.detach() + self.bias, chosen, dim=-1).indices
        gates = scores.gather(1, picked)
        if chosen > 1:
            gates = gates / gates.sum(-1, keepdim=True)
        # First choices of all positions before second ones.
        expert, gate = picked.t().reshape(-1), gates.t().reshape(-1)
        position = torch.arange(len(flat), device=flat.device).repeat(chosen)
        counts = torch.bincount(expert, minlength=count)
        self.loads = counts.tolist()
        slots = max(self.loads)
        if settings.drop_tokens:
            slots = min(slots, math.ceil(settings.capacity_factor * len(expert) / count))
        # A choice's place in its expert's queue is how many before it chose the same.
        order = torch.sort(expert, stable=True).indices
        first = torch.cumsum(counts, 0) - counts
        place = torch.empty_like(expert)
        place[order] = torch.arange(len(expert), device=flat.device) - first[expert[order]]
        kept = place < slots
        self.dropped = 1 - sum(min(load, slots) for load in self.loads) / len(expert)
        row, position, gate = expert[kept] * slots + place[kept], position[kept], gate[kept]
        if self.shared is not None and CURRENT_FORWARD.microbatch is not None:
            out = self.shared.run(flat[position], expert[kept], self.experts)
        else:
            queue = flat.new_zeros(count * slots, flat.shape[-1]).index_copy(0, row, flat[position])
            parts = queue.split(slots)
            done = [expert_output(one, part) for one, part in zip(self.experts, parts, strict=True)]
            out = torch.cat(done)[row]
        weighted = out * gate.unsqueeze(-1).to(out.dtype)
        mixed = out.new_zeros(flat.shape).index_add(0, position, weighted)
        if torch.is_grad_enabled():
            if settings.balance == LoadBalance.BIAS:
                self.counts = self.counts + counts
            elif settings.balance == LoadBalance.LOSS:
                share = counts.to(scores.dtype) / len(expert)
                loss = settings.balance_weight * count * (share * scores.mean(0)).sum()
                mixed = with_side_loss(mixed, loss)
        return mixed.view_as(hidden)

    def follow_counts(self) -> None:
        """Move the bias of each expert by one step towards the mean count; a step of the job is over."""
        counts = self.counts.float()
        self.bias.add_(self.settings.balance_weight * torch.sign(counts.mean() - counts))
        self.counts.zero_()


class MixtureOfExperts(BlockChange):
    """MLPs become experts."""

    measures: str | None = TOKEN_IMBALANCE
    needs = ("mlp_path", "width")
    order = 1
    part = Experts

    def __init__(self, config: DynamicConfig, layer_count: int) -> None:
        super().__init__(config, layer_count)
        self._settings = config.experts or ExpertsSettings()
        self.every_blocks = self._settings.every_blocks
        self.first_layer = self._settings.first_layer

    def change_block(self, block: nn.Module, index: int) -> nn.Module:
        """Replace the MLP."""
        typed: Any = block
        path = typed.mlp_path()
        set_submodule(block, path, Experts(block.get_submodule(path), typed.width, self._settings))
        return block

    def apply(self, step: int, layers: LayerSet, world: World) -> bool:
        """Let the replicas share the experts of the layers held, where the configuration asks for it."""
        if self._settings.parallel and world.data.size > 1:
            for experts in _experts(layers).values():
                if experts.shared is None or experts.shared.axis is not world.data:
                    experts.shared = SharedExperts.over(world.data, self._settings.count)
        return super().apply(step, layers, world)

    def after_optimizer(self, layers: LayerSet) -> None:
        """The bias follows the step's counts, and the experts' ranks its tokens."""
        for experts in _experts(layers).values():
            if experts.shared is not None:
                experts.shared.follow_tokens()
        if self._settings.balance == LoadBalance.BIAS:
            for experts in _experts(layers).values():
                experts.follow_counts()

    def measured(self, layers: LayerSet) -> dict[str, dict[int, Any]]:
        """In each layer's newest microbatch: fullest expert over the mean, all loads, fraction dropped.

        Of experts that ranks share, also the tokens that each rank computed, and each expert's rank.
        """
        found = {index: experts for index, experts in _experts(layers).items() if experts.loads}
        shared = {i: e.shared for i, e in found.items() if e.shared is not None}
        by_rank: dict[str, dict[int, Any]] = {
            "rankLoads": {i: of.computed for i, of in shared.items()},
            "placement": {i: of.placement for i, of in shared.items()},
            "placed": {i: of.moved for i, of in shared.items()},
        }
        return (by_rank if shared else {}) | {
            **_imbalance({i: e.loads for i, e in found.items()}),
            "dropped": {i: e.dropped for i, e in found.items()},
        }


def own_experts(layers: LayerSet) -> dict[str, dict[int, Any]]:
    """As :meth:`MixtureOfExperts.measured`, of experts that the model came with."""
    return _imbalance({layer.index: loads for layer in layers if (loads := expert_loads(layer.module))})


def _imbalance(loads: dict[int, list[int]]) -> dict[str, dict[int, Any]]:
    """By layer, the fullest expert over the mean, and all loads."""
    return {"layers": {i: max(of) * len(of) / sum(of) for i, of in loads.items()}, "loads": loads}


def _experts(layers: LayerSet) -> dict[int, Experts]:
    return {
        layer.index: module
        for layer in layers
        for module in layer.module.modules()
        if isinstance(module, Experts)
    }
