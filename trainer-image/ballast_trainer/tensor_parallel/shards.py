"""A layer's tensors by key for checkpoints: each part is stored once, any number of ranks can load it.

A whole tensor keeps its name; a part is called ``name@index/size:dimxblocks`` (of unequal blocks the lengths,
joined by ``+``), which is enough to assemble the whole and to cut it differently.  A replica's share of the
optimizer's state of either (ZeRO-1), or of the weights (ZeRO-3), adds ``%index/size``: its shares, flat, one
after the other are the tensor.  Of experts that replicas share each one has its own tensors, with ``#expert``
where a layer has one tensor for all.
"""

import re
from collections.abc import Collection, Iterable

import torch

from ballast_trainer.distributed.axis import Axis
from ballast_trainer.layers.layer import MODULE, OPTIMIZER, Layer
from ballast_trainer.layers.shared_experts import (
    by_expert,
    is_elsewhere,
    put_together,
    rows_of_all,
    shared_experts,
)
from ballast_trainer.layers.slicing import Slicing, slicings
from ballast_trainer.layers.zero import Share

_PART = re.compile(r"(?P<name>.+)@(?P<index>\d+)/(?P<size>\d+):(?P<dim>\d+)x(?P<blocks>[\d+]+)")
_SUFFIX = re.compile("[#@%]")
_SHARE = re.compile(r"(?P<key>.+)%(?P<index>\d+)/(?P<size>\d+)")


def _parameter_of(name: str) -> str:
    """The parameter of a tensor of a layer's state."""
    if name.startswith(OPTIMIZER):
        return name.removeprefix(OPTIMIZER).rpartition(".")[0]
    return name.removeprefix(MODULE)


def _slicing_of(name: str, value: torch.Tensor, cut: dict[str, Slicing]) -> Slicing | None:
    """Slicing of a tensor of a layer's state: as its parameter's, unless it is a mere number."""
    return None if value.dim() == 0 else cut.get(_parameter_of(name))


def _share_of(name: str, layer: Layer) -> Share | None:
    """Share of the replicas in a tensor of a layer's state; None: each of them has it."""
    of = layer.shares if name.startswith(OPTIMIZER) else layer.weight_shares
    return of.get(_parameter_of(name))


def stored_tensors(layer: Layer, axis: Axis) -> dict[str, torch.Tensor]:
    """The tensors of a layer that this rank stores: its parts, and on the first rank also the whole ones.

    Those of :func:`is_share` no other replica has; of the others each has all.
    """
    cut, experts, stored = slicings(layer.module), shared_experts(layer.module), {}
    for name, value in by_expert(layer.moving_state(written=True), layer.module).items():
        share, slicing = _share_of(name, layer), _slicing_of(name, value, cut)
        suffix = "" if share is None else "%{}/{}".format(*share.place)
        if is_elsewhere(name, experts) is not None:
            # As of a parameter that one replica has whole.
            suffix = "%0/1"
        if slicing is not None:
            blocks = slicing.blocks if isinstance(slicing.blocks, int) else "+".join(map(str, slicing.blocks))
            stored[f"{name}@{axis.index}/{axis.size}:{slicing.dim}x{blocks}{suffix}"] = value
        elif axis.index == 0:
            stored[name + suffix] = value
    return stored


def is_share(key: str) -> bool:
    """True if a stored key is of a tensor that one replica has alone."""
    return _SHARE.fullmatch(key) is not None


def _now(key: str, replicas: tuple[Axis, Axis], alone: Collection[str]) -> Axis:
    """The replicas that share a tensor now, by its stored key."""
    if alone and _parameter_of(_SUFFIX.split(key, 1)[0]) in alone:
        return Axis()
    return replicas[0] if key.startswith(OPTIMIZER) else replicas[1]


def needed_keys(
    keys: Iterable[str], axis: Axis, replicas: tuple[Axis, Axis], alone: Collection[str] = ()
) -> set[str]:
    """Stored keys of a layer that this rank has to read: its own parts, or all of other sizes.

    Args:
        keys: of a checkpoint.
        axis: the tensor group.
        replicas: those that share the optimizer's state now, and the weights; one rank where they do not.
        alone: names of parameters that no replicas share.
    """
    needed = set()
    for key in keys:
        share = _SHARE.fullmatch(key)
        part = _PART.fullmatch(key if share is None else share["key"])
        if part is not None and int(part["size"]) == axis.size and int(part["index"]) != axis.index:
            continue
        now = _now(key, replicas, alone)
        if share is None or not _fits(part, share, axis, now) or int(share["index"]) == now.index:
            needed.add(key)
    return needed


def assembled(
    stored: dict[str, torch.Tensor], layer: Layer, axis: Axis, replicas: tuple[Axis, Axis]
) -> dict[str, torch.Tensor]:
    """The tensors that ``layer`` loads on this rank, from those that :func:`needed_keys` names."""
    found: dict[str, torch.Tensor] = {}
    shares: dict[str, dict[int, torch.Tensor]] = {}
    parts: dict[str, dict[int, torch.Tensor]] = {}
    ways: dict[str, Slicing] = {}
    whole: dict[str, torch.Tensor] = {}
    as_it_is: dict[str, torch.Tensor] = {}
    for key, value in stored.items():
        share = _SHARE.fullmatch(key)
        part = _PART.fullmatch(key if share is None else share["key"])
        if share is None:
            found[key] = value
        elif _fits(part, share, axis, _now(key, replicas, layer.of_experts)):
            found_name = share["key"] if part is None else part["name"]
            as_it_is[found_name] = value
        else:
            shares.setdefault(share["key"], {})[int(share["index"])] = value
    for key, of in shares.items():
        joined = [of[index] for index in sorted(of)]
        # A mere number of the optimizer's is the same in all shares.
        found[key] = _joined(joined, _stored_shape(key, layer, axis)) if joined[0].dim() else joined[0]
    mine: dict[str, torch.Tensor] = {}
    for key, value in found.items():
        part = _PART.fullmatch(key)
        if part is None:
            whole[key] = value
        elif int(part["size"]) == axis.size:
            mine[part["name"]] = value
        else:
            parts.setdefault(part["name"], {})[int(part["index"])] = value
            lengths = tuple(map(int, part["blocks"].split("+")))
            ways[part["name"]] = Slicing(
                dim=int(part["dim"]), blocks=lengths if len(lengths) > 1 else lengths[0]
            )
    for name, pieces in parts.items():
        whole[name] = ways[name].whole([pieces[index] for index in sorted(pieces)])
    cut = slicings(layer.module)
    for name, value in whole.items():
        slicing = _slicing_of(name, value, cut)
        mine[name] = value if slicing is None else slicing.part(value, axis.index, axis.size)
    for name, value in mine.items():
        share_now = _share_of(name, layer)
        if share_now is not None and share_now.is_cut and value.dim():
            mine[name] = share_now.part(value, share_now.place[0])
    return put_together(mine | as_it_is, layer.module)


def _fits(part: re.Match[str] | None, share: re.Match[str], axis: Axis, replicas: Axis) -> bool:
    """True if a replica's own share of a tensor is what it has now: neither is cut in another way."""
    as_cut_now = (1 if part is None else int(part["size"])) == axis.size
    return as_cut_now and 1 < int(share["size"]) == replicas.size


def _stored_shape(key: str, layer: Layer, axis: Axis) -> torch.Size:
    """The shape of the parameter of a stored tensor, given by its key, as it was cut when it was stored."""
    part = _PART.fullmatch(key)
    name, _, of_expert = _parameter_of(key if part is None else part["name"]).partition("#")
    shape = list(layer.module.get_parameter(name).shape)
    if of_expert or name in layer.of_experts:
        shape[0] = 1 if of_expert else rows_of_all(name, layer.module) or shape[0]
    now, size = slicings(layer.module).get(name), 1 if part is None else int(part["size"])
    if now is not None:
        shape[now.dim] = shape[now.dim] * axis.size // size
    elif part is not None:
        shape[int(part["dim"])] //= size
    return torch.Size(shape)


def _joined(shares: list[torch.Tensor], shape: torch.Size) -> torch.Tensor:
    """A tensor of the optimizer's from its shares, in the parameter's shape if it has as many numbers."""
    value = shares[0] if len(shares) == 1 else torch.cat([share.reshape(-1) for share in shares])
    return value.reshape(shape) if value.numel() == shape.numel() else value
