"""Mixture of experts: each position goes to the ``topK`` of ``count`` experts that its router prefers.

An expert is a copy of the block's own MLP, as wide as it (sparse upcycling, Komatsuzaki et al. 2023), so any
MLP can have experts.  The experts of a layer run over as many slots each as the fullest of them has positions
(Tutel's adaptive capacity), which is what grouped kernels and expert-parallel ranks wait for: uneven routing
costs compute, and the load of a layer follows from its router.  With ``dropTokens`` an expert has at most
``capacityFactor`` times the mean; what is above passes the layer by (Switch Transformer), first choices
first.  With ``parallel`` each of a stage's experts is on one of its replicas
(:mod:`ballast_trainer.layers.shared_experts`), to which tokens travel, and no slots are filled up.

Balance: the auxiliary loss of Switch Transformer (equation 4); a bias on the choice alone, which falls for
experts above the mean and rises for those below (DeepSeek-V3's loss-free balancing); or nothing.
"""

import copy
import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from ballast_policies.contract.job.dynamics import DynamicConfig, ExpertsSettings, LoadBalance
from ballast_policies.contract.job.job import JobConfig
from torch import nn

from ballast_trainer.distributed.axis import Axis
from ballast_trainer.dynamics.block_change import BlockChange, ChangingModule, with_side_loss
from ballast_trainer.layers.layer import Layer, LayerSet, refuse_whole_matrices
from ballast_trainer.layers.packing import pack, unpack
from ballast_trainer.layers.shared_experts import (
    PLACEMENT,
    SharedExperts,
    all_to_all,
    by_expert,
    put_together,
    shared_experts,
)
from ballast_trainer.models.blocks import chosen_experts_are_given, expert_loads, experts_of
from ballast_trainer.models.protocol import Model, layer_without_memory


def expert_output(expert: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """[n, D] -> [n, D], as a batch of one sequence: an MLP with experts of its own may insist on one."""
    output: torch.Tensor = expert(rows.unsqueeze(0))
    return output.squeeze(0)


def _no_output(rows: torch.Tensor, experts: nn.Module) -> torch.Tensor:
    """Output of a rank which has no rows, [0, D]: it exchanges gradients with the others all the same."""
    learns = torch.is_grad_enabled() and any(one.requires_grad for one in experts.parameters())
    return rows.requires_grad_() if learns else rows


_ROUTER_DEVIATION = 0.02
TOKEN_IMBALANCE = "tokenImbalance"


class Experts(ChangingModule):
    """Routed copies of an MLP, [..., D] -> [..., D].

    Attributes:
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
        self.experts = nn.ModuleDict({str(expert): copy.deepcopy(mlp) for expert in range(settings.count)})
        self.register_buffer("bias", torch.zeros(settings.count))
        self.register_buffer("counts", torch.zeros(settings.count, dtype=torch.int64))
        self.shared: SharedExperts | None = None
        self._row_bytes = 0
        self._newest: torch.Tensor | None = None

    @property
    def part(self) -> nn.Module:
        """Module of the experts' parameters."""
        return self.experts

    @property
    def loads(self) -> list[int]:
        """Positions that chose each expert, in the newest forward; waits for the device."""
        return [] if self._newest is None else self._newest.tolist()

    @property
    def dropped(self) -> float:
        """Fraction of these choices that were above the capacity; waits for the device."""
        loads, most = self.loads, self._capacity(sum(self.loads))
        return 1 - sum(min(load, most) for load in loads) / max(1, sum(loads))

    @property
    def routed_bytes(self) -> int:
        """Bytes of the inputs of all experts in the newest forward; waits for the device."""
        loads = self.loads
        return sum(min(load, self._capacity(sum(loads))) for load in loads) * self._row_bytes

    def _capacity(self, choices: int) -> int:
        """Positions that an expert takes at most, of so many choices."""
        if not self.settings.drop_tokens:
            return choices
        return math.ceil(self.settings.capacity_factor * choices / self.count)

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
        self._newest = counts = torch.bincount(expert, minlength=count)
        # A choice's place in its expert's queue is how many before it chose the same.
        order = torch.sort(expert, stable=True).indices
        first = torch.cumsum(counts, 0) - counts
        place = torch.empty_like(expert)
        place[order] = torch.arange(len(expert), device=flat.device) - first[expert[order]]
        most = self._capacity(len(expert))
        if settings.drop_tokens:
            # Those above go to none; how many there are the host need not know.
            expert = torch.where(place < most, expert, count)
            place = torch.where(place < most, place, 0)
        self._row_bytes = flat.shape[-1] * flat.element_size()
        if self.shared is not None:
            out = self.shared.run(flat[position], expert, self._compute)
        else:
            slots = min(most, int(counts.max()))
            row = expert * slots + place
            queue = flat.new_zeros(count * slots + 1, flat.shape[-1]).index_copy(0, row, flat[position])
            parts = queue[:-1].split(slots)
            done = [expert_output(one, part) for one, part in zip(self.experts.values(), parts, strict=True)]
            out = torch.cat([*done, done[0].new_zeros(1, done[0].shape[-1])])[row]
        weighted = out * gate.unsqueeze(-1).to(out.dtype)
        mixed = out.new_zeros(flat.shape).index_add(0, position, weighted)
        if torch.is_grad_enabled() and self.router.weight.requires_grad:
            if settings.balance == LoadBalance.BIAS:
                self.counts = self.counts + counts
            elif settings.balance == LoadBalance.LOSS:
                share = counts.to(scores.dtype) / len(expert)
                loss = settings.balance_weight * count * (share * scores.mean(0)).sum()
                mixed = with_side_loss(mixed, loss)
        return mixed.view_as(hidden)

    def _compute(self, rows: torch.Tensor, own: Sequence[int], lengths: list[int]) -> torch.Tensor:
        parts = zip(own, rows.split(lengths), strict=True)
        return torch.cat([expert_output(self.experts[str(e)], part) for e, part in parts])

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
        self.routed_bytes = 0
        self.count: int = part.num_experts  # type: ignore[assignment]
        self.part, self._alone = part, part.forward
        self._arguments = inspect.signature(part.forward)
        part.__dict__ |= {"forward": self, "own_experts": self}

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Hidden states [N, D], their experts [N, k] and weights [N, k] -> [N, D]."""
        hidden: torch.Tensor
        hidden, chosen, weights = self._arguments.bind(*args, **kwargs).arguments.values()
        flat = hidden.reshape(-1, hidden.shape[-1])
        self.routed_bytes = chosen.numel() * flat.shape[-1] * flat.element_size()
        if self.shared is None:
            alone: torch.Tensor = self._alone(*args, **kwargs)
            return alone
        rows = flat.repeat_interleave(chosen.shape[-1], 0)
        out = self.shared.run(rows, chosen.flatten(), self._compute)
        mixed: torch.Tensor = (out.view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(-2)
        return mixed.to(hidden.dtype).view(hidden.shape)

    def _compute(self, rows: torch.Tensor, own: Sequence[int], lengths: list[int]) -> torch.Tensor:
        if not len(rows):
            return _no_output(rows, self.part)
        # By number among those of this rank.
        chosen = torch.arange(len(own)).repeat_interleave(torch.tensor(lengths)).to(rows.device).unsqueeze(1)
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
        """Lack, as of every change; experts that a model came with stay as they are, but for their ranks."""
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
        block.set_submodule(path, Experts(block.get_submodule(path), typed.width, self._settings))
        return block

    def after_optimizer(self, layers: LayerSet) -> None:
        """The bias follows the step's counts, and the experts' ranks the tokens."""
        for layer in layers:
            for path, shared in shared_experts(layer.module).items():
                placement = shared.step_ended()
                if placement != shared.placement:
                    _rearrange(layer, path, placement)
        if self._settings.balance == LoadBalance.BIAS:
            for _, experts in self.parts(layers):
                experts.follow_counts()

    def measured(self, layers: LayerSet) -> dict[str, dict[int, Any]]:
        """Fullest expert over the mean, all loads, fraction dropped, in each layer's newest microbatch.

        Of experts that ranks share, also the tokens that each rank computed, and each expert's rank.
        """
        found = {index: experts for index, experts in self.parts(layers) if experts.loads}
        every = ((layer.index, of) for layer in layers for of in shared_experts(layer.module).values())
        shared = {index: of for index, of in every if any(of.computed)}
        by_rank: dict[str, dict[int, Any]] = {
            "rankLoads": {i: of.computed for i, of in shared.items()},
            "placement": {i: of.placement for i, of in shared.items()},
            "placed": {i: of.moved for i, of in shared.items()},
        }
        return (by_rank if shared else {}) | {
            **_imbalance({i: e.loads for i, e in found.items()} | _own_loads(layers)),
            "dropped": {i: e.dropped for i, e in found.items()},
        }


def _rearrange(layer: Layer, path: str, placement: tuple[int, ...]) -> None:
    """Move the experts of a layer to these ranks, with their optimizer state; collective over the replicas.

    They stay where they are if one rank cannot pack what it sends.
    """
    module, shared = layer.module, shared_experts(layer.module)[path]
    axis, messages = shared.axis, [torch.empty(0, dtype=torch.uint8)] * shared.axis.size
    state = by_expert(layer.moving_state(), module)
    experts = {name: expert for name in state if (expert := shared.expert_of(name, path)) is not None}
    device = next(module.parameters()).device
    try:
        for rank in set(range(axis.size)) - {axis.index}:
            leaving = {name: state[name] for name, expert in experts.items() if placement[expert] == rank}
            messages[rank] = pack(leaving, device=device) if leaving else messages[rank].to(device)
        sizes = [len(message) for message in messages]
    except (RuntimeError, MemoryError):
        sizes = [-1] * axis.size
    known = [row.tolist() for row in axis.all_gather(torch.tensor(sizes, device=device))]
    if any(-1 in row for row in known):
        return
    received = [row[axis.index] for row in known]
    arrived = all_to_all(torch.cat([message.to(device) for message in messages]), sizes, received, axis)
    tensors = {n: v for n, v in state.items() if n not in experts or placement[experts[n]] == axis.index}
    for message in arrived.split(received):
        tensors |= unpack(message) if len(message) else {}
    name = next(name for name in tensors if name.endswith(f"{path}.{PLACEMENT}"))
    tensors[name] = torch.tensor(placement)
    layer.load(put_together(tensors, module))


def own_experts(layers: LayerSet) -> dict[str, dict[int, Any]]:
    """Figures of :meth:`MixtureOfExperts.measured`, of experts that the model came with."""
    return _imbalance(_own_loads(layers))


def _own_loads(layers: LayerSet) -> dict[int, list[int]]:
    return {layer.index: loads for layer in layers if (loads := expert_loads(layer.module))}


def _imbalance(loads: dict[int, list[int]]) -> dict[str, dict[int, Any]]:
    """Fullest expert over the mean by layer, and all loads."""
    return {"layers": {i: max(of) * len(of) / sum(of) for i, of in loads.items()}, "loads": loads}


def _to_share(module: nn.Module) -> list[Experts | OwnExperts]:
    """The experts of a layer that replicas are to share."""
    parts = (part.__dict__.get("own_experts", part) for part in module.modules())
    return [
        part
        for part in parts
        if isinstance(part, OwnExperts) or (isinstance(part, Experts) and part.settings.parallel)
    ]


def experts_row(module: nn.Module) -> dict[str, int]:
    """The fields of a profile on the experts of a layer that replicas are to share, after a forward."""
    parts = _to_share(module)
    if not parts:
        return {}
    return {
        "expertBytes": sum(parameter.nbytes for of in parts for parameter in of.part.parameters()),
        "experts": sum(of.count for of in parts),
        "routedBytes": sum(of.routed_bytes for of in parts),
    }


def share_experts(module: nn.Module, replicas: Axis) -> nn.Module:
    """Leave a newly built layer that replicas are to share experts of those of this one; returns the layer.

    Raises:
        ConfigurationError: as of :class:`SharedExperts`.
    """
    for experts in _to_share(module) if replicas.size > 1 else ():
        experts.shared = SharedExperts(experts.part, experts.count, replicas)
    return module


def check_shared_experts(model: Model, config: JobConfig) -> None:
    """Refuse before ranks start experts that replicas cannot share. Raises ConfigurationError: why."""
    parallel = [of for of in config.dynamics if of.experts is not None and of.experts.parallel]
    for index in range(model.layer_count if parallel else 0):
        module, change = layer_without_memory(model, index), MixtureOfExperts(parallel[0], model.layer_count)
        share_experts(change.prepare(index, module), Axis(ranks=tuple(range(config.parallelism.data))))
        if any("own_experts" in part.__dict__ for part in module.modules()):
            # One tensor has a matrix of each.
            refuse_whole_matrices(config.training)
        if shared_experts(module):
            return
