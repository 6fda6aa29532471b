"""Layers of transformers, cut over a tensor group as their family's own plan says (``base_model_tp_plan``).

What families have no plan for is cut as :data:`_OF_FAMILIES` says.
Linear maps keep their names, so that exports do.  What a layer computes when it is cut is tried before ranks
start: on the ranks of a group that are threads of this process, beside the whole layer.
"""

import copy
import dataclasses
import functools
import re
import threading
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ballast_trainer.distributed.axis import Axis
from ballast_trainer.layers.slicing import Slicing, slicings
from ballast_trainer.models.blocks import is_conv1d
from ballast_trainer.models.hugging_face import ATTENTION, DecoderLayer
from ballast_trainer.tensor_parallel.exchange import copy_to_group, gather, reduce_from_group, scatter
from ballast_trainer.tensor_parallel.migration import begin_migration, finish_migration
from ballast_trainer.tensor_parallel.parallel_pair import (
    ColumnLinear,
    CutNorm,
    ParallelPair,
    RowLinear,
    SharedInput,
    pairs,
)

_GATHERED, _SPLIT = "colwise_gather_output", "rowwise_split_input"
_PACKED = "packed_colwise"
_NORM, _FEATURES, _ONCE, _SUMMED, _STATES = "norm", "features", "added once", "rowwise, then cut", "states"
_COLUMNS, _ROWS = ("colwise", _PACKED, _GATHERED), ("rowwise", _SPLIT, _SUMMED)
_OF_HEADS, _LATENT, _EXPERTS = "replicated_with_grad_allreduce", "mla_kv_a_proj", "moe_tp_experts"
_EXPERT_WEIGHTS = {
    _PACKED: Slicing(dim=1, blocks=2),
    "rowwise": Slicing(dim=2),
    "packed_rowwise": Slicing(dim=2, blocks=2),
    "colwise": Slicing(dim=1),
}
"""Experts' weights of a layer: [E, 2 x inner, D] (gates, then the others), [E, D, inner], or transposed."""
_FIRST = Slicing(dim=0)

_MLPS = (
    ("gate_proj", "up_proj", "down_proj"),
    ("gate_up_proj", "down_proj"),
    ("up_proj", "down_proj"),
    ("fc1", "fc2"),
    ("fc_in", "fc_out"),
    ("c_fc", "c_proj"),
    ("dense_h_to_4h", "dense_4h_to_h"),
    ("intermediate.dense", "output.dense"),
    ("lin1", "lin2"),
    ("w1", "w3", "w2"),
    ("Wi", "Wo"),
)
"""Maps of an MLP that a family's plan says nothing of, or would gather between; the row-cut one is last."""

_OF_GATES = ("gate_up_proj", "Wi")
"""Names of maps that have gates and the rest in one matrix."""

_USUAL = ("q_proj", "k_proj", "v_proj", "o_proj")
_CUT = ("colwise", "colwise", "colwise", "rowwise")
_ATTEND_AS_USUAL = ("granitemoe", "jamba", "phimoe", "gpt_oss", "bitnet", "nemotron_h")
"""Families by ``model_type`` whose plan says nothing of their attention, which heads divide."""

_MIXER = {
    "in_proj": _PACKED,
    "conv1d": _FEATURES,
    "x_proj": _SUMMED,
    "dt_layernorm": _OF_HEADS,
    "b_layernorm": _OF_HEADS,
    "c_layernorm": _OF_HEADS,
    "dt_proj": _FEATURES,
    "A_log": _FEATURES,
    "D": _FEATURES,
    "out_proj": "rowwise",
}
"""Mamba's parts (Gu & Dao 2023, section 3.4): channels are independent but for ``x_proj``'s outputs."""

_OF_FAMILIES: dict[str, dict[str, str]] = {
    "mamba": {f"mixer.{name}": way for name, way in _MIXER.items()},
    "falcon_mamba": {f"mixer.{name}": way for name, way in _MIXER.items()},
    "jamba": {f"mamba.{name}": way for name, way in _MIXER.items()},
    "mamba2": {"mixer": _STATES},
    "nemotron_h": {"mixer": _STATES},
    "bitnet": {"self_attn.attn_sub_norm": _NORM, "mlp.ffn_sub_norm": _NORM},
    # Experts have each gate beside what it is for.
    "gpt_oss": {
        "self_attn.sinks": _FEATURES,
        "mlp.experts": _EXPERTS,
        "mlp.experts.gate_up_proj": "rowwise",
        "mlp.experts.gate_up_proj_bias": "colwise",
        "mlp.experts.down_proj": "colwise",
        "mlp.experts.down_proj_bias": _ONCE,
    },
}
"""Cuts of parts that families, by ``model_type``, have no plan for."""

_HEADS = ("num_attention_heads", "num_key_value_heads")


def _plan_of(module: DecoderLayer, parts: dict[str, nn.Module], axis: Axis) -> dict[str, tuple[str, str]]:
    """Slicing of the layer's parts, by path, with their group: as its family says, and MLPs anyway."""
    kind = getattr(module.config, "model_type", "")
    stated = module.plan | _OF_FAMILIES.get(kind, {})
    every = [*parts, *(name for name, _ in module.layer.named_parameters())]
    plan = {
        path: (way, path.rpartition(".")[0])
        for pattern, way in stated.items()
        for path in every
        if re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), path)
        # Of one name may be state spaces, attentions and MLPs in turn.
        and (way != _STATES or hasattr(parts[path], "A_log"))
    }
    gathered = [path for path, (way, _) in plan.items() if way == _GATHERED and path.endswith(".q_proj")]
    # Heads that do not divide stay whole behind maps that are gathered.
    for path in [] if _undivided(module, axis) else gathered:
        prefix = path.removesuffix("q_proj")
        normed = {f"{prefix}{one}_norm": parts.get(f"{prefix}{one}_proj") for one in "qk"}
        if all(_is_norm_of(parts.get(norm), linear) for norm, linear in normed.items()):
            # Of all heads: only the mean square has to be exchanged, no feature.
            attention = dict(zip((prefix + one for one in _USUAL), _CUT, strict=True))
            attention |= dict.fromkeys(normed, _NORM)
            plan |= {part: (way, prefix[:-1]) for part, way in attention.items()}
    known = (*_MLPS, _USUAL) if kind in _ATTEND_AS_USUAL else _MLPS
    for parent in parts:
        prefix = parent and f"{parent}."
        paths = ([prefix + name for name in names] for names in known)
        found = next((each for each in paths if all(path in parts for path in each)), [])
        written = {plan[path][0] for path in found if path in plan}
        # Of an expert of a list not all ranks would know whether it runs.
        if written <= {_GATHERED, _SPLIT} and not re.search(r"\b\d+\b", parent):
            for path in found:
                way = _PACKED if path.rpartition(".")[2] in _OF_GATES else "colwise"
                plan[path] = (way if path != found[-1] else "rowwise", parent)
    return plan


def _is_norm_of(norm: nn.Module | None, linear: nn.Module | None) -> bool:
    """True if it is an RMS norm of all that a map makes."""
    weight = getattr(norm, "weight", None)
    made = getattr(linear, "out_features", None)
    return hasattr(norm, "variance_epsilon") and weight is not None and weight.shape == (made,)


def _maps(path: str, part: nn.Module, way: str) -> dict[str, nn.Module]:
    """Maps that are cut of a linear one: it; with an adapter (LoRA), also the half on the cut side."""
    base = getattr(part, "base_layer", None)
    if base is None:
        return {path: part}
    half = "lora_B" if way in _COLUMNS else "lora_A"
    adapters = dict(getattr(part, half, {}))
    return {f"{path}.base_layer": base, **{f"{path}.{half}.{name}": one for name, one in adapters.items()}}


@dataclasses.dataclass(slots=True)
class _Group:
    """Maps and norms of one part of a layer, which may be a pair."""

    given: SharedInput
    columns: list[ColumnLinear] = dataclasses.field(default_factory=list)
    rows: dict[str, list[RowLinear]] = dataclasses.field(default_factory=dict)
    norms: list[CutNorm] = dataclasses.field(default_factory=list)
    has_features: bool = False


def cut_by_plan(module: DecoderLayer, axis: Axis) -> nn.Module:
    """The layer with this rank's part of the linear maps and experts in its plan, in place.

    Raises:
        ValueError: there is no plan, it has what is not known here, or heads or features do not divide.
    """
    layer, kind = module.layer, type(module.layer).__name__
    parts = dict(layer.named_modules())
    plan = _plan_of(module, parts, axis)
    if not plan:
        raise ValueError(
            f"transformers has no plan for tensor parallelism (base_model_tp_plan) of {kind}. "
            "To fix: 1, or a split of your own by ballast_trainer.tensor_parallel.layers.split_layer_type"
        )
    experts = [path for path in parts if plan.get(path, ("", ""))[0] == _EXPERTS]
    groups: dict[str, _Group] = {}
    for path, (style, name) in plan.items():
        group = groups.setdefault(name, _Group(SharedInput(axis)))
        if style == _FEATURES:
            group.has_features = True
            # A parameter, or those of a part that is not called, but read.
            owner, _, one = ("", "", path) if path in parts else path.rpartition(".")
            held: nn.Module = parts[one if path in parts else owner]
            held = getattr(held, "base_layer", held)
            _hold(
                held, dict.fromkeys(dict(held.named_parameters()) if path in parts else [one], _FIRST), axis
            )
    for path, part in parts.items():
        style, name = plan.get(path, ("", ""))
        if style in (*_COLUMNS, *_ROWS):
            _cut_map(module, path, part, style, groups[name], axis)
            if style == _SUMMED:
                layer.get_submodule(path).register_forward_hook(
                    lambda _, args, output: copy_to_group(output, axis)
                )
                _keep_unfused(parts[name])
        elif style == _NORM:
            groups[name].norms.append(CutNorm(part, axis))
            layer.set_submodule(path, groups[name].norms[-1])
        elif style == _STATES:
            _cut_states(part, axis)
        elif style == _OF_HEADS:
            for parameter in (one for one in part.parameters() if one.requires_grad):
                # Each rank has the gradient of its own heads.
                parameter.register_hook(lambda gradient: axis.all_reduce(gradient.contiguous().clone()))
        elif style == _LATENT:
            # Beside what further maps take, keys that each rank has whole for its own heads.
            rank = module.config.kv_lora_rank
            part.register_forward_hook(
                lambda _, args, output, rank=rank: torch.cat(
                    [output[..., :rank], copy_to_group(output[..., rank:], axis)], -1
                )
            )
        elif style == "moe_identity_expert":
            # Of experts whose outputs are added up, each rank has this one whole.
            part.register_forward_hook(lambda _, args, output: output / axis.size)
        elif style not in ("", _EXPERTS, _FEATURES):
            raise ValueError(f"{style} of {path}, in the plan of {kind}, is not known here. To fix: 1")
    for name, group in groups.items():
        if group.columns and len(group.rows) == 1:
            _pair(module, name, group)
    for path in experts:
        _cut_experts(parts[path], path, kind, plan, axis)
    return module


def _cut_map(module: DecoderLayer, path: str, part: nn.Module, style: str, group: _Group, axis: Axis) -> None:
    """Leave a linear map this rank's part of it.

    Raises:
        ValueError: it is none, or heads or features do not divide.
    """
    layer = module.layer
    if style == "colwise" and _attends(layer, path):
        _check_heads(module, axis)
    for place, one in _maps(path, part, style).items():
        if not (isinstance(one, nn.Linear) or is_conv1d(one)):
            what = f"{type(one).__module__}.{type(one).__name__}"
            raise ValueError(f"{place} of {type(layer).__name__} is a {what}, no nn.Linear. To fix: 1")
        if style in _ROWS:
            row = RowLinear(one, axis)
            if style == _SPLIT:
                row.register_forward_pre_hook(lambda _, args: scatter(args[0], axis))
            elif style == "rowwise":
                group.rows.setdefault(path, []).append(row)
            layer.set_submodule(place, row)
            continue
        given = group.given if "lora_B" not in place else None
        column = ColumnLinear(one, axis, blocks=1 + (style == _PACKED), given=given)
        if style == _GATHERED:
            column.register_forward_hook(lambda _, args, output: gather(output, axis))
        else:
            group.columns.append(column)
        layer.set_submodule(place, column)


def _attends(layer: nn.Module, path: str) -> bool:
    first = path.partition(".")[0]
    return first in ATTENTION or hasattr(getattr(layer, first, None), "q_proj")


def _heads_of(module: DecoderLayer) -> dict[str, int]:
    """Number of heads of an attention, and of keys, by field of the configuration."""
    found = {name: getattr(module.config, name, None) for name in _HEADS}
    return {name: heads for name, heads in found.items() if isinstance(heads, int)}


def _pair(module: DecoderLayer, path: str, group: _Group) -> None:
    """Join the maps of ``group``, where there are independent units between that can be told."""
    columns, norms, (rows,) = group.columns, group.norms, group.rows.values()
    units = rows[0].matrix.shape[1]
    if group.has_features:
        # Not in maps, these are not handed over: one unit stays always.
        units = 1
    elif _attends(module.layer, path):
        # A key head goes with its queries.
        units = [0, *_heads_of(module).values()][-1] // rows[0].axis.size
    cut = [one.matrix.shape[0] // one.blocks for one in columns] + [one.matrix.shape[1] for one in rows]
    cut += [len(one.weight) for one in norms]
    if units and not any(length % units for length in cut):
        ParallelPair(columns, *rows, units=units, norms=norms)


def _check_heads(module: DecoderLayer, axis: Axis) -> None:
    """Refuse to cut an attention whose heads do not divide.

    Raises:
        ValueError: they do not.
    """
    for name, heads in _undivided(module, axis).items():
        raise ValueError(f"{heads} heads ({name}) do not divide over {axis.size} tensor ranks")


def _undivided(module: DecoderLayer, axis: Axis) -> dict[str, int]:
    return {name: heads for name, heads in _heads_of(module).items() if heads % axis.size}


def _hold(part: nn.Module, cut: dict[str, Slicing], axis: Axis) -> None:
    """Leave a module this rank's part of its parameters, in place."""
    for name, way in cut.items():
        parameter = part.get_parameter(name)
        held = way.part(parameter.detach(), axis.index, axis.size)
        setattr(part, name, nn.Parameter(held, requires_grad=parameter.requires_grad))
    part.__dict__ |= {"axis": axis, "slicings": part.__dict__.get("slicings", {}) | cut}


def _show(runs: nn.Module, path: str, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """While ``runs`` computes, it finds in a parameter's place what ``make`` makes of it."""
    part, _, name = path.rpartition(".")
    forward: Callable[..., Any] = runs.forward.__func__  # type: ignore[attr-defined]

    @functools.wraps(forward)
    def showing(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        owner = module.get_submodule(part)
        owner.__dict__[name] = make(owner._parameters[name])  # type: ignore[arg-type]
        # Not in a hook: a repeated forward (training.recompute) ends by what torch calls none after.
        try:
            return forward(module, *args, **kwargs)
        finally:
            del owner.__dict__[name]

    # A method, of which a copy of the module has its own.
    runs.forward = types.MethodType(showing, runs)


def _keep_unfused(mixer: nn.Module) -> None:
    """Take no kernel of a whole mixer, as transformers would in training: it exchanges nothing."""
    mixer.register_forward_pre_hook(lambda module, _: setattr(module, "training", False))


def _cut_states(mixer: Any, axis: Axis) -> None:
    """Leave a mixer of Mamba 2 this rank's heads (Dao & Gu 2024, section 8.1), and their groups of B and C.

    Of one group, which all heads share, each rank keeps a part of what makes B and C, and gathers it.

    Raises:
        ValueError: heads, groups or states do not divide.
    """
    size, groups, heads, inner = axis.size, mixer.n_groups, mixer.num_heads, mixer.intermediate_size
    for what, count in (("heads (num_heads)", heads), ("groups (n_groups)", groups)):
        if count % size and (count, what[:6]) != (1, "groups"):
            raise ValueError(f"{count} {what} do not divide over {size} tensor ranks")
    states = groups * mixer.ssm_state_size
    in_proj = Slicing(dim=0, blocks=(inner, inner, states, states, heads))
    conv1d = Slicing(dim=0, blocks=(inner, states, states))

    def gathered(part: torch.Tensor, way: Slicing, first: int) -> torch.Tensor:
        blocks = list(way.split(part, size))
        for place in (first, first + 1):
            whole = gather(blocks[place].movedim(0, -1).contiguous(), axis)
            blocks[place] = copy_to_group(whole, axis).movedim(-1, 0)
        return torch.cat(blocks)

    for part, way, first in (("in_proj", in_proj, 2), ("conv1d", conv1d, 1)):
        held = dict(mixer.get_submodule(part).named_parameters())
        _hold(mixer.get_submodule(part), dict.fromkeys(held, way), axis)
        for name in held if groups == 1 else ():
            _show(mixer, f"{part}.{name}", functools.partial(gathered, way=way, first=first))
    _hold(mixer, dict.fromkeys(("dt_bias", "A_log", "D"), _FIRST), axis)
    if groups == 1:
        mixer.norm = CutNorm(mixer.norm, axis)
    else:
        _hold(mixer.norm, {"weight": _FIRST}, axis)
        mixer.n_groups //= size
    mixer.num_heads, mixer.intermediate_size = heads // size, inner // size
    mixer.conv_dim = mixer.intermediate_size + 2 * mixer.n_groups * mixer.ssm_state_size
    mixer.out_proj = RowLinear(mixer.out_proj, axis)
    mixer.register_forward_pre_hook(lambda _, args: (copy_to_group(args[0], axis), *args[1:]))
    _keep_unfused(mixer)


def _cut_experts(part: nn.Module, path: str, kind: str, plan: dict[str, tuple[str, str]], axis: Axis) -> None:
    """Leave each of the experts this rank's part of its inner units."""
    cut = {}
    for name, parameter in part.named_parameters():
        style = plan.get(f"{path}.{name}", ("", ""))[0]
        if style == _ONCE:
            # Each rank adds its share; the gradient is of the sum, which each has.
            _show(part, name, lambda one: one - one.detach() + one.detach() / axis.size)
        elif style in _EXPERT_WEIGHTS and -parameter.dim() <= _EXPERT_WEIGHTS[style].dim < parameter.dim():
            cut[name] = _EXPERT_WEIGHTS[style]
        else:
            what = style or "not in its plan"
            raise ValueError(f"{path}.{name} of {kind} ({what}) cannot be cut here. To fix: 1")
    _hold(part, cut, axis)

    def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(copy_to_group(one, axis) if torch.is_floating_point(one) else one for one in args)

    part.register_forward_pre_hook(before)
    part.register_forward_hook(lambda _, args, output: reduce_from_group(output, axis))


class _Meeting:
    """Exchange of tensors between threads, in the place of ranks."""

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


class _Draws(TorchDispatchMode):
    """Notes the shapes of what is drawn at random."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator; attention that draws is made of others."""
        output = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and "attention" not in func.name():
            self.shapes.append((output[0] if isinstance(output, tuple) else output).shape)
        return output


def _decoder(module: nn.Module) -> DecoderLayer | None:
    return next((part for part in module.modules() if isinstance(part, DecoderLayer)), None)


def kind_of_layer(module: nn.Module) -> Any:
    """Key of transformers' layers that are cut alike; None: it is none."""
    layer = _decoder(module)
    if layer is None:
        return None
    return type(layer.layer), tuple((name, one.shape) for name, one in layer.named_parameters())


def _drawn_otherwise(config: Any) -> str:
    dropped = {} if config is None else {name: one for name, one in vars(config).items() if "drop" in name}
    given = ", ".join(f"{name} {one}" for name, one in dropped.items() if one) or "a dropout"
    return (
        f"{given} would be drawn otherwise than in one process. To fix: 1, or 0.0 for what is drawn by head, "
        "by unit of an MLP, or for an adapter of a map that is cut by rows"
    )


def _trial(
    module: nn.Module, axis: Axis, value: torch.Tensor, *, cut: dict[str, Slicing], fractions: list[float]
) -> tuple[dict[str, torch.Tensor], list[torch.Size]]:
    """Output and gradients of a layer on one rank; shapes of what it draws at random in training."""
    with torch.no_grad(), _Draws() as draws:
        module.train()(value)
    module.eval()
    given, held, migrates = value.clone().requires_grad_(), [pairs([module])], any(fractions)
    still = [one for name, one in module.named_parameters() if name in cut and one.requires_grad]
    for one in still:
        one.requires_grad_(migrates)
    begin_migration(held, fractions, axis, microbatches=1)
    output = module(given)
    # Of normed outputs the squares have one sum, whatever they are.
    (output * value).square().mean().backward()
    finish_migration(held)
    found = {"its output": output.detach(), "the gradient of its input": given.grad}
    found |= {f"the gradient of {name}": one.grad for name, one in module.named_parameters()}
    module.zero_grad()
    for one in still:
        one.requires_grad_()
    return {name: one for name, one in found.items() if one is not None}, draws.shapes


def check_cut_layer(module: nn.Module, size: int, *, migrates: bool = False) -> None:
    """Compare a layer of transformers, cut over ``size`` ranks, with the whole one.

    Compared are outputs and gradients, but those of weights that are cut, which follow from these where no
    rank computes for another; and the shapes of what is drawn at random in training.

    Args:
        module: whole, with memory; its mode, types and weights of 0 change.
        size: of the group.
        migrates: half of the work of the last rank is handed over.

    Raises:
        ValueError: they differ, or the cut layer does not run.
    """
    decoder = _decoder(module)
    assert decoder is not None
    layer, generator = decoder.float().eval(), torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        # Biases and halves of adapters that start at 0 would hide what is wrong with them.
        if not parameter.any():
            parameter.detach().normal_(std=0.1, generator=generator)
    meeting = _Meeting(size)
    axes = [_ThreadAxis(ranks=tuple(range(size)), index=index, meeting=meeting) for index in range(size)]
    parts = [cut_by_plan(copy.deepcopy(layer), axis) for axis in axes]
    ways = slicings(parts[0])
    run = functools.partial(
        _trial,
        value=torch.randn(layer.tried, generator=generator),
        cut=ways,
        fractions=[0.0] * (size - 1) + [0.5 * migrates],
    )

    def of_rank(module: nn.Module, axis: Axis) -> tuple[dict[str, torch.Tensor], list[torch.Size]]:
        try:
            return run(module, axis)
        except BaseException:
            meeting.barrier.abort()
            raise

    what, fix = (", with units handed over,", "resize or none") if migrates else (", cut by its plan,", "1")
    kind = f"{type(layer.layer).__name__}{what}"
    wanted, drawn = run(layer, Axis())
    with ThreadPoolExecutor(size) as threads:
        runs = [threads.submit(of_rank, part, axis) for part, axis in zip(parts, axes, strict=True)]
    errors = [error for one in runs if (error := one.exception()) is not None]
    if errors:
        first = min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError))
        raise ValueError(f"{kind} does not run: {first}. To fix: {fix}") from first
    if any(one.result()[1] != drawn for one in runs):
        raise ValueError(_drawn_otherwise(layer.config))
    largest = max(float(one.abs().max()) for what, one in wanted.items() if what != "its output")
    results = [one.result()[0] for one in runs]
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
