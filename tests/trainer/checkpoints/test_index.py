"""A checkpoint's index and manifest as files."""

import dataclasses
import json
import os
import pickle
import tracemalloc
import warnings

import pytest
import torch
from ballast_trainer.checkpoints.index import IndexReader
from ballast_trainer.checkpoints.manifest import Manifest
from ballast_trainer.errors import CheckpointError
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from torch.distributed import checkpoint

from tests.support.examples import examples

STATE = {
    "weight": torch.arange(6, dtype=torch.float32).reshape(3, 2),
    "half": torch.ones(4, dtype=torch.bfloat16),
    "step": torch.tensor(7),
    "mask": torch.tensor([True, False]),
}


@pytest.fixture
def folder(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint.save(STATE, checkpoint_id=tmp_path, no_dist=True)
    return tmp_path


class Attack:
    """What runs a command where it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_what_was_saved_is_read(folder):
    """Every dtype that a layer may have."""
    found = {key: torch.zeros_like(value) for key, value in STATE.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint.load(found, storage_reader=IndexReader(str(folder)), no_dist=True)
    assert all(torch.equal(found[key], value) for key, value in STATE.items())


def test_an_index_that_calls_a_function_is_refused_before_it_does(folder):
    """The function is named; nothing has run."""
    (folder / ".metadata").write_bytes(pickle.dumps(Attack(f"touch {folder}/ran")))
    with pytest.raises(CheckpointError, match=r"posix\.system, which no index has.*To fix: "):
        IndexReader(str(folder)).read_metadata()
    assert not (folder / "ran").exists()


def test_an_index_that_the_python_of_debian_12_wrote_is_read(folder, monkeypatch):
    """Python 3.11.2 pickles a member of an enum as ``getattr`` of its class; others write its value."""
    written = IndexReader(str(folder)).read_metadata()
    kind = type(written.state_dict_metadata["weight"].properties)
    monkeypatch.setattr(
        "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING.__reduce_ex__",
        lambda member, protocol: (getattr, (type(member), member.name)),
    )
    content = pickle.dumps(written)
    assert b"getattr" in content
    (folder / ".metadata").write_bytes(content)
    read = IndexReader(str(folder)).read_metadata()
    assert isinstance(read.state_dict_metadata["weight"].properties, kind)
    assert read.state_dict_metadata == written.state_dict_metadata


class Reach:
    """What asks a class of the index for more than its members."""

    def __reduce__(self):
        from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

        return getattr, (_MEM_FORMAT_ENCODING, "__subclasses__")


def test_an_index_gets_nothing_but_members_by_getattr(folder):
    """Else it would reach any function of the process."""
    (folder / ".metadata").write_bytes(pickle.dumps(Reach()))
    with pytest.raises(CheckpointError, match=r"__subclasses__, which no index does.*To fix: "):
        IndexReader(str(folder)).read_metadata()


@pytest.mark.parametrize("name", ["../other/file", "/etc/passwd", "..", "a/b"])
def test_an_index_that_names_a_file_elsewhere_is_refused(folder, name):
    """Tensors are read from the checkpoint's own folder."""
    index = IndexReader(str(folder)).read_metadata()
    index.storage_data = {
        key: dataclasses.replace(info, relative_path=name) for key, info in index.storage_data.items()
    }
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match="which is not in the folder"):
        IndexReader(str(folder)).read_metadata()


@examples(200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 2000), byte=st.integers(0, 255), length=st.integers(0, 3000))
def test_damaged_bytes_are_refused_or_read_as_an_index(folder, at, byte, length):
    """No other error, whatever byte is wrong or missing."""
    content = bytearray((folder / ".metadata").read_bytes())
    content[at % len(content)] = byte
    path = folder / "damaged"
    path.mkdir(exist_ok=True)
    (path / ".metadata").write_bytes(bytes(content[: max(1, length)]))
    try:
        IndexReader(str(path)).read_metadata()
    except CheckpointError as error:
        assert "To fix: " in str(error)


@pytest.mark.parametrize(
    "bomb",
    [
        b"r" + (2**24).to_bytes(4, "little"),
        b"p16777216\n",
        b"\x96" + (2**30).to_bytes(8, "little") + b"short",
    ],
    ids=["far place", "far place as text", "long value"],
)
def test_an_index_of_a_few_bytes_takes_no_gigabytes(folder, bomb):
    """Found by fuzzing: the unpickler makes room for what a changed byte says."""
    (folder / ".metadata").write_bytes(b"\x80\x04N" + bomb + b".")
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="cannot be read"):
            IndexReader(folder).read_metadata()
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


MANIFEST = Manifest(
    step=7, layer_count=4, seed=3, files={"__0_0.distcp": 2**32 - 1}, loss_scale=(2.0, 5), optimizer="adamw"
)


def test_a_manifest_is_read_as_it_was_written():
    """Fields of a later release are ignored."""
    assert Manifest.from_json(MANIFEST.to_json()) == MANIFEST
    later = {**dataclasses.asdict(MANIFEST), "compression": "zstd"}
    assert Manifest.from_json(json.dumps(later)) == MANIFEST


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "[" * 100_000,
        MANIFEST.to_json().replace("7", "NaN"),
        MANIFEST.to_json().replace("7", '"seven"'),
        MANIFEST.to_json().replace("4294967295", '"all"'),
    ],
    ids=["empty", "list", "no fields", "nested", "not a number", "step as text", "checksum as text"],
)
def test_what_is_no_manifest_is_refused(text):
    """As a ValueError, which makes the checkpoint corrupt; no other error ends the resume."""
    with pytest.raises(ValueError, match=r"."):
        Manifest.from_json(text)
