"""Layers of transformers, cut over a tensor group as their family's own plan says (``base_model_tp_plan``).

Linear maps keep their names, so that exports do.  What a layer computes when it is cut is tried before ranks
start: on the ranks of a group that are threads of this process, beside the whole layer.
"""

import copy
import dataclasses
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from ballast_trainer.distributed.axis import Axis
from ballast_trainer.layers.slicing import Slicing, slicings
from ballast_trainer.models.blocks import set_submodule
from ballast_trainer.models.hugging_face import ATTENTION, DecoderLayer
from ballast_trainer.tensor_parallel.exchange import copy_to_group, gather, reduce_from_group, scatter
from ballast_trainer.tensor_parallel.migration import begin_migration, finish_migration
from ballast_trainer.tensor_parallel.parallel_pair import (
    ColumnLinear,
    ParallelPair,
    RowLinear,
    SharedInput,
    pairs,
)

_COLUMNS, _ROWS = ("colwise", "colwise_gather_output"), ("rowwise", "rowwise_split_input")
_OF_HEADS, _EXPERTS = "replicated_with_grad_allreduce", "moe_tp_experts"
_EXPERT_WEIGHTS = {"packed_colwise": Slicing(dim=1, blocks=2), "rowwise": Slicing(dim=2)}
"""Of all experts of a layer together, [E, 2 x inner, D] (gates, then the others) and [E, D, inner]."""

_WITH_BIASES = {"dense_h_to_4h": "colwise", "dense_4h_to_h": "rowwise"}
_MLPS: dict[str, tuple[str, dict[str, str]]] = {
    "bloom": ("mlp.", _WITH_BIASES),
    "codegen": ("mlp.", {"fc_in": "colwise", "fc_out": "rowwise"}),
    "falcon": ("mlp.", _WITH_BIASES),
    "gpt_neo": ("mlp.", {"c_fc": "colwise", "c_proj": "rowwise"}),
    "gptj": ("mlp.", {"fc_in": "colwise", "fc_out": "rowwise"}),
    "mpt": ("ffn.", {"up_proj": "colwise", "down_proj": "rowwise"}),
    "opt": ("", {"fc1": "colwise", "fc2": "rowwise"}),
    "stablelm": ("mlp.", {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}),
}
"""By ``model_type``, the MLPs of families that state no plan; their attention stays whole."""

_HEADS = ("num_attention_heads", "num_key_value_heads")


def cut_by_plan(module: DecoderLayer, axis: Axis) -> nn.Module:
    """The layer with this rank's part of the linear maps and experts in its plan, in place.

    Raises:
        ValueError: there is no plan, it has what is not known here, or heads or features do not divide.
    """
    layer, kind = module.layer, type(module.layer).__name__
    prefix, of_mlp = _MLPS.get(getattr(module.config, "model_type", ""), ("", {}))
    plan = module.plan or {prefix + name: style for name, style in of_mlp.items()}
    if not plan:
        raise ValueError(
            f"transformers has no plan for tensor parallelism (base_model_tp_plan) of {kind}. "
            "To fix: 1, or a split of your own by ballast_trainer.tensor_parallel.layers.split_layer_type"
        )
    parts = dict(layer.named_modules())
    experts = [path for path in parts if plan.get(path) == _EXPERTS]
    shared: dict[str, SharedInput] = {}
    joined: dict[str, tuple[list[ColumnLinear], list[RowLinear]]] = {}
    for path, part in parts.items():
        style = plan.get(path)
        if style is None:
            continue
        parent = path.rpartition(".")[0]
        columns, rows = joined.setdefault(parent, ([], []))
        if style in (*_COLUMNS, *_ROWS) and not isinstance(part, nn.Linear):
            what = f"{type(part).__module__}.{type(part).__name__}"
            raise ValueError(f"{path} of {kind} is a {what}, no nn.Linear. To fix: 1")
        if style in _COLUMNS:
            _check_cut(module, path, style, axis)
            column = ColumnLinear(part, axis, given=shared.setdefault(parent, SharedInput(axis)))
            if style == "colwise_gather_output":
                column.register_forward_hook(lambda _, args, output: gather(output, axis))
            else:
                columns.append(column)
            set_submodule(layer, path, column)
        elif style in _ROWS:
            row = RowLinear(part, axis)
            if style == "rowwise_split_input":
                row.register_forward_pre_hook(lambda _, args: scatter(args[0], axis))
            else:
                rows.append(row)
            set_submodule(layer, path, row)
        elif style == _OF_HEADS:
            for parameter in (one for one in part.parameters() if one.requires_grad):
                # Each rank has the gradient of its own heads.
                parameter.register_hook(lambda gradient: axis.all_reduce(gradient.contiguous().clone()))
        elif style != _EXPERTS:
            raise ValueError(f"{style} of {path}, in the plan of {kind}, is not known here. To fix: 1")
    for parent, (columns, rows) in joined.items():
        _pair(module, parent, columns, rows)
    for path in experts:
        _cut_experts(parts[path], path, kind, plan, axis)
    return module


def _pair(module: DecoderLayer, parent: str, columns: list[ColumnLinear], rows: list[RowLinear]) -> None:
    """Join the maps of ``parent``, where there are independent units between that can be told."""
    if not columns or len(rows) != 1:
        return
    units: Any = columns[0].weight.shape[0]
    if parent.partition(".")[0] in ATTENTION:
        # A key head goes with its queries.
        heads = [getattr(module.config, name, None) for name in _HEADS]
        units = next((one // rows[0].axis.size for one in heads[::-1] if isinstance(one, int)), 0)
    cut = [one.weight.shape[one.slicings["weight"].dim] for one in (*columns, *rows)]
    if units and not any(length % units for length in cut):
        ParallelPair(columns, rows[0], units=units)


def _check_cut(module: DecoderLayer, path: str, style: str, axis: Axis) -> None:
    """Refuse a cut that would change what the map's part of the layer computes.

    Raises:
        ValueError: heads do not divide, or a dropout would be drawn by each rank for its part alone.
    """
    config = vars(module.config)
    attends = path.partition(".")[0] in ATTENTION
    inner = re.compile("att.*drop" if attends else "activation.*drop")
    dropped = [name for name, value in config.items() if value and inner.search(name)]
    if style == "colwise" and dropped:
        raise ValueError(
            f"{dropped[0]} {config[dropped[0]]} would be drawn otherwise than in one process. "
            f"To fix: 1, or {dropped[0]}: 0.0"
        )
    if style == "colwise" and attends:
        for name in _HEADS:
            heads = config.get(name)
            if isinstance(heads, int) and heads % axis.size:
                raise ValueError(f"{heads} heads ({name}) do not divide over {axis.size} tensor ranks")


def _cut_experts(part: nn.Module, path: str, kind: str, plan: dict[str, str], axis: Axis) -> None:
    """Leave each of the experts this rank's part of its inner units."""
    cut = {}
    for name, parameter in part.named_parameters():
        style = plan.get(f"{path}.{name}", "")
        if style not in _EXPERT_WEIGHTS or parameter.dim() != 3:
            what = style or "not in its plan"
            raise ValueError(f"{path}.{name} of {kind} ({what}) cannot be cut here. To fix: 1")
        cut[name] = _EXPERT_WEIGHTS[style]
        held = cut[name].part(parameter.detach(), axis.index, axis.size)
        setattr(part, name, nn.Parameter(held.clone(), requires_grad=parameter.requires_grad))
    part.__dict__ |= {"axis": axis, "slicings": cut}

    def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(copy_to_group(one, axis) if torch.is_floating_point(one) else one for one in args)

    part.register_forward_pre_hook(before)
    part.register_forward_hook(lambda _, args, output: reduce_from_group(output, axis))


class _Meeting:
    """Where threads exchange tensors, in the place of ranks."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self._given: list[torch.Tensor] = [torch.empty(0)] * size

    def exchange(self, index: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all."""
        self._given[index] = tensor.detach().clone()
        self.barrier.wait()
        every = list(self._given)
        self.barrier.wait()
        return every


@dataclasses.dataclass(slots=True, kw_only=True)
class _ThreadAxis(Axis):
    meeting: _Meeting

    def all_reduce(self, tensor: torch.Tensor, *, largest: bool = False) -> torch.Tensor:
        return tensor.copy_(torch.stack(self.meeting.exchange(self.index, tensor)).sum(0))

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        return tensor.copy_(self.meeting.exchange(self.index, tensor)[source])

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return self.meeting.exchange(self.index, tensor)


def _decoder(module: nn.Module) -> DecoderLayer | None:
    return next((part for part in module.modules() if isinstance(part, DecoderLayer)), None)


def kind_of_layer(module: nn.Module) -> Any:
    """What layers of transformers have in common that are cut alike; None: it is none."""
    layer = _decoder(module)
    if layer is None:
        return None
    return type(layer.layer), tuple((name, one.shape) for name, one in layer.named_parameters())


def check_cut_layer(module: nn.Module, size: int, *, migrates: bool = False) -> None:
    """Compare a layer of transformers, cut over ``size`` ranks, with the whole one.

    Compared are outputs and gradients, but those of weights that are cut, which follow from these where no
    rank computes for another.

    Args:
        module: whole, with memory; its mode and types change.
        size: of the group.
        migrates: half of the work of the last rank is handed over.

    Raises:
        ValueError: they differ, or the cut layer does not run.
    """
    decoder = _decoder(module)
    assert decoder is not None
    layer = decoder.float().eval()
    meeting = _Meeting(size)
    axes = [_ThreadAxis(ranks=tuple(range(size)), index=index, meeting=meeting) for index in range(size)]
    cut = [cut_by_plan(copy.deepcopy(layer), axis) for axis in axes]
    ways = slicings(cut[0])
    value = torch.randn(2, 11, layer.width, generator=torch.Generator().manual_seed(0))
    fractions = [0.0] * (size - 1) + [0.5 * migrates]

    def run(module: nn.Module, axis: Axis) -> dict[str, torch.Tensor]:
        given, held = value.clone().requires_grad_(), [pairs([module])]
        still = [one for name, one in module.named_parameters() if name in ways and one.requires_grad]
        for one in still:
            one.requires_grad_(migrates)
        begin_migration(held, fractions, axis, microbatches=1)
        output = module(given)
        output.square().mean().backward()
        finish_migration(held, microbatches=1)
        found = {"the gradient of its input": given.grad}
        found |= {f"the gradient of {name}": one.grad for name, one in module.named_parameters()}
        module.zero_grad()
        for one in still:
            one.requires_grad_()
        return {"its output": output.detach()} | {n: one for n, one in found.items() if one is not None}

    def of_rank(module: nn.Module, axis: Axis) -> dict[str, torch.Tensor]:
        try:
            return run(module, axis)
        except BaseException:
            meeting.barrier.abort()
            raise

    what, fix = (", with units handed over,", "resize or none") if migrates else (", cut by its plan,", "1")
    kind = f"{type(layer.layer).__name__}{what}"
    wanted = run(layer, Axis())
    with ThreadPoolExecutor(size) as threads:
        runs = [threads.submit(of_rank, part, axis) for part, axis in zip(cut, axes, strict=True)]
    errors = [error for one in runs if (error := one.exception()) is not None]
    if errors:
        first = min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError))
        raise ValueError(f"{kind} does not run: {first}. To fix: {fix}") from first
    largest = max(float(one.abs().max()) for what, one in wanted.items() if what != "its output")
    results = [one.result() for one in runs]
    for name, way in ((f"the gradient of {name}", way) for name, way in ways.items()):
        if all(name in found for found in results):
            whole = way.whole([found[name] for found in results])
            results = [found | {name: whole} for found in results]
    for found in results:
        for what in sorted(wanted.keys() | found.keys()):
            one, expected = (of.get(what, torch.zeros(())) for of in (found, wanted))
            apart = float((one - expected).abs().max())
            # Some gradients are nothing but rounding, e.g. of a bias of keys.
            if not apart <= 1e-3 * float(expected.abs().max()) + 1e-6 * largest:
                raise ValueError(
                    f"{kind} computes something else: {what} is up to {apart:.3g} apart. To fix: {fix}"
                )
