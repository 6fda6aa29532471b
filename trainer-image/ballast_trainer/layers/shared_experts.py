"""Experts of a layer, each on one replica of its stage: its weights, gradients and optimizer state.

Each replica routes its own microbatch.  A first exchange tells how many tokens each expert has on each
replica, a second one (all-to-all) sends every token to the rank that has its expert, a third one brings the
results back; the backward does the same with gradients.  All replicas run the same microbatch number at the
same time, so the exchanges meet.  An expert's gradient is that of all replicas' tokens: nothing is reduced.

Ranks have as many experts each, but for one.  Where tokens are uneven, experts change ranks by the balanced
packing of DeepSeek's EPLB: the fullest first, onto the rank with room that has least.  They are placed anew
by all tokens since they were last, and then stay twice as long as before, for a move sends weights and
optimizer state.
"""

import copy
import functools
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ballast_trainer.distributed.activity import ACTIVITY
from ballast_trainer.distributed.axis import Axis, exchanged
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.layers.running import CURRENT_FORWARD

LEAST_GAIN = 0.05
"""Relative fall of the fullest rank's tokens below which experts stay where they are."""
MOST_STEPS = 128
"""Steps between two times that experts may change ranks."""
PLACEMENT = "expert_placement"
"""Buffer by which the ranks of all experts travel with the layer."""
_ATTRIBUTE = "shared_experts"
"""Attribute of the part of a layer that has them."""
_ROW = re.compile(r"(?P<name>[^#]+)#(?P<expert>\d+)")
"""A tensor of one expert, where a layer has one tensor for all of a rank's."""

Compute = Callable[[torch.Tensor, Sequence[int], list[int]], torch.Tensor]


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
    """Each expert's rank by all ranks' tokens, or ``placement`` where that gains little.

    As many experts on each rank, but for one.
    """
    found, loads, held = list(placement), [0] * ranks, [0] * ranks
    few, fuller = divmod(len(placement), ranks)
    for expert in sorted(range(len(tokens)), key=lambda e: (-tokens[e], e)):
        full = few + (sum(count > few for count in held) < fuller)
        # Of ranks with as little, the one that has it now.
        rank = min(
            (rank for rank in range(ranks) if held[rank] < full),
            key=lambda rank: (loads[rank], rank != placement[expert], rank),
        )
        found[expert], loads[rank], held[rank] = rank, loads[rank] + tokens[expert], held[rank] + 1
    fullest = max(rank_loads(placement, tokens, ranks))
    return tuple(found) if max(loads) < fullest * (1 - LEAST_GAIN) else placement


def all_to_all(rows: torch.Tensor, sent: list[int], received: list[int], axis: Axis) -> torch.Tensor:
    """Rows to the ranks of an axis, [sum(sent), ...] -> [sum(received), ...]."""
    out = rows.new_empty(sum(received), *rows.shape[1:])
    axis.count("all_to_all", rows.nbytes)
    with ACTIVITY.waiting():
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=axis.group)
    return out


class SharedExperts:
    """The experts in a part of a layer, of which each rank of an axis has some.

    Attributes:
        axis: the replicas of the stage.
        count: of experts, over all ranks.
        rows: names of the part's parameters that have a row for each.
        placement: the rank of each.
        tokens: of each expert over all ranks, since it was last looked where they should be.
        computed: tokens that each rank has computed in the newest forward.
        moved: experts that have changed ranks so far.
    """

    def __init__(self, part: nn.Module, count: int, axis: Axis) -> None:
        """Leave ``part`` the experts of this rank: a module each by number, or rows of all its parameters.

        Raises:
            ConfigurationError: there are fewer experts than ranks, or not all weights have a row for each.
        """
        self.axis, self.count, self._part = axis, count, part
        names = () if isinstance(part, nn.ModuleDict) else tuple(dict(part.named_parameters()))
        reason = ""
        if count < axis.size:
            reason = f"of {count} experts a layer, {axis.size} replicas have none. To fix: a lower data"
        elif not all("." not in n and part.get_parameter(n).shape[0] == count for n in names):
            reason = (
                f"{type(part).__name__} has weights ({', '.join(names)}) without a row for each expert. "
                "To fix: leave parallel out"
            )
        if reason:
            raise ConfigurationError("dynamics.experts.parallel", reason)
        self.rows = names
        self.tokens, self.computed, self.moved = [0] * count, [0] * axis.size, 0
        self._steps, self._stay = 0, 1
        self._place(first_placement(count, axis.size), first=True)
        part.__dict__[_ATTRIBUTE] = self

    @property
    def own(self) -> list[int]:
        """The experts of this rank, ascending."""
        return [expert for expert, rank in enumerate(self.placement) if rank == self.axis.index]

    def _place(self, placement: tuple[int, ...], *, first: bool = False) -> None:
        """Have modules and parameters of this rank's experts; but for the first time values are to come."""
        self.placement, part = placement, self._part
        if isinstance(part, nn.ModuleDict):
            held, pattern = dict(part), next(iter(part.values()))
            part._modules = {str(e): held.get(str(e)) or copy.deepcopy(pattern) for e in self.own}
        else:
            # transformers' experts compute as many as they have.
            part.num_experts = len(self.own)  # type: ignore[assignment]
        for name in self.rows:
            whole = part.get_parameter(name)
            values = whole.detach()[self.own] if first else whole.new_empty(len(self.own), *whole.shape[1:])
            part.register_parameter(name, nn.Parameter(values, whole.requires_grad))
        part.register_buffer(PLACEMENT, torch.tensor(placement), persistent=False)

    def follow_buffer(self) -> None:
        """Have the experts that this rank has by the placement which came with the layer's tensors."""
        placement = tuple(self._part.get_buffer(PLACEMENT).tolist())
        if placement != self.placement:
            self._place(placement)

    def run(self, rows: torch.Tensor, expert: torch.Tensor, compute: Compute) -> torch.Tensor:
        """The experts' outputs of this rank's rows; collective over the axis.

        Args:
            rows: tokens [N, D].
            expert: of each row, int64 [N]; ``count``: none, and the output is 0.
            compute: outputs [n, D] of rows [n, D], given these experts in turn and how many rows each has.
        """
        count, size = self.count, self.axis.size
        # Experts by rank, and each rank's in ascending order: the order in which rows travel.
        travel = sorted(range(count), key=lambda e: (self.placement[e], e))
        place = torch.full((count + 1,), count, dtype=torch.int64)
        place[torch.tensor(travel)] = torch.arange(count)
        order = torch.sort(place.to(expert.device)[expert], stable=True).indices
        mine = torch.bincount(expert, minlength=count + 1)[:count]
        # The one wait for the device: the sizes of messages are the host's.
        by_rank = torch.stack(self.axis.all_gather(mine)).cpu()
        self._count_tokens(by_rank)
        sent = rank_loads(self.placement, by_rank[self.axis.index].tolist(), size)
        own = self.own
        pieces = by_rank[:, own]
        received = pieces.sum(1).tolist()
        there = functools.partial(all_to_all, sent=sent, received=received, axis=self.axis)
        back = functools.partial(all_to_all, sent=received, received=sent, axis=self.axis)
        order = order[: sum(sent)]
        arrived = exchanged(rows[order], there, back)
        # From each rank, one piece for each expert: put together by expert.
        by_source = torch.tensor(own, dtype=torch.int64).repeat(size).repeat_interleave(pieces.flatten())
        together = torch.sort(by_source, stable=True).indices.to(rows.device)
        # A rank without rows returns nothing, in the same type as the others.
        results = compute(arrived[together], own, pieces.sum(0).tolist()).to(rows.dtype)
        results = results[torch.argsort(together)]
        returned = exchanged(results, back, there)
        return returned.new_zeros(len(rows), *returned.shape[1:]).index_copy(0, order, returned)

    def _count_tokens(self, by_rank: torch.Tensor) -> None:
        newest: list[int] = by_rank.sum(0).tolist()
        self.computed = rank_loads(self.placement, newest, self.axis.size)
        if CURRENT_FORWARD.microbatch is not None:
            self.tokens = [a + b for a, b in zip(self.tokens, newest, strict=True)]

    def step_ended(self) -> tuple[int, ...]:
        """A step of the job is over: where its experts should be now; the same on every rank of the axis."""
        self._steps += 1
        if self._steps < self._stay:
            return self.placement
        found = better_placement(self.placement, self.tokens, self.axis.size)
        self.tokens, self._steps = [0] * self.count, 0
        if found != self.placement:
            self.moved += sum(a != b for a, b in zip(found, self.placement, strict=True))
            self._stay = min(2 * self._stay, MOST_STEPS)
        return found

    def expert_of(self, name: str, path: str) -> int | None:
        """The expert whose tensor this is; None: of all or of none.

        Args:
            name: in the layer's state, by expert.
            path: of this part in the layer.
        """
        _, _, inner = name.partition(".")
        row = _ROW.match(inner)
        if not inner.startswith(f"{path}."):
            return None
        if row is not None:
            return int(row["expert"])
        number = inner.removeprefix(f"{path}.").partition(".")[0]
        return int(number) if number.isdecimal() else None

    def has_rows(self, name: str, path: str, value: torch.Tensor) -> bool:
        """True if this tensor of the layer's state has a row for each of some experts."""
        parameter = name.partition(".")[2].removeprefix(f"{path}.").partition(".")[0]
        return parameter in self.rows and f".{path}." in name and value.dim() > 0


def shared_experts(module: nn.Module) -> dict[str, SharedExperts]:
    """Shared experts of a layer, by the path of the part that has them."""
    parts = ((path, part.__dict__.get(_ATTRIBUTE)) for path, part in module.named_modules())
    return {path: shared for path, shared in parts if shared is not None}


def names_of_experts(module: nn.Module) -> frozenset[str]:
    """Names of a layer's parameters that this replica has alone."""
    paths = tuple(f"{path}." for path in shared_experts(module))
    return frozenset(name for name, _ in module.named_parameters() if paths and name.startswith(paths))


def by_expert(state: Mapping[str, torch.Tensor], module: nn.Module) -> dict[str, torch.Tensor]:
    """A layer's state with a tensor for each expert of this rank: ``name#expert`` where one has them all."""
    found = dict(state)
    for path, shared in shared_experts(module).items():
        for name in [name for name, value in found.items() if shared.has_rows(name, path, value)]:
            rows = zip(shared.own, found.pop(name).split(1), strict=True)
            found |= {f"{name}#{expert}": row for expert, row in rows}
    return found


def is_elsewhere(name: str, shared: Mapping[str, SharedExperts]) -> bool | None:
    """True if a tensor of the state by expert is another rank's; None: it is of no expert.

    ``shared``: those of the layer.
    """
    for path, experts in shared.items():
        expert = experts.expert_of(name, path)
        if expert is not None:
            return expert not in experts.own
    return None


def rows_of_all(name: str, module: nn.Module) -> int | None:
    """Number of experts with a row of this parameter over all ranks; None: it is of one expert."""
    for path, shared in shared_experts(module).items():
        if name.removeprefix(f"{path}.") in shared.rows:
            return shared.count
    return None


def put_together(state: Mapping[str, torch.Tensor], module: nn.Module) -> dict[str, torch.Tensor]:
    """The reverse of :func:`by_expert`: what the layer loads; of tensors of all experts, this rank's rows."""
    found: dict[str, torch.Tensor] = {}
    rows: defaultdict[str, dict[int, torch.Tensor]] = defaultdict(dict)
    for name, value in state.items():
        row = _ROW.fullmatch(name)
        if row is None:
            found[name] = value
        else:
            rows[row["name"]][int(row["expert"])] = value
    for path, shared in shared_experts(module).items():
        for name, value in found.items():
            if shared.has_rows(name, path, value):
                found[name] = value[shared.own]
    return found | {name: torch.cat([of[expert] for expert in sorted(of)]) for name, of in rows.items()}
