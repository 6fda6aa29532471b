"""The index of a checkpoint's tensors, read without running what it says.

torch.distributed.checkpoint writes the index (``.metadata``) as a pickle, and a pickle may call any function.
A user who can write to a checkpoint folder could then run code in the job's next launch.  Here the pickle may
name nothing but the classes that an index is made of; the tensors themselves are read with ``weights_only``.
"""

import enum
import io
import pickle
import pickletools
from pathlib import PurePath
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from ballast_trainer.errors import CheckpointError

_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"} | {name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)},
    "pathlib": {"PosixPath", "PurePosixPath"},
}


def _member(kind: Any, name: Any) -> Any:
    """Member of an enum for ``getattr``: Python 3.11.2, as Debian 12 has it, pickles members by it."""
    if not isinstance(kind, enum.EnumType) or name not in kind.__members__:
        raise pickle.UnpicklingError(f"it asks {str(kind)[:80]} for {str(name)[:80]}, which no index does")
    return kind[name]


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no index has")
        return super().find_class(module, name)


class IndexReader(FileSystemReader):
    """A reader of checkpoints whose index is data only, about files of its own folder only."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index.

        Raises:
            OSError: the file cannot be read.
            CheckpointError: it is no index, or names something else than tensors in files beside it.
        """
        path = self._get_metadata_path(kwargs.get("rank"))
        with self.fs.create_stream(path, "rb") as stream:
            content = stream.read()
        try:
            index = _read_index(content)
        except CheckpointError as error:
            raise CheckpointError(
                f"{path}: {error}. To fix: resume from another checkpoint, "
                "and see who else writes to this folder"
            ) from error
        if index.storage_meta is None:
            index.storage_meta = StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index


_PLACES = {"PUT", "BINPUT", "LONG_BINPUT"}
"""Operations that say where a value is kept: the unpickler makes room up to there, gigabytes for 5 bytes."""


def _refuse_far_places(content: bytes) -> None:
    """See that nothing is kept further away than the pickle has bytes, nor said to be longer than it is.

    Raises:
        ValueError: it is.
    """
    for instruction, argument, _ in pickletools.genops(content):
        if instruction.name in _PLACES and int(argument or 0) > len(content):
            raise ValueError(f"it keeps a value at place {argument} of at most {len(content)}")


def _read_index(content: bytes) -> Metadata:
    try:
        _refuse_far_places(content)
        index = _IndexUnpickler(io.BytesIO(content)).load()
    except OSError:
        raise
    except Exception as error:
        # A pickle's own errors are of any kind: wrong bytes may ask for any attribute.
        raise CheckpointError(f"the index cannot be read: {error}") from error
    if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict):
        raise CheckpointError(f"the index cannot be read: it is a {type(index).__name__}")
    for info in index.storage_data.values():
        name = getattr(info, "relative_path", None)
        if not isinstance(name, str) or name != PurePath(name).name or name == "..":
            raise CheckpointError(f"the index names the file {name!r}, which is not in the folder")
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(
                f"the index asks for a transformation of {name}, which Ballast never writes"
            )
    return index
