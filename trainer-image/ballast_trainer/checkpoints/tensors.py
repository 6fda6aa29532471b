"""Tensors of layers in files of torch's distributed checkpoints, by key, independent of the writing rank."""

import os
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ballast_trainer.checkpoints.manifest import Patience
from ballast_trainer.distributed.axis import Axis
from ballast_trainer.distributed.process_group import World
from ballast_trainer.dynamics.freezing import as_remembered
from ballast_trainer.dynamics.pruning.sparse_linear import as_pruned_now
from ballast_trainer.errors import CheckpointError
from ballast_trainer.layers.layer import MODULE, OPTIMIZER, Layer, LayerSet
from ballast_trainer.layers.shared_experts import is_elsewhere, shared_experts
from ballast_trainer.tensor_parallel.shards import assembled, is_share, needed_keys, stored_tensors

_LAYERS = "layers."
_NAMED = 4
"""Tensors that a message names, of those that do not fit."""


def stored(world: World, layers: LayerSet) -> dict[str, torch.Tensor]:
    """The tensors that this rank writes, by key; live ones.

    What replicas of a stage hold alike is written by one of them, each about as many bytes.
    """
    found = {
        _layer_key(layer.index, name): value
        for layer in layers
        for name, value in stored_tensors(layer, world.tensor).items()
    }
    writers, loads = {}, [0] * world.data.size
    for key, value in sorted(found.items(), key=lambda item: (-item[1].nbytes, item[0])):
        if not is_share(key):
            writers[key] = loads.index(min(loads))
            loads[writers[key]] += value.nbytes
    return {
        key: value for key, value in found.items() if writers.get(key, world.data.index) == world.data.index
    }


def changed_by_optimizer(layers: LayerSet, state: Mapping[str, torch.Tensor]) -> set[str]:
    """The keys of ``state`` whose tensors change in the optimizer step alone."""
    learning = (
        layer.kept(name)
        for layer in layers
        for name, parameter in layer.module.named_parameters()
        if parameter.requires_grad
    )
    # Of experts that replicas share, rows of one tensor.
    trained = {kept.untyped_storage().data_ptr() for kept in learning if kept is not None}
    return {
        key
        for key, value in state.items()
        if key.split(".", 2)[2].startswith(OPTIMIZER) or value.untyped_storage().data_ptr() in trained
    }


def save(world: World, state: Mapping[str, torch.Tensor], path: Path) -> str | None:
    """Write the tensors ``state`` of this rank, by key; collective. On all ranks, the reason of a failure."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        # DCP warns that it assumes one process where there is one.
        warnings.simplefilter("ignore")
        try:
            checkpoint.save(
                dict(state), checkpoint_id=path, no_dist=world.size == 1, process_group=world.patient_group
            )
        except CheckpointException as error:
            return _first_reason(error)
        except OSError as error:
            return str(error)
    return None


def load(world: World, layers: LayerSet, path: Path, patience: Patience, *, optimizer: bool = True) -> None:
    """Load the tensors of the layers held, with the state of their optimizers; each rank reads for itself.

    Raises:
        OSError: a file cannot be read.
        CheckpointError: the tensors of a layer have other names or shapes.
    """
    metadata = patience.read(lambda: _tensors_in(path))
    keys = needed(world, layers, metadata)
    if not optimizer:
        optimizers = tuple(_layer_key(index, OPTIMIZER) for index in layers.indices())
        keys = {key for key in keys if not key.startswith(optimizers)}
    state: dict[str, Any] = {}
    for key, description in metadata.items():
        if key in keys:
            state[key] = torch.empty(description.size, dtype=description.properties.dtype)
    patience.read(lambda: _read(state, path))
    fill(world, layers, state, path)


def needed(world: World, layers: LayerSet, keys: Iterable[str]) -> set[str]:
    """Keys of the stored ``keys`` that this rank has to read for the layers that it holds."""
    by_layer: defaultdict[str, list[str]] = defaultdict(list)
    for key in keys:
        index, _, name = key.removeprefix(_LAYERS).partition(".")
        by_layer[index].append(name)
    found, replicas = set(), _replicas(world, layers)
    for layer in layers:
        experts = shared_experts(layer.module)
        held = (name for name in by_layer[str(layer.index)] if not is_elsewhere(name, experts))
        names = needed_keys(held, world.tensor, replicas, layer.of_experts)
        found |= {_layer_key(layer.index, name) for name in names}
    return found


def fill(world: World, layers: LayerSet, state: Mapping[str, torch.Tensor], source: object) -> None:
    """Load the layers held from their stored tensors by key; ``source`` is where these were read, as text.

    Raises:
        CheckpointError: the tensors of a layer have other names or shapes.
    """
    for layer in layers:
        prefix = _layer_key(layer.index, "")
        stored = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        parts: dict[str, torch.Tensor] = {}
        try:
            parts = assembled(stored, layer, world.tensor, _replicas(world, layers))
            layer.load(as_remembered(as_pruned_now(parts, layer.module), layer.module))
        except (RuntimeError, ValueError, KeyError, AttributeError) as error:
            reason = _difference(parts, layer) or " ".join(str(error).split()[:40])
            raise CheckpointError(
                f"{source} does not fit layer {layer.index}: {reason}. "
                "To fix: the model that it was saved from (its modules by the same names), or a "
                "checkpoint.path of its own"
            ) from error


def _difference(stored: Mapping[str, torch.Tensor], layer: Layer) -> str:
    """Tensors of a layer's module whose names or shapes differ from the stored ones; empty: not known."""
    if layer.is_sharded or not stored:
        return ""
    own = layer.module.state_dict()
    there = {name.removeprefix(MODULE): of for name, of in stored.items() if name.startswith(MODULE)}
    found = {
        "the checkpoint has no": [name for name in own if name not in there],
        "the model has no": [name for name in there if name not in own],
        "other shapes have": [
            f"{name} ({tuple(there[name].shape)} in the checkpoint, {tuple(value.shape)} in the model)"
            for name, value in own.items()
            if name in there and there[name].shape != value.shape
        ],
    }
    return "; ".join(
        f"{what} {', '.join(names[:_NAMED])}" + f" and {len(names) - _NAMED} more" * (len(names) > _NAMED)
        for what, names in found.items()
        if names
    )


def _replicas(world: World, layers: LayerSet) -> tuple[Axis, Axis]:
    """The ranks that share the optimizers' state, and the weights; one where they do not."""
    return (
        world.data if any(layer.shares for layer in layers) else Axis(),
        world.data if any(layer.is_sharded for layer in layers) else Axis(),
    )


def _layer_key(index: int, name: str) -> str:
    return f"{_LAYERS}{index}.{name}"


def _read(state: dict[str, Any], path: Path) -> None:
    """Fill the tensors of ``state`` by key. Raises OSError: a file cannot be read."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.api import CheckpointException

    from ballast_trainer.checkpoints.index import IndexReader

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            checkpoint.load(state, storage_reader=IndexReader(os.fspath(path)), no_dist=True)
        except CheckpointException as error:
            raise OSError(_first_reason(error)) from None


def _tensors_in(path: Path) -> dict[str, Any]:
    """Size and type of stored tensors by key. Raises OSError: not read; CheckpointError: it is no index."""
    from ballast_trainer.checkpoints.index import IndexReader

    found: dict[str, Any] = IndexReader(os.fspath(path)).read_metadata().state_dict_metadata
    return found


def _first_reason(error: Any) -> str:
    """The first rank's reason in a few words: DCP's own text has the traceback of every rank."""
    for rank, (cause, _) in sorted(error.failures.items()):
        return f"rank {rank}: {type(cause).__name__}: {cause}"
    return str(error)
