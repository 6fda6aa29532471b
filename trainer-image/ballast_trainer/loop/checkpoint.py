"""Checkpoints that survive a different number of ranks: torch's DCP, made atomic and verified.

A checkpoint is a directory ``step-00000040`` of DCP files and a ``manifest.json`` with the
checksum of each file.  It is written under a temporary name and renamed when complete, so a
directory with its final name is whole; what was damaged later is found by its checksums and
skipped.  A tensor's key names its layer, so any number of ranks can load it.
"""

import dataclasses
import json
import logging
import os
import shutil
import warnings
import zlib
from pathlib import Path
from typing import Any

import torch

from ballast_trainer.distributed.process_group import World
from ballast_trainer.errors import CheckpointError
from ballast_trainer.layers.layer_stack import LayerSet
from ballast_trainer.tensor_parallel.shards import assembled, needed_keys, stored_tensors

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_PREFIX = "step-"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        step: optimizer steps done; the next step to run, and the position in the data.
        layer_count: layers of the model.
        seed: the seed of weights, data order and dropout.
        files: CRC-32 of each file.
        loss_scale: the factor on the loss, and steps since it changed; matters to fp16.
        optimizer: its name in the configuration; None: not noted.
    """

    step: int
    layer_count: int
    seed: int
    files: dict[str, int]
    loss_scale: tuple[float, int] = (1.0, 0)
    optimizer: str | None = None


def _checksum(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc


def _layer_key(index: int, name: str) -> str:
    return f"layers.{index}.{name}"


class Checkpoints:
    """The checkpoints of a job in a directory that all of its ranks share."""

    def __init__(
        self, path: str, *, keep: int, layer_count: int, seed: int, optimizer: str | None = None
    ) -> None:
        self._path = Path(path)
        self._keep = keep
        self._layer_count = layer_count
        self._seed = seed
        self._optimizer = optimizer
        self._corrupt: set[str] = set()

    def save(
        self, world: World, layers: LayerSet, step: int, *, loss_scale: tuple[float, int] = (1.0, 0)
    ) -> None:
        """Save the state after ``step`` steps; collective over the world.

        Raises:
            CheckpointError: the directory cannot be written.
        """
        final = self._path / f"{_PREFIX}{step:08d}"
        temporary = self._path / f".{final.name}.partial"
        if world.from_rank_0(world.rank == 0 and self._is_there(final)):
            return
        failure = None
        if world.rank == 0:
            try:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
            except OSError as error:
                failure = _cannot_write(temporary, error)
        failure = world.from_rank_0(failure)
        if failure is not None:
            raise CheckpointError(failure)
        # A replica of the pipeline holds nothing that the first one does not.
        mine = list(layers) if world.data.index == 0 else []
        state = {
            _layer_key(layer.index, name): value
            for layer in mine
            for name, value in stored_tensors(layer, world.tensor).items()
        }
        _dcp_save(world, state, temporary)
        # Every rank reads back what it has written itself, at the same time as the others.
        mine_read = {path.name: _checksum(path) for path in temporary.glob(f"__{world.rank}_*")}
        read = world.gather(mine_read)
        if world.rank == 0:
            files = {name: crc for one in read for name, crc in one.items()}
            rest = [path for path in temporary.iterdir() if path.name not in files]
            files |= {path.name: _checksum(path) for path in rest}
            manifest = Manifest(
                step=step,
                layer_count=self._layer_count,
                seed=self._seed,
                files=files,
                loss_scale=loss_scale,
                optimizer=self._optimizer,
            )
            _write_durably(temporary / MANIFEST, json.dumps(dataclasses.asdict(manifest)))
            if final.exists():
                shutil.rmtree(final)
                self._corrupt.discard(final.name)
            temporary.rename(final)
            _sync_folder(self._path)
            self._prune()
        world.from_rank_0(None)

    def open(self, world: World) -> None:
        """Make the directory if need be, so that a wrong one is found before the first step; collective.

        Raises:
            CheckpointError: rank 0 cannot write there.
        """
        failure = None
        if world.rank == 0:
            try:
                self._path.mkdir(parents=True, exist_ok=True)
                probe = self._path / f".writable-{os.getpid()}"
                probe.touch()
                probe.unlink()
            except OSError as error:
                failure = _cannot_write(self._path, error)
        failure = world.from_rank_0(failure)
        if failure is not None:
            raise CheckpointError(failure)

    def newest(self, world: World) -> Manifest | None:
        """The newest checkpoint that is whole, as rank 0 sees it; collective over the world.

        Raises:
            CheckpointError: it is of another model, seed or optimizer.
        """
        manifest: Manifest | None = world.from_rank_0(self._newest() if world.rank == 0 else None)
        if manifest is not None and manifest.layer_count != self._layer_count:
            raise CheckpointError(
                f"{self._path} has a checkpoint of {manifest.layer_count} layers, the model has "
                f"{self._layer_count}. To fix: give the job a checkpoint.path of its own"
            )
        if manifest is not None and manifest.seed != self._seed:
            raise CheckpointError(
                f"{self._path} has a checkpoint of seed {manifest.seed}, the job has {self._seed}. "
                "To fix: give the job a checkpoint.path of its own"
            )
        noted = None if manifest is None or self._optimizer is None else manifest.optimizer
        if noted is not None and noted != self._optimizer:
            raise CheckpointError(
                f"{self._path} has a checkpoint of the optimizer {noted}, training.optimizer is "
                f"{self._optimizer}, which cannot continue from its state. "
                f"To fix: {noted}, or give the job a checkpoint.path of its own"
            )
        return manifest

    def load(self, world: World, layers: LayerSet, manifest: Manifest) -> None:
        """Load the tensors of the layers held; collective over the world.

        Raises:
            CheckpointError: the tensors of a layer have other names or shapes.
        """
        path = self._path / f"{_PREFIX}{manifest.step:08d}"
        from torch.distributed.checkpoint import FileSystemReader

        metadata = FileSystemReader(path).read_metadata().state_dict_metadata
        held = tuple(_layer_key(index, "") for index in layers.indices())
        needed = needed_keys((key for key in metadata if key.startswith(held)), world.tensor)
        state: dict[str, Any] = {}
        for key, description in metadata.items():
            if key in needed:
                properties: Any = description
                state[key] = torch.empty(properties.size, dtype=properties.properties.dtype)
        _dcp_load(world, state, path)
        for layer in layers:
            prefix = _layer_key(layer.index, "")
            stored = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
            try:
                layer.load(assembled(stored, layer, world.tensor))
            except (RuntimeError, ValueError, KeyError) as error:
                reason = " ".join(str(error).split()[:40])
                raise CheckpointError(
                    f"{path} does not fit layer {layer.index}: {reason}. "
                    "To fix: the model that it was saved from, or a checkpoint.path of its own"
                ) from error

    def _complete(self) -> list[Path]:
        return sorted(self._path.glob(f"{_PREFIX}*"), reverse=True)

    def _newest(self) -> Manifest | None:
        for path in self._complete():
            manifest = self._whole(path)
            if manifest is not None:
                return manifest
        return None

    def _is_there(self, path: Path) -> bool:
        return path.exists() and self._whole(path) is not None

    def _whole(self, path: Path) -> Manifest | None:
        """The manifest of a checkpoint whose files are as they were written; else None, with a warning."""
        try:
            manifest = Manifest(**json.loads((path / MANIFEST).read_text()))
            wrong = [name for name, crc in manifest.files.items() if _checksum(path / name) != crc]
        except (OSError, ValueError, TypeError) as error:
            reason = str(error)
        else:
            if not wrong:
                return manifest
            reason = f"{', '.join(wrong)} changed since it was written"
        logger.warning("skipping the corrupt checkpoint %s: %s", path, reason)
        self._corrupt.add(path.name)
        return None

    def _prune(self) -> None:
        """Remove corrupt ones, and whole ones but the newest: a corrupt one takes no whole one's place."""
        whole = [path for path in self._complete() if path.name not in self._corrupt]
        corrupt = [path for path in self._complete() if path.name in self._corrupt]
        for path in whole[self._keep :] + corrupt:
            shutil.rmtree(path, ignore_errors=True)


def _cannot_write(path: Path, error: OSError) -> str:
    return (
        f"cannot write a checkpoint to {path}: {error}. "
        "To fix: let checkpoint.path be a directory that all ranks share and can write to"
    )


def _write_durably(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    """Make a rename last through a loss of power."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _dcp_save(world: World, state: dict[str, torch.Tensor], path: Path) -> None:
    from torch.distributed import checkpoint

    with warnings.catch_warnings():
        # DCP warns that it assumes one process where there is one.
        warnings.simplefilter("ignore")
        checkpoint.save(state, checkpoint_id=path, no_dist=world.size == 1)


def _dcp_load(world: World, state: dict[str, Any], path: Path) -> None:
    from torch.distributed import checkpoint

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint.load(state, checkpoint_id=path, no_dist=world.size == 1)
