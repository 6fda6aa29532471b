"""Attention heads as the unit of pruning: all products of an attention become smaller, at any sparsity.

A head is its rows of the maps to query, key and value, and its columns of the map out again.  Where several
heads of queries share keys and values (grouped-query attention), they are one unit and go together.
"""

import copy
from typing import Any

import torch
from torch import nn

from ballast_trainer.dynamics.pruning.neurons import Units, as_linear, replace_linears, shrinking
from ballast_trainer.seeding import host_seeded

_HAD = "ballast_heads"
"""Attribute of an attention: how many units it had."""

_OURS = "ballast_trainer."
"""Package of attentions that follow the number of heads from the shapes of their weights."""

_TRIED_POSITIONS = 4
_TRIED_DEVIATION = 0.1

_tried: dict[str, str] = {}
"""Own attentions that have been run with a head less, by class, sizes and settings: why they cannot."""


def heads_of(attention: nn.Module) -> Units | str:
    """The units of an attention; as text why they cannot be told apart."""
    attention = _inner(attention)
    name, size = type(attention).__name__, getattr(attention, "head_dim", None)
    if not isinstance(size, int) or size < 1:
        return f"an attention ({name}) without the attribute head_dim, the size of a head"
    parts = {child: as_linear(part) for child, part in attention.named_children()}
    linears = {child: linear for child, linear in parts.items() if linear is not None}
    q, k, v, o = (linears.get(f"{letter}_proj") for letter in "qkvo")
    if q is not None and k is not None and v is not None and o is not None:
        shared, rest = divmod(q.out_features, k.out_features)
        if rest or k.out_features % size or v.out_features != k.out_features:
            return f"an attention ({name}) whose heads are not of one size {size}"
        if o.in_features != q.out_features:
            return f"an attention ({name}) whose o_proj does not take what q_proj gives"
        return _units(attention, ((q, 1, shared * size), (k, 1, size), (v, 1, size)), o, shared * size)
    if len(linears) == 2:
        first, last = linears.values()
        if first.out_features == 3 * last.in_features and last.in_features % size == 0:
            return _units(attention, ((first, 3, size),), last, size)
    shapes = {child: tuple(linear.weight.shape) for child, linear in linears.items()}
    return (
        f"an attention ({name}) that is neither q_proj, k_proj, v_proj and o_proj nor one linear layer to "
        f"queries, keys and values and one out: its weights are {shapes}"
    )


def _units(
    attention: nn.Module, into: tuple[tuple[nn.Linear, int, int], ...], out: nn.Linear, columns: int
) -> Units:
    """A score is of the map to the value, the last one."""
    had = getattr(attention, _HAD, int(out.weight.shape[1]) // columns)
    return Units(attention, into, out, columns, scored=1, had=had)


def lacks(block: nn.Module, attention: nn.Module) -> str:
    """Reason that heads of a block's attention cannot be removed; empty: they can.

    A block is run once with a head less: its forward may count heads itself, norm all of them together, or
    have another order of heads, queries, keys and values in one map.
    """
    found = heads_of(attention)
    if isinstance(found, str):
        return found
    kind = type(found.part)
    if found.kept < 2:
        return f"an attention ({kind.__name__}) with one head of keys, and the best of a layer stays"
    if kind.__module__.startswith(_OURS):
        return ""
    plain = {name: of for name, of in vars(found.part).items() if isinstance(of, str | int | float)}
    tried = f"{kind.__module__} {found.part!r} {plain}"
    if tried not in _tried:
        _tried[tried] = _fails(block, found)
    return _tried[tried]


def prepare(attention: nn.Module) -> None:
    """Make an attention able to lose heads, and to load weights that have lost some."""
    attention = _inner(attention)
    replace_linears(attention, shrinking)
    found = heads_of(attention)
    assert isinstance(found, Units)
    setattr(attention, _HAD, found.kept)


def prepared(module: nn.Module) -> list[Units]:
    """The attentions in a layer that :func:`prepare` has seen."""
    found = [heads_of(part) for part in module.modules() if hasattr(part, _HAD)]
    return [heads for heads in found if isinstance(heads, Units)]


def _inner(attention: nn.Module) -> nn.Module:
    """The attention inside another change's wrapper."""
    while isinstance(getattr(attention, "attention", None), nn.Module):
        attention = attention.attention  # type: ignore[assignment]
    return attention


@torch.no_grad()
def _fails(block: nn.Module, heads: Units) -> str:
    """Difference between a block with a head less and one with a head that gives nothing; empty: none."""
    with host_seeded(0):
        tried = _alone(block)
        width = heads.into[0][0].in_features
        hidden = torch.randn(1, _TRIED_POSITIONS, width)
        (path,) = [name for name, module in block.named_modules() if module is heads.part]
        prepare(tried.get_submodule(path))
        whole = heads_of(tried.get_submodule(path))
        assert isinstance(whole, Units)
        whole.out.weight[:, -whole.columns :] = 0
        less = copy.deepcopy(tried)
        fewer = heads_of(less.get_submodule(path))
        assert isinstance(fewer, Units)
        fewer.remove(torch.arange(fewer.kept) < fewer.kept - 1, None)
        name = type(heads.part).__name__
        try:
            wanted = tried(hidden)
        except Exception as error:  # a user's block may do anything with its input
            return f"an attention ({name}) that cannot be tried: {error}"
        try:
            found = less(hidden)
        except Exception as error:
            return (
                f"an attention ({name}) that fails with a head less ({error}): its forward has to take the "
                "number of heads from its weights' shapes, by -1 and head_dim"
            )
    if torch.allclose(found, wanted, rtol=1e-3, atol=1e-4, equal_nan=True):
        return ""
    return (
        f"an attention ({name}) that computes something else with a head less: heads have to be "
        "apart from each other, and one map gives first all queries, then all keys, then all values"
    )


def _alone(block: nn.Module) -> nn.Module:
    """A copy of a block on the CPU with random weights (its own may be zeros), and without its MLP."""
    typed: Any = copy.deepcopy(block)
    if hasattr(typed, "mlp_path"):
        typed.set_submodule(typed.mlp_path(), nn.Identity())
    if any(tensor.is_meta for tensor in (*typed.parameters(), *typed.buffers())):
        typed.to_empty(device="cpu")
        for buffer in typed.buffers():
            buffer.zero_()
    alone: nn.Module = typed.cpu().float().eval()
    for parameter in alone.parameters():
        parameter.normal_(std=_TRIED_DEVIATION)
    return alone
