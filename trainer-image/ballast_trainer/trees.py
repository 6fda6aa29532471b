"""Trees of tensors, as layers return them and take them: tuples, lists, dicts and dataclasses, nested.

Beside tensors a tree may hold constants (None, numbers, text), which are the same in every microbatch.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch

Tree = Any

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.Size)


@dataclasses.dataclass(frozen=True, slots=True)
class Constant:
    """A value that is no tensor.

    Attributes:
        value: of one of a few types.
        shown: what tells it from others: 1, 1.0 and True differ, and NaN does not from NaN.
    """

    value: Any = dataclasses.field(compare=False)
    shown: str


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A tree's container of class ``kind``; ``names``: keys or fields, none in a tuple or list."""

    kind: type
    names: tuple[Any, ...]
    children: tuple["Structure", ...]


Structure = Node | Constant | None
"""A tree without its tensors; None stands for one."""


def flatten(tree: Tree) -> tuple[list[torch.Tensor], Structure]:
    """A tree's tensors in order, and the rest. Raises TypeError: no tensor, or something not to be sent."""
    if isinstance(tree, torch.Tensor):
        return [tree], None
    tensors: list[torch.Tensor] = []
    structure = _structure(tree, tensors)
    if not tensors:
        raise TypeError(f"{type(tree).__name__} without a tensor")
    return tensors, structure


def tensors_of(tree: Tree) -> list[torch.Tensor]:
    """The tensors of a tree, in order; see :func:`flatten`."""
    return flatten(tree)[0]


def unflatten(structure: Structure, tensors: Iterator[torch.Tensor]) -> Tree:
    """The tree of a structure and its tensors."""
    if structure is None:
        return next(tensors)
    if isinstance(structure, Constant):
        return structure.value
    kind, names = structure.kind, structure.names
    children = [unflatten(child, tensors) for child in structure.children]
    if issubclass(kind, dict):
        named = dict(zip(names, children, strict=True))
        return kind(**named) if dataclasses.is_dataclass(kind) else kind(named)
    if dataclasses.is_dataclass(kind):
        # As it was: no default, no check of its own runs once more.
        made: Any = object.__new__(kind)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(made, name, child)
        return made
    made = kind
    return made(*children) if hasattr(kind, "_fields") else made(children)


def mapped(function: Callable[[torch.Tensor], torch.Tensor], tree: Tree) -> Tree:
    """The tree with ``function`` of each tensor in its place."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    tensors, structure = flatten(tree)
    return unflatten(structure, map(function, tensors))


def chunks(tree: Tree, count: int) -> tuple[Tree, ...]:
    """The tree with each tensor's first dimension cut into ``count`` parts."""
    if isinstance(tree, torch.Tensor):
        return tree.chunk(count)
    tensors, structure = flatten(tree)
    parts = zip(*(tensor.chunk(count) for tensor in tensors), strict=True)
    return tuple(unflatten(structure, iter(part)) for part in parts)


def learns(tree: Tree) -> bool:
    """True if a gradient comes back to any tensor of it."""
    if isinstance(tree, torch.Tensor):
        return tree.requires_grad
    return any(tensor.requires_grad for tensor in tensors_of(tree))


def byte_count(tree: Tree) -> int:
    """Bytes of its tensors."""
    return tree.nbytes if isinstance(tree, torch.Tensor) else sum(t.nbytes for t in tensors_of(tree))


def _structure(tree: Tree, tensors: list[torch.Tensor]) -> Structure:
    if isinstance(tree, torch.Tensor):
        tensors.append(tree)
        return None
    kind = type(tree)
    if kind in _CONSTANTS:
        return Constant(tree, f"{kind.__name__} {tree!r}")
    names: tuple[Any, ...] = ()
    if kind in (tuple, list) or (issubclass(kind, tuple) and hasattr(kind, "_fields")):
        children = list(tree)
    elif kind in (dict, OrderedDict) or (issubclass(kind, dict) and dataclasses.is_dataclass(kind)):
        names, children = tuple(tree), list(tree.values())
    elif dataclasses.is_dataclass(kind):
        names = tuple(field.name for field in dataclasses.fields(kind))
        children = [getattr(tree, name) for name in names]
    else:
        raise TypeError(f"a {kind.__name__} beside tensors")
    return Node(kind, names, tuple(_structure(child, tensors) for child in children))
