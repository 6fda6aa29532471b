"""Checkpoints are whole or not there, verified when read, and never lost by a run that cannot read them."""

import dataclasses
import datetime
import errno
import os
import resource
import shutil
import threading

import pytest
import torch
import torch.distributed as dist
from ballast_trainer.checkpoints import checkpoints as saving
from ballast_trainer.checkpoints import tensors
from ballast_trainer.checkpoints.checkpoints import Checkpoints
from ballast_trainer.checkpoints.folder import write_durably
from ballast_trainer.checkpoints.manifest import Manifest
from ballast_trainer.distributed.mesh import Mesh
from ballast_trainer.errors import CheckpointError, CheckpointNotWritten
from ballast_trainer.models.protocol import Model
from torch import nn

from tests.trainer.layers.trained_layers import ALONE, all_layers
from tests.trainer.tensor_parallel.ranks import on_ranks


def one_layer():
    """One small layer."""
    model = Model(layer_count=1, build_layer=lambda index: nn.Linear(4, 4), loss=nn.functional.mse_loss)
    return all_layers(model)


JOB = Manifest(step=0, layer_count=1, seed=0, files={})


def checkpoints_in(folder, keep=2, **options):
    """Checkpoints of a job of one layer."""
    return Checkpoints(str(folder), keep=keep, job=JOB, **options)


def save(checkpoints, layers, step, world=ALONE):
    """Save the layers after ``step`` steps."""
    checkpoints.save(world, tensors.stored(world, layers), dataclasses.replace(JOB, step=step))


@pytest.fixture
def store(tmp_path):
    """Checkpoints of one small layer, and that layer."""

    def make(keep=2, **options):
        return checkpoints_in(tmp_path / "saved", keep, **options)

    return make, one_layer(), tmp_path / "saved"


def step_folder(folder, step):
    return folder / f"step-{step:08d}"


def damage(folder, step):
    (shard, *_) = sorted(step_folder(folder, step).glob("*.distcp"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 0xFF
    shard.write_bytes(bytes(data))


def hide(folder, step):
    """The manifest is not visible, as on storage that lags behind."""
    manifest = step_folder(folder, step) / "manifest.json"
    manifest.rename(folder.parent / f"hidden-{step}")


def show(folder, step):
    (folder.parent / f"hidden-{step}").rename(step_folder(folder, step) / "manifest.json")


def names(folder):
    return sorted(path.name.removeprefix("step-").lstrip("0") for path in folder.glob("step-*"))


def saved(store, *steps):
    make, layers, folder = store
    first = make(keep=len(steps))
    for step in steps:
        save(first, layers, step)
    return make, layers, folder


@pytest.mark.slow
def test_a_run_that_finds_no_whole_checkpoint_refuses_to_start_and_removes_none(store):
    """One is corrupt, one cannot be read: both are named, and what to do; again at the next start."""
    make, _, folder = saved(store, 5, 10)
    hide(folder, 5)
    damage(folder, 10)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="none can be used") as refused:
            make().newest(ALONE)
        assert "manifest.json cannot be read" in str(refused.value)
        assert "checkpoint.startOver=true" in str(refused.value)
        assert names(folder) == ["10.corrupt", "5"]
    show(folder, 5)
    assert make().newest(ALONE).step == 5


def test_a_folder_with_nothing_but_corrupt_checkpoints_is_not_taken_for_an_empty_one(store, caplog):
    """A pod that is restarted after the refusal does not start from step 0 either."""
    make, _, folder = saved(store, 5)
    damage(folder, 5)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="none can be used"):
            make().newest(ALONE)
    assert names(folder) == ["5.corrupt"]
    assert caplog.text.count("skipping the corrupt checkpoint") == 1


@pytest.mark.parametrize("name", ["manifest.json", "__0_0.distcp", ".metadata"])
def test_a_pipe_in_the_place_of_a_file_is_damage_and_is_not_waited_for(store, name):
    """To open it would wait for its writer."""
    make, _, folder = saved(store, 5, 10)
    file = step_folder(folder, 10) / name
    file.unlink()
    os.mkfifo(file)
    assert make().newest(ALONE).step == 5
    assert names(folder) == ["10.corrupt", "5"]


def test_what_cannot_be_read_at_first_is_read_again(store):
    """A manifest that becomes visible while the run waits is used; nothing is lost."""
    make, _, folder = saved(store, 5, 10)
    hide(folder, 10)
    waited = []

    def sleep(seconds):
        waited.append(seconds)
        if len(waited) == 3:
            show(folder, 10)

    assert make(retry_seconds=60, sleep=sleep).newest(ALONE).step == 10
    assert waited == sorted(waited)
    assert names(folder) == ["10", "5"]


def test_a_path_that_no_system_has_is_refused_in_words():
    """One with a NUL; the system's error has no number."""
    with pytest.raises(CheckpointError, match=r"cannot write a checkpoint to .*checkpoint\.path"):
        checkpoints_in("/tmp/\0").open(ALONE)


def test_a_full_disk_leaves_no_part_behind_and_the_next_checkpoint_is_whole(store):
    """The error is one line with the storage's reason; checkpoints of before are as they were."""
    make, layers, folder = saved(store, 5)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, limits[1]))
    try:
        with pytest.raises(CheckpointNotWritten, match="cannot write a checkpoint") as failed:
            save(make(), layers, 10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "Traceback" not in str(failed.value)
    assert names(folder) == ["5"]
    assert not list(folder.glob(".*"))
    save(make(), layers, 10)
    assert make().newest(ALONE).step == 10


def slow_and_shared(world, folder):
    """Which files each rank verifies, where rank 0's storage takes longer than collectives wait."""
    # Not from the start: on a busy machine ranks may meet later than that.
    dist.group.WORLD._get_backend(torch.device("cpu"))._set_default_timeout(datetime.timedelta(seconds=1))
    one = checkpoints_in(folder, keep=1)
    save(one, one_layer() if world.rank == 0 else [], 5, world)
    read, checksum = [], saving.flaws

    def slowly(path, manifest, share, patience):
        read.extend(share)
        if world.rank == 0:
            threading.Event().wait(2.0)
        return checksum(path, manifest, share, patience)

    saving.flaws = slowly
    manifest = one.newest(world)
    return {"step": manifest.step, "read": read, "files": sorted(manifest.files)}


@pytest.mark.processes
def test_all_ranks_verify_their_share_and_wait_for_slow_storage_without_a_limit(tmp_path):
    """Longer than any collective may take: a rank that lives is waited for."""
    ranks = on_ranks(slow_and_shared, 2, str(tmp_path / "saved"), mesh=Mesh())
    assert [rank["step"] for rank in ranks] == [5, 5]
    assert sorted(ranks[0]["read"] + ranks[1]["read"]) == ranks[0]["files"]
    assert all(rank["read"] for rank in ranks)


START_OVER = {"keep": 1, "start_over": True}
RESUMED = {
    "one that cannot be read survives": ([10], [], {"keep": 1}, 5, (8, 10, 15), ["10.unreadable", "15"]),
    "none goes before enough are whole": ([], [], {"keep": 2}, None, (15,), ["10", "15", "5"]),
    "those of before go then": ([], [], {"keep": 2}, None, (15, 20), ["15", "20"]),
    "a corrupt one is written again": ([], [10], {"keep": 2}, 5, (10,), ["10", "10.corrupt", "5"]),
    "one that was not read is looked at": ([], [10], {"keep": 2}, None, (10,), ["10", "10.corrupt", "5"]),
    "a corrupt one takes no whole one's place": ([], [10], {"keep": 2}, 5, (15,), ["10.corrupt", "15", "5"]),
    "nine digits come after eight": ([], [], {"keep": 1}, 10, (99_999_999, 100_000_000), ["100000000"]),
    "the job starts over": ([5], [10], START_OVER, 0, (5, 10, 15), ["10.corrupt", "15", "5.unreadable"]),
}


@pytest.mark.parametrize(
    ("hidden", "damaged", "how", "newest", "steps", "left"), RESUMED.values(), ids=RESUMED
)
def test_a_job_that_resumes_keeps_what_it_must(store, hidden, damaged, how, newest, steps, left):
    """Of two checkpoints, and those written then; ``keep`` counts what this run has verified or written."""
    make, layers, folder = saved(store, 5, 10)
    for step in hidden:
        hide(folder, step)
    for step in damaged:
        damage(folder, step)
    again = make(**how)
    if newest is not None:
        found = again.newest(ALONE)
        assert (found.step if found else 0) == newest
    for step in steps:
        save(again, layers, step)
    assert names(folder) == left


def test_a_whole_checkpoint_of_the_step_is_left_alone(store):
    """Saving a step twice writes once."""
    make, layers, folder = store
    save(make(), layers, 5)
    written = {path.name: path.stat().st_mtime_ns for path in (folder / "step-00000005").iterdir()}
    save(make(), layers, 5)
    assert {path.name: path.stat().st_mtime_ns for path in (folder / "step-00000005").iterdir()} == written


def test_what_fails_on_the_way_leaves_the_checkpoints_as_they_were(store, monkeypatch):
    """A writer that dies half-way leaves nothing under a final name; the next one clears up after it."""
    make, layers, folder = store
    save(make(), layers, 5)

    def fails(path, text):
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("ballast_trainer.checkpoints.folder.write_durably", fails)
        with pytest.raises(CheckpointNotWritten, match="no space"):
            save(make(), layers, 10)
    assert names(folder) == ["5"]
    assert make().newest(ALONE).step == 5
    save(make(), layers, 10)
    assert names(folder) == ["10", "5"]
    assert not list(folder.glob(".*"))


def test_a_note_that_cannot_be_written_stays_as_it_was(tmp_path, monkeypatch):
    """As that of an early end: without the newest one a launch that follows trains on from an older one."""

    def full(handle):
        raise OSError(errno.ENOSPC, "no space left")

    write_durably(tmp_path / "note", "first")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_durably(tmp_path / "note", "second")
    assert (tmp_path / "note").read_text() == "first"


def test_of_checkpoints_that_have_vanished_the_newest_one_before_counts(store):
    """What a job that cannot save is told to have."""
    make, _, folder = saved(store, 5, 10, 15)
    shutil.rmtree(step_folder(folder, 10))
    assert [make().newest_left(ALONE, step) for step in (None, 15, 10)] == [None, 15, 5]
    shutil.rmtree(folder)
    assert make().newest_left(ALONE, 15) is None
