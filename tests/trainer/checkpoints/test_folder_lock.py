"""One run a checkpoint folder: its lock is respected, passed on or taken over, on shared storage."""

import dataclasses
import json
import os
import shutil

import pytest
from ballast_trainer.checkpoints.folder_lock import LOCK, FolderLock, Owner
from ballast_trainer.errors import CheckpointError, CheckpointNotWritten

from tests.support.waiting import eventually
from tests.trainer.checkpoints.test_checkpoint_folder import checkpoints_in, one_layer, save
from tests.trainer.layers.trained_layers import ALONE

HERE = Owner.this_process(1, {})
ELSEWHERE = dataclasses.replace(HERE, host="other", machine="another machine", token="theirs")


class Time:
    """A clock that moves when someone sleeps, and what happens meanwhile."""

    def __init__(self, meanwhile=lambda now: None):
        self.now = 0.0
        self.meanwhile = meanwhile

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.meanwhile(self.now)


def held_by(folder, owner):
    (folder / LOCK).write_text(json.dumps(dataclasses.asdict(owner)))


def lock_of(folder, owner, time=None):
    time = time or Time()
    return FolderLock(folder, owner, sleep=time.sleep, clock=time)


def mine(**changes):
    return dataclasses.replace(HERE, token="mine", **changes)


def test_a_run_that_lives_on_another_machine_is_not_disturbed(tmp_path):
    """Its lock is touched while the other one watches, whatever their clocks say."""
    held_by(tmp_path, ELSEWHERE)
    time = Time(lambda now: os.utime(tmp_path / LOCK, (now, now)))
    with pytest.raises(CheckpointError, match=r"in use by another run: process \d+ on other"):
        lock_of(tmp_path, mine(), time).acquire()
    assert Owner.read(tmp_path / LOCK) == ELSEWHERE
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]


def test_a_run_that_lives_on_this_machine_is_refused_at_once(tmp_path):
    """Two runs started with one configuration: the second does not wait to find out."""
    held_by(tmp_path, HERE)
    time = Time()
    with pytest.raises(CheckpointError, match="in use by another run"):
        lock_of(tmp_path, mine(), time).acquire()
    assert time.now == 0


def test_a_lock_that_is_not_touched_any_more_is_taken_over(tmp_path, caplog):
    """Its machine is gone without a word."""
    held_by(tmp_path, ELSEWHERE)
    time = Time()
    lock = lock_of(tmp_path, mine(), time)
    lock.acquire()
    assert lock.held()
    assert "which did not touch it for 30 s" in caplog.text
    assert time.now >= 30
    lock.release()
    assert not list(tmp_path.iterdir())


def without_links(*_):
    raise PermissionError


@pytest.mark.parametrize("link", [os.link, without_links])
def test_a_lock_is_touched_while_it_is_held(tmp_path, monkeypatch, link):
    """Or another machine would take it over; on storage with and without hard links."""
    monkeypatch.setattr("ballast_trainer.checkpoints.folder_lock.TOUCH_SECONDS", 0.01)
    monkeypatch.setattr(os, "link", link)
    lock = lock_of(tmp_path, mine())
    lock.acquire()
    os.utime(tmp_path / LOCK, (0, 0))
    eventually(lambda: (tmp_path / LOCK).stat().st_mtime)
    assert Owner.read(tmp_path / LOCK) == mine()
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]
    lock.release()


def test_what_a_killed_process_has_left_of_its_lock_is_removed(tmp_path):
    """Not what one writes that lives, or may live on another machine."""
    ended = dataclasses.replace(HERE, token="ended", started="0")
    for owner in (ended, HERE, ELSEWHERE):
        (tmp_path / f"{LOCK}-{owner.token}").write_text(json.dumps(dataclasses.asdict(owner)))
    (tmp_path / f"{LOCK}-ended.new").write_text(json.dumps(dataclasses.asdict(ended)))
    lock = lock_of(tmp_path, mine())
    lock.acquire()
    lock.release()
    assert {path.name for path in tmp_path.iterdir()} == {f"{LOCK}-{one.token}" for one in (HERE, ELSEWHERE)}


def test_of_two_that_find_the_same_stale_lock_one_gets_it(tmp_path):
    """The other one sees the new owner's touch, and refuses."""
    held_by(tmp_path, ELSEWHERE)
    rival = dataclasses.replace(ELSEWHERE, token="rival", host="rival")

    def meanwhile(now):
        if now > 30:
            # Both have replaced the lock; the rival was last, and lives.
            held_by(tmp_path, rival)
            os.utime(tmp_path / LOCK, (now, now))

    with pytest.raises(CheckpointError, match="on rival"):
        lock_of(tmp_path, mine(), Time(meanwhile)).acquire()
    assert Owner.read(tmp_path / LOCK) == rival


JOB = {"run": Owner.this_process(1, {"BALLAST_NAMESPACE": "team", "BALLAST_JOB": "job"}).run}
PASSING = {
    "a process that is gone": (HERE, {"pid": 2**22 + 1}, {}, "which has ended"),
    "a process whose number belongs to another now": (HERE, {"started": "0"}, {}, "which has ended"),
    "a restarted pod": (ELSEWHERE, JOB | {"launch": 3}, JOB | {"launch": 3}, "on a node that was lost"),
    "the next launch": (ELSEWHERE, JOB | {"launch": 3}, JOB | {"launch": 4}, "on a node that was lost"),
}


@pytest.mark.parametrize(("holder", "theirs", "own", "words"), PASSING.values(), ids=PASSING)
def test_a_lock_whose_owner_is_known_to_be_gone_passes_at_once(tmp_path, caplog, holder, theirs, own, words):
    """On this machine by its process; of a job by its launch, whose pods the operator has ended or lost."""
    held_by(tmp_path, dataclasses.replace(holder, token="theirs", **theirs))
    time = Time()
    lock = lock_of(tmp_path, mine(**own), time)
    lock.acquire()
    assert lock.held()
    assert words in caplog.text
    assert time.now < 1
    lock.release()


@pytest.mark.parametrize(("run", "launch"), [("team/job", 3), ("team/other", 9)])
def test_neither_a_launch_that_is_over_nor_another_job_takes_the_lock(tmp_path, run, launch):
    """Its pods were cut off when the next launch began; launches of two jobs say nothing of each other."""
    held_by(tmp_path, dataclasses.replace(ELSEWHERE, **JOB, launch=4))
    time = Time(lambda now: os.utime(tmp_path / LOCK, (now, now)))
    with pytest.raises(CheckpointError, match="team/job, launch 4"):
        lock_of(tmp_path, mine(run=run, launch=launch), time).acquire()


def test_a_run_that_has_lost_its_lock_writes_no_checkpoint(tmp_path):
    """Stopped until another took over, it ends when it finds out, and leaves nothing."""
    checkpoints = checkpoints_in(tmp_path)
    checkpoints.open(ALONE)
    held_by(tmp_path, ELSEWHERE)
    with pytest.raises(CheckpointError, match="another run has taken over"):
        save(checkpoints, one_layer(), 5)
    checkpoints.close()
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]
    assert Owner.read(tmp_path / LOCK) == ELSEWHERE


def test_a_lock_that_cannot_be_read_counts_as_held(tmp_path):
    """Storage that fails for a moment does not end the job as another run in its folder would."""
    checkpoints = checkpoints_in(tmp_path)
    checkpoints.open(ALONE)
    (tmp_path / LOCK).unlink()
    (tmp_path / LOCK).mkdir()
    save(checkpoints, one_layer(), 5)
    checkpoints.close()
    assert (tmp_path / "step-00000005").exists()


LOST = {
    "the folder": (shutil.rmtree, "it was removed, with its checkpoints, and is made again", {10}),
    "its lock": (lambda folder: (folder / LOCK).unlink(), "its lock was removed", {5, 7, 10}),
}


@pytest.mark.parametrize(("remove", "told", "left"), LOST.values(), ids=LOST)
def test_what_was_removed_while_the_job_runs_is_made_again(tmp_path, caplog, remove, told, left):
    """The job, which has resumed, trains on and says so, rather than taking its own for another run's."""
    folder = tmp_path / "saved"
    for step in (5, 7):
        save(checkpoints_in(folder), one_layer(), step)
    (folder / "step-00000007/manifest.json").unlink()
    checkpoints = checkpoints_in(folder)
    checkpoints.open(ALONE)
    assert checkpoints.newest(ALONE).step == 5
    remove(folder)
    save(checkpoints, one_layer(), 10)
    assert f"saved: {told}" in caplog.text
    with pytest.raises(CheckpointError, match="in use by another run"):
        checkpoints_in(folder).open(ALONE)
    checkpoints.close()
    assert {path.name for path in folder.iterdir()} == {f"step-{step:08}" for step in left}


def test_a_folder_that_vanishes_during_a_checkpoint_costs_that_one_alone(tmp_path, monkeypatch):
    folder = tmp_path / "saved"
    checkpoints = checkpoints_in(folder)
    checkpoints.open(ALONE)
    with monkeypatch.context() as patched:
        patched.setattr("ballast_trainer.checkpoints.tensors.save", lambda *_: shutil.rmtree(folder))
        with pytest.raises(CheckpointNotWritten, match="To fix"):
            save(checkpoints, one_layer(), 5)
    save(checkpoints, one_layer(), 6)
    checkpoints.close()
    assert [path.name for path in folder.iterdir()] == ["step-00000006"]


def test_a_run_whose_folder_another_run_has_had_in_the_meantime_ends(tmp_path):
    """That one took the lock over, went further and gave it back."""
    slow = checkpoints_in(tmp_path)
    slow.open(ALONE)
    save(slow, one_layer(), 5)
    (tmp_path / LOCK).unlink()
    other = checkpoints_in(tmp_path)
    other.open(ALONE)
    save(other, one_layer(), 20)
    other.close()
    with pytest.raises(CheckpointError, match="another run has taken over"):
        save(slow, one_layer(), 10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000005", "step-00000020"]


def test_a_damaged_lock_is_taken_over_when_it_is_not_touched(tmp_path):
    """Cut short by a machine that died while it wrote."""
    (tmp_path / LOCK).write_text('{"token": ')
    lock = lock_of(tmp_path, mine())
    lock.acquire()
    assert lock.held()
    lock.release()
