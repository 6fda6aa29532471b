"""Mixture of experts: each position goes to the ``topK`` of ``count`` experts that its router prefers.

An expert is a copy of the block's own MLP, as wide as it (sparse upcycling, Komatsuzaki et al. 2023), so any
MLP can have experts.  The experts of a layer run over as many slots each as the fullest of them has positions
(Tutel's adaptive capacity), which is what grouped kernels and expert-parallel ranks wait for: uneven routing
costs compute, and the load of a layer follows from its router.  With ``dropTokens`` an expert has at most
``capacityFactor`` times the mean; what is above passes the layer by (Switch Transformer), first choices
first.  With ``parallel`` the replicas of a stage share its experts (:class:`SharedExperts`): each rank
computes the tokens of those placed on it, and no slots are filled up.

Balance: the auxiliary loss of Switch Transformer (equation 4); a bias on the choice alone, which falls for
experts above the mean and rises for those below (DeepSeek-V3's loss-free balancing); or nothing.
"""

import copy
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from ballast_policies.contract.job.dynamics import DynamicConfig, ExpertsSettings, LoadBalance
from torch import nn

from ballast_trainer.distributed.axis import Axis, exchanged
from ballast_trainer.distributed.process_group import World
from ballast_trainer.dynamics.block_change import BlockChange, ChangingModule, with_side_loss
from ballast_trainer.layers.layer import LayerSet
from ballast_trainer.layers.running import CURRENT_FORWARD
from ballast_trainer.models.blocks import chosen_experts_are_given, expert_loads, experts_of, set_submodule

LEAST_GAIN = 0.05
"""Relative fall of the fullest rank's tokens below which experts stay where they are."""


def first_placement(experts: int, ranks: int) -> tuple[int, ...]:
    """The rank of each expert before any token was counted: in turn."""
    return tuple(expert % ranks for expert in range(experts))


def rank_loads(placement: Sequence[int], tokens: Sequence[int], ranks: int) -> list[int]:
    """Tokens of each rank's experts."""
    loads = [0] * ranks
    for rank, count in zip(placement, tokens, strict=True):
        loads[rank] += count
    return loads


def better_placement(placement: tuple[int, ...], tokens: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Each expert's rank by all ranks' tokens of the last step, or ``placement`` where that gains little."""
    found, loads = list(placement), [0] * ranks
    for expert in sorted(range(len(tokens)), key=lambda e: (-tokens[e], e)):
        # Of ranks with as little, the one that has it now.
        rank = min(range(ranks), key=lambda r: (loads[r], r != placement[expert], r))
        found[expert], loads[rank] = rank, loads[rank] + tokens[expert]
    fullest = max(rank_loads(placement, tokens, ranks))
    return tuple(found) if max(loads) < fullest * (1 - LEAST_GAIN) else placement


def _exchange(rows: torch.Tensor, sent: list[int], received: list[int], axis: Axis) -> torch.Tensor:
    """Rows to the ranks of an axis, [sum(sent), D] -> [sum(received), D]."""
    out = rows.new_empty(sum(received), *rows.shape[1:])
    axis.count("all_to_all", rows.nbytes)
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=axis.group)
    return out


Compute = Callable[[torch.Tensor, list[int], list[int]], torch.Tensor]


def expert_output(expert: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """[n, D] -> [n, D], as a batch of one sequence: an MLP with experts of its own may insist on one."""
    output: torch.Tensor = expert(rows.unsqueeze(0))
    return output.squeeze(0)


@dataclasses.dataclass(slots=True)
class SharedExperts:
    """The experts of a layer over the ranks of an axis, to which tokens travel.

    Each replica routes its own microbatch.  A first exchange tells how many tokens each expert has on each
    replica, a second one (all-to-all) sends every token to the rank that computes its expert, a third one
    brings the results back; the backward does the same with gradients.  All replicas run the same microbatch
    number at the same time, so the exchanges meet.

    Every rank holds the weights of all experts and computes those placed on it; gradients are summed over the
    replicas with all others.  So a placement is a list of ranks, and changing it moves no weights: it follows
    the tokens of the last step, by the largest first onto the rank that has least (Graham 1969).

    Attributes:
        axis: the replicas of the stage.
        placement: the rank of each expert.
        tokens: of each expert over all ranks, since the last :meth:`follow_tokens`.
        computed: tokens that each rank has computed in the newest forward.
        moved: experts that have changed ranks so far.
    """

    axis: Axis
    placement: tuple[int, ...]
    tokens: list[int]
    computed: list[int]
    moved: int = 0

    @classmethod
    def over(cls, axis: Axis, experts: int) -> "SharedExperts":
        """Before any token was counted."""
        return cls(axis, first_placement(experts, axis.size), [0] * experts, [0] * axis.size)

    def run(self, rows: torch.Tensor, expert: torch.Tensor, compute: Compute) -> torch.Tensor:
        """The experts' outputs of this rank's rows; collective over the axis.

        Args:
            rows: tokens [N, D].
            expert: of each row, int64 [N].
            compute: outputs [n, D] of rows [n, D], given these experts in turn and how many rows each has.
        """
        count, size = len(self.placement), self.axis.size
        # Experts by rank, and each rank's in ascending order: the order in which rows travel.
        travel = sorted(range(count), key=lambda e: (self.placement[e], e))
        place = torch.empty(count, dtype=torch.int64)
        place[torch.tensor(travel)] = torch.arange(count)
        order = torch.sort(place.to(expert.device)[expert], stable=True).indices
        mine = torch.bincount(expert, minlength=count)
        by_rank = torch.stack(self.axis.all_gather(mine)).cpu()
        self._count(by_rank)
        sent = rank_loads(self.placement, by_rank[self.axis.index].tolist(), size)
        own = [e for e in travel if self.placement[e] == self.axis.index]
        pieces = by_rank[:, own]
        received = pieces.sum(1).tolist()
        there = functools.partial(_exchange, sent=sent, received=received, axis=self.axis)
        back = functools.partial(_exchange, sent=received, received=sent, axis=self.axis)
        arrived = exchanged(rows[order], there, back)
        # From each rank, one piece for each expert: put together by expert.
        by_source = torch.tensor(own, dtype=torch.int64).repeat(size).repeat_interleave(pieces.flatten())
        together = torch.sort(by_source, stable=True).indices.to(rows.device)
        # A rank without rows returns nothing, in the same type as the others.
        results = compute(arrived[together], own, pieces.sum(0).tolist()).to(rows.dtype)
        results = results[torch.argsort(together)]
        return exchanged(results, back, there)[torch.argsort(order)]

    def follow_tokens(self) -> None:
        """A step of the job is over: place the experts by its tokens; the same on every rank of the axis."""
        if sum(self.tokens) == 0:
            return
        placement = better_placement(self.placement, self.tokens, self.axis.size)
        self.moved += sum(a != b for a, b in zip(placement, self.placement, strict=True))
        self.placement, self.tokens = placement, [0] * len(self.tokens)

    def _count(self, by_rank: torch.Tensor) -> None:
        newest: list[int] = by_rank.sum(0).tolist()
        self.tokens = [a + b for a, b in zip(self.tokens, newest, strict=True)]
        self.computed = rank_loads(self.placement, newest, self.axis.size)


def _no_output(rows: torch.Tensor, experts: nn.Module) -> torch.Tensor:
    """That of a rank which has no rows, [0, D]: it exchanges gradients with the others all the same."""
    learns = torch.is_grad_enabled() and any(one.requires_grad for one in experts.parameters())
    return rows.requires_grad_() if learns else rows


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
        self.settings, self.count = settings, settings.count
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
            out = self.shared.run(flat[position], expert[kept], self._compute)
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

    def _compute(self, rows: torch.Tensor, own: list[int], lengths: list[int]) -> torch.Tensor:
        if not own:
            return _no_output(rows, self.experts)
        parts = zip(own, rows.split(lengths), strict=True)
        return torch.cat([expert_output(self.experts[e], part) for e, part in parts])

    def follow_counts(self) -> None:
        """Move the bias of each expert by one step towards the mean count; a step of the job is over."""
        counts = self.counts.float()
        self.bias.add_(self.settings.balance_weight * torch.sign(counts.mean() - counts))
        self.counts.zero_()


class OwnExperts:
    """A layer of transformers' own experts in one part, which the ranks ``shared`` share; None: none do."""

    def __init__(self, part: nn.Module) -> None:
        """Compute in the place of ``part``, whose weights keep their names."""
        self.shared: SharedExperts | None = None
        self.count: int = part.num_experts  # type: ignore[assignment]
        self._part, self._alone = part, part.forward
        self._arguments = inspect.signature(part.forward)
        part.__dict__ |= {"forward": self, "own_experts": self}

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Hidden states [N, D], their experts [N, k] and weights [N, k] -> [N, D]."""
        if self.shared is None or CURRENT_FORWARD.microbatch is None:
            alone: torch.Tensor = self._alone(*args, **kwargs)
            return alone
        hidden: torch.Tensor
        hidden, chosen, weights = self._arguments.bind(*args, **kwargs).arguments.values()
        flat = hidden.reshape(-1, hidden.shape[-1])
        rows = flat.repeat_interleave(chosen.shape[-1], 0)
        out = self.shared.run(rows, chosen.flatten(), self._compute)
        mixed: torch.Tensor = (out.view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(-2)
        return mixed.to(hidden.dtype).view(hidden.shape)

    def _compute(self, rows: torch.Tensor, own: list[int], lengths: list[int]) -> torch.Tensor:
        if not len(rows):
            return _no_output(rows, self._part)
        chosen = torch.tensor(own).repeat_interleave(torch.tensor(lengths)).to(rows.device).unsqueeze(1)
        computed: torch.Tensor = self._alone(rows, chosen, rows.new_ones(len(rows), 1))
        return computed


class MixtureOfExperts(BlockChange):
    """MLPs become experts; those that a model came with are shared by replicas, where that is asked for."""

    measures: str | None = TOKEN_IMBALANCE
    needs = ("mlp_path", "width")
    order = 1
    part = Experts

    def __init__(self, config: DynamicConfig, layer_count: int) -> None:
        super().__init__(config, layer_count)
        self._settings = config.experts or ExpertsSettings()
        self.every_blocks = self._settings.every_blocks
        self.first_layer = self._settings.first_layer

    def lacks(self, index: int, module: nn.Module) -> str:
        """As of every change; experts that a model came with stay as they are, but for who computes them."""
        own = experts_of(module)
        if not own:
            among = any(getattr(part, "among_experts", False) for part in module.modules())
            return "no experts, which others of its model have" if among else super().lacks(index, module)
        if not self._settings.parallel:
            return (
                "experts of its own, which its model balances (output_router_logits: true), and replicas "
                "share (experts.parallel: true)"
            )
        others = self._settings.model_dump(exclude={"parallel"}, by_alias=True)
        usual = ExpertsSettings().model_dump(by_alias=True)
        set_here = [name for name, value in others.items() if value != usual[name]]
        if set_here:
            return f"experts of its own, whose {', '.join(set_here)} are its model's"
        if not hasattr(own[0], "num_experts"):
            return "experts some of which have no weights"
        return "" if chosen_experts_are_given(own) else "experts that each compute all tokens"

    def change_block(self, block: nn.Module, index: int) -> nn.Module:
        """Replace the MLP, or let its own experts be shared."""
        own = experts_of(block)
        if own:
            OwnExperts(own[0])
            return block
        typed: Any = block
        path = typed.mlp_path()
        set_submodule(block, path, Experts(block.get_submodule(path), typed.width, self._settings))
        return block

    def apply(self, step: int, layers: LayerSet, world: World) -> bool:
        """Let the replicas share the experts of the layers held, where the configuration asks for it."""
        if self._settings.parallel and world.data.size > 1:
            for experts in self._all_experts(layers):
                if experts.shared is None or experts.shared.axis is not world.data:
                    experts.shared = SharedExperts.over(world.data, experts.count)
        return super().apply(step, layers, world)

    def after_optimizer(self, layers: LayerSet) -> None:
        """The bias follows the step's counts, and the experts' ranks its tokens."""
        for experts in self._all_experts(layers):
            if experts.shared is not None:
                experts.shared.follow_tokens()
        if self._settings.balance == LoadBalance.BIAS:
            for _, experts in self.parts(layers):
                experts.follow_counts()

    def _all_experts(self, layers: LayerSet) -> Iterable[Any]:
        return (dict(self.parts(layers)) | _own_experts(layers)).values()

    def measured(self, layers: LayerSet) -> dict[str, dict[int, Any]]:
        """In each layer's newest microbatch: fullest expert over the mean, all loads, fraction dropped.

        Of experts that ranks share, also the tokens that each rank computed, and each expert's rank.
        """
        found = {index: experts for index, experts in self.parts(layers) if experts.loads}
        sharing = found | _own_experts(layers)
        shared = {i: e.shared for i, e in sharing.items() if e.shared is not None}
        by_rank: dict[str, dict[int, Any]] = {
            "rankLoads": {i: of.computed for i, of in shared.items()},
            "placement": {i: of.placement for i, of in shared.items()},
            "placed": {i: of.moved for i, of in shared.items()},
        }
        return (by_rank if shared else {}) | {
            **_imbalance({i: e.loads for i, e in found.items()} | _own_loads(layers)),
            "dropped": {i: e.dropped for i, e in found.items()},
        }


def own_experts(layers: LayerSet) -> dict[str, dict[int, Any]]:
    """As :meth:`MixtureOfExperts.measured`, of experts that the model came with."""
    return _imbalance(_own_loads(layers))


def _own_loads(layers: LayerSet) -> dict[int, list[int]]:
    return {layer.index: loads for layer in layers if (loads := expert_loads(layer.module))}


def _imbalance(loads: dict[int, list[int]]) -> dict[str, dict[int, Any]]:
    """By layer, the fullest expert over the mean, and all loads."""
    return {"layers": {i: max(of) * len(of) / sum(of) for i, of in loads.items()}, "loads": loads}


def _own_experts(layers: LayerSet) -> dict[int, OwnExperts]:
    return {
        layer.index: part.__dict__["own_experts"]
        for layer in layers
        for part in layer.module.modules()
        if "own_experts" in part.__dict__
    }
