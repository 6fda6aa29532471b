"""Checkpoints that are written beside the steps: of their step's state, one at a time."""

import contextlib
import dataclasses
import logging
import mmap
import shutil
import threading
import types

import pytest
import torch
from ballast_policies.contract.messages import ExitReason, Report
from ballast_trainer.channel.base import DirectoryChannel
from ballast_trainer.checkpoints import tensors
from ballast_trainer.checkpoints.staging import BesideSteps, StagedCopy, Staging
from ballast_trainer.distributed.axis import Axis
from ballast_trainer.distributed.process_group import World
from ballast_trainer.errors import CheckpointError, CheckpointNotWritten
from ballast_trainer.loop import saving
from ballast_trainer.loop.saving import Saver
from ballast_trainer.loop.state import ModelState
from ballast_trainer.models.protocol import Model
from torch import nn

from tests.support.examples import first_daily
from tests.support.one_process import train_here
from tests.support.waiting import WAIT_SECONDS
from tests.trainer.checkpoints.test_checkpoint_folder import JOB, checkpoints_in, one_layer
from tests.trainer.layers.trained_layers import ALONE

OTHER_RUN = '{"token": "b", "run": "", "launch": 1, "host": "b", "machine": "b", "pid": 1, "started": "1"}'


def job(small_config, folder, **fields):
    """Seven steps, saved every two."""
    model = {"name": "gpt", "layers": 3, "args": {"dim": 16, "heads": 2, "context": 8, "dropout": 0.1}}
    return small_config(
        **{"totalSteps": 7, "model": model, "checkpoint": {"path": str(folder), "everySteps": 2}, **fields}
    )


class Held:
    """Writing of tensors that waits until a step is done, and may fail."""

    def __init__(self, monkeypatch, until=None, failures=0):
        self.began, self.go, self.done = (threading.Event() for _ in range(3))
        self._save, self._until, self._failures = tensors.save, until, failures
        if until is None:
            self.go.set()
        monkeypatch.setattr(tensors, "save", self.save)

    def save(self, *arguments):
        self.began.set()
        assert self.go.wait(WAIT_SECONDS)
        if self._failures:
            self._failures -= 1
            return "No space left on device"
        try:
            return self._save(*arguments)
        finally:
            self.done.set()

    def callback(self, monkeypatch, also=lambda: None):
        """A callback of the job that lets the writing go on after the step."""

        def told(event, step, values):
            if (event, step) == ("step", self._until):
                also()
                self.go.set()

        monkeypatch.setattr(f"{__name__}.TOLD", told, raising=False)
        return {"name": f"{__name__}:calling"}


def calling(event, step, values):
    TOLD(event, step, values)  # noqa: F821 - set by the test


def saved_beside(checkpoints, layers):
    """A checkpoint that is written on a thread."""
    manifest = dataclasses.replace(JOB, step=5)

    def write(world, state):
        checkpoints.save(world, state, manifest)

    return BesideSteps(ALONE.device, "checkpoint").begin(ALONE, layers, write, at_once=False)


def saved_steps(told):
    return [event["step"] for event in told.events if event["event"] == "checkpoint"]


def test_what_is_saved_is_the_state_of_its_step(tmp_path, monkeypatch):
    """Weights and optimizer change while it is written; all of the checkpoint is of before."""
    layers, held = one_layer(), Held(monkeypatch, until=1)
    (layer,) = layers
    layer.module(torch.ones(4)).sum().backward()
    layer.optimizer.step()
    before = {name: value.clone() for name, value in layer.state().items()}
    state = tensors.stored(ALONE, layers)
    assert tensors.changed_by_optimizer(layers, state) == set(state)
    checkpoints = checkpoints_in(tmp_path)
    flight = saved_beside(checkpoints, layers)
    flight.copy.wait()
    layer.optimizer.step()
    held.go.set()
    flight.result.result(WAIT_SECONDS)
    again = one_layer()
    checkpoints.load(ALONE, again, checkpoints.newest(ALONE))
    assert before.keys() == again[0].state().keys()
    for name, value in again[0].state().items():
        assert torch.equal(value, before[name])
    assert not torch.equal(layer.module.weight, again[0].module.weight)


def test_memory_of_the_copies_is_used_again():
    """A checkpoint asks for none, but where a tensor has got another shape."""
    staging, state = Staging(ALONE.device), {"a": torch.ones(8), "b": torch.ones(8)}
    first = dict(staging.begin(state, later=()).tensors)
    second = staging.begin({"a": torch.zeros(8), "b": torch.zeros(4)}, later=()).tensors
    assert second["a"].data_ptr() == first["a"].data_ptr()
    assert second["a"].sum() == second["b"].sum() == 0 and second["b"].shape == (4,)


class FakeGpu:
    """Stands in for a GPU whose streams are one, and knows the host's pages that are locked for it.

    As CUDA, it locks whole pages, and none twice; it refuses three pages at once.
    """

    def __init__(self, monkeypatch):
        self.locked, self.unlocked, self.threads = {}, [], set()
        for name in ("device", "stream"):
            monkeypatch.setattr(torch.cuda, name, contextlib.nullcontext)
        for name in ("current_stream", "Stream", "cudart"):
            monkeypatch.setattr(torch.cuda, name, lambda: self)

    def cudaHostRegister(self, place, size, flags):  # noqa: N802 - CUDA's names
        self.threads.add(threading.current_thread())
        assert place % mmap.PAGESIZE == size % mmap.PAGESIZE == 0
        pages = set(range(place, place + size, mmap.PAGESIZE))
        assert pages.isdisjoint(page for held in self.locked.values() for page in held)
        if len(pages) == 3:
            return 2
        self.locked[place] = pages
        return 0

    def cudaHostUnregister(self, place):  # noqa: N802
        self.unlocked.append(self.locked.pop(place))

    def wait_stream(self, other):
        pass

    def record_event(self):
        return self

    def synchronize(self):
        pass

    wait_event = wait_stream


def test_a_checkpoint_does_not_wait_for_memory_to_be_locked(monkeypatch):
    """A thread locks what is missing before, once; without it, or too late, the one that writes does."""
    gpu, staging = FakeGpu(monkeypatch), Staging(torch.device("cuda"))
    state = {"a": torch.arange(8), "b": torch.ones(2, 3), "step": torch.tensor(2.0), "none": torch.ones(0)}
    staging.make_room(state)
    staging._making.join(WAIT_SECONDS)
    assert len(gpu.locked) == 3
    for later in (), state.keys():
        copy = staging.begin(state, later=later)
        copy.finish()
        assert all(torch.equal(copy.tensors[key], value) for key, value in state.items())
    assert len(gpu.locked) == 3 and threading.current_thread() not in gpu.threads and not gpu.unlocked
    # A layer has come in place of another, with a tensor of a new size; the system locks no more of these.
    size = 3 * mmap.PAGESIZE
    staging.begin({"c": torch.ones(8, dtype=torch.int64), "d": torch.ones(size, dtype=torch.bool)}, later=())
    del copy
    assert len(gpu.locked) == 1 and len(gpu.unlocked) == 2
    staging.lock()
    staging.lock()
    assert len(gpu.locked) == 1
    staging.begin({"e": torch.ones(2 * mmap.PAGESIZE, dtype=torch.bool)}, later=())
    staging.lock()
    assert [len(pages) for pages in gpu.locked.values()] == [2]


@pytest.mark.parametrize("waited", [True, False])
def test_a_gpu_may_still_copy_as_the_optimizer_step_begins(monkeypatch, waited):
    """Its stream waits for the copy, and Python does not: what is changed without that wait is told."""
    FakeGpu(monkeypatch)
    state = {"a": torch.ones(8)}
    copy = Staging(torch.device("cuda")).begin(state, later=state.keys())
    if waited:
        copy.wait()
    state["a"].zero_()
    with contextlib.nullcontext() if waited else pytest.raises(CheckpointNotWritten, match="a changed while"):
        copy.finish()
    copy.wait()
    assert torch.equal(copy.tensors["a"], torch.ones(8))


def test_a_checkpoint_in_the_middle_of_the_locking_goes_on_without_the_rest(monkeypatch):
    """It waits for one tensor's at most."""
    gpu, staging = FakeGpu(monkeypatch), Staging(torch.device("cuda"))
    began, go, register = threading.Event(), threading.Event(), gpu.cudaHostRegister

    def held(*arguments):
        began.set()
        assert go.wait(WAIT_SECONDS)
        return register(*arguments)

    monkeypatch.setattr(gpu, "cudaHostRegister", held)
    state = {str(number): torch.full((number,), number) for number in range(1, 9)}
    staging.make_room(state)
    assert began.wait(WAIT_SECONDS)
    staging._enough.set()
    go.set()
    copy = staging.begin(state, later=())
    assert len(gpu.locked) == 1 and torch.equal(copy.tensors["8"], state["8"])


@pytest.mark.slow
@pytest.mark.parametrize("sent", first_daily([[lambda: None], []]))
def test_memory_is_made_before_a_checkpoint_is_due(small_config, tmp_path, monkeypatch, sent):
    """Once optimizers have their state; on a CPU nothing is looked at for it.

    Weights that are tied are ``sent`` to other stages after each step.
    """
    monkeypatch.setattr(ModelState, "send_tied_weights", lambda model: model.layers.under_way.extend(sent))
    asked, real, step_done = [], BesideSteps.make_room, []

    def make_room(beside, world, layers):
        with monkeypatch.context() as patched:
            patched.setattr(tensors, "stored", lambda *_: pytest.fail("the state is looked at"))
            real(beside, world, layers)
        asked.append((len(step_done), all(layer.optimizer.state for layer in layers)))

    monkeypatch.setattr(BesideSteps, "make_room", make_room)
    monkeypatch.setattr(f"{__name__}.TOLD", lambda event, *_: step_done.append(event), raising=False)
    train_here(job(small_config, tmp_path, totalSteps=3, callback={"name": f"{__name__}:calling"}))
    assert asked == [(1, True)]


def test_statistics_of_the_forward_are_copied_at_once(tmp_path):
    """They change before the optimizer step, as frozen weights may; trained weights do not."""
    layers = one_layer()
    layers[0].module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    layers[0].module[0].bias.requires_grad_(False)
    state = tensors.stored(ALONE, layers)
    later = {key.rpartition("module.")[2] for key in tensors.changed_by_optimizer(layers, state)}
    assert later == {"0.weight", "1.weight", "1.bias"}


def test_weights_that_change_in_the_middle_of_the_copying_are_not_saved(tmp_path, monkeypatch):
    """By a forward of the user's: that checkpoint fails with the tensor's name and what to do."""
    layers, finish = one_layer(), StagedCopy.finish

    def changed_before(copy):
        with torch.no_grad():
            layers[0].module.weight.add_(1)
        finish(copy)

    monkeypatch.setattr(StagedCopy, "finish", changed_before)
    flight = saved_beside(checkpoints_in(tmp_path), layers)
    with pytest.raises(CheckpointNotWritten, match=r"layers\.0\.module\.weight changed.*To fix"):
        flight.result.result(WAIT_SECONDS)
    assert list(tmp_path.glob("*step*")) == []


def test_replicas_share_the_writing():
    """Each tensor is written once, by ranks that have about as many bytes."""
    model = Model(layer_count=1, build_layer=lambda _: nn.Linear(64, 64), loss=nn.functional.mse_loss)
    layers = one_layer()
    layers[0].module = nn.Sequential(*(model.build_layer(0) for _ in range(6)))
    shares = [
        tensors.stored(
            World(
                epoch=1,
                rank=index,
                size=3,
                processes=("a", "b", "c"),
                device=ALONE.device,
                data=Axis(ranks=(0, 1, 2), index=index),
            ),
            layers,
        )
        for index in range(3)
    ]
    assert sum(map(len, shares)) == len(tensors.stored(ALONE, layers)) == len({k for s in shares for k in s})
    sizes = [sum(value.nbytes for value in share.values()) for share in shares]
    assert max(sizes) - min(sizes) <= 64 * 64 * 4


@pytest.mark.slow
def test_steps_go_on_while_a_checkpoint_is_written(small_config, tmp_path, monkeypatch, caplog):
    """The one that follows waits for it and says so once; all are told, and the curve is the same."""
    held, settle = Held(monkeypatch, until=4), Saver.settle

    def settled(saver):
        if saver._in_flight is not None:
            held.go.set()
        return settle(saver)

    monkeypatch.setattr(Saver, "settle", settled)
    config = job(small_config, tmp_path / "a")
    with caplog.at_level(logging.WARNING, "ballast_trainer.loop.saving"):
        told = train_here(config)
    assert saved_steps(told) == [2, 4, 6, 7]
    waits = [record.message for record in caplog.records if "still being written" in record.message]
    assert len(waits) == 1 and "step 4 waits for the checkpoint of step 2" in waits[0]
    plain = job(small_config, tmp_path / "b")
    plain["checkpoint"]["asyncMode"] = "disabled"
    assert train_here(plain).losses == told.losses
    # From either kind, the same steps follow.
    for folder, one in (("a", config), ("b", plain)):
        shutil.rmtree(tmp_path / folder / "step-00000007")
        again = train_here(one)
        assert again.losses == {7: told.losses[7]}


@pytest.mark.slow
def test_a_checkpoint_that_storage_refuses_is_told_and_tried_again(small_config, tmp_path, monkeypatch):
    """As where training waits for it: an event with the reason, training goes on."""
    Held(monkeypatch, failures=1)
    (channel := tmp_path / "channel").mkdir()
    told = train_here(job(small_config, tmp_path), channel=DirectoryChannel(channel))
    (failed,) = [event for event in told.events if event["event"] == "checkpointFailed"]
    assert failed["step"] == 2 and failed["newest"] is None
    assert "No space left on device" in failed["reason"] and "To fix" in failed["reason"]
    assert saved_steps(told)[-1] == 7
    assert (told.reason, sorted(told.losses)) == (ExitReason.FINISHED, list(range(1, 8)))
    assert not Report.from_json((channel / "report.json").read_text()).not_saved


@pytest.mark.slow
@pytest.mark.parametrize(("failures", "pauses"), [(2, [0.25, 0.5]), (99, [0.25, 0.5, 1.0, 2.0])])
def test_a_job_has_finished_once_its_last_state_is_saved(
    small_config, tmp_path, monkeypatch, failures, pauses
):
    """Where storage refuses it that is tried again, for ``retrySeconds``; then the job ends as failed."""
    slept = []
    monkeypatch.setattr(saving, "time", types.SimpleNamespace(sleep=slept.append))
    Held(monkeypatch, failures=failures)
    saved = {"path": str(tmp_path), "everySteps": 100, "retrySeconds": 3}
    config = job(small_config, tmp_path, checkpoint=saved)
    if failures > len(pauses):
        with pytest.raises(CheckpointNotWritten, match=r"the state is not saved, there is none: .*No space"):
            train_here(config)
    else:
        assert train_here(config).reason is ExitReason.FINISHED
    assert slept == pauses
    assert [path.name for path in tmp_path.glob("*step*")] == ["step-00000007"] * (failures < len(pauses) + 1)


@pytest.mark.slow
def test_a_stop_waits_for_the_checkpoint_that_is_written_and_saves_its_own(
    small_config, tmp_path, monkeypatch
):
    """SIGTERM in the middle of the writing: both are whole."""
    held = Held(monkeypatch, until=4)
    config = job(small_config, tmp_path, callback=held.callback(monkeypatch))
    told = train_here(config, stop_after=3)
    assert (told.reason, saved_steps(told)) == (ExitReason.STOPPED, [2, 4])
    assert {path.name for path in tmp_path.glob("*step*")} == {"step-00000002", "step-00000004"}
    assert sorted(train_here(config).losses) == [5, 6, 7]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "disabled"])
def test_a_stop_whose_state_is_not_saved_ends_as_such(small_config, tmp_path, monkeypatch, mode):
    """A mount that has become read-only: what is told, and counted, is the checkpoint of before."""
    held = Held(monkeypatch, until=3)
    held.go.set()

    def refuse():
        assert held.done.wait(WAIT_SECONDS)  # the checkpoint of step 2 is written beside step 3
        held._failures = 99

    refuses = held.callback(monkeypatch, also=refuse)
    config = job(small_config, tmp_path)
    config["checkpoint"]["asyncMode"] = mode
    (channel := tmp_path / "channel").mkdir()
    told = train_here(config | {"callback": refuses}, stop_after=5, channel=DirectoryChannel(channel))
    assert (told.reason, told.events[-1]["reason"]) == (ExitReason.STOPPED_UNSAVED,) * 2
    assert saved_steps(told) == [2]
    report = Report.from_json((channel / "report.json").read_text())
    assert report.not_saved.startswith("step 4 is not saved, the newest checkpoint is that of step 2: ")


@pytest.mark.slow
def test_an_error_of_the_job_does_not_cost_the_checkpoint_that_is_written(
    small_config, tmp_path, monkeypatch
):
    """The next launch starts from it."""

    def failing():
        threading.Timer(0.1, held.go.set).start()
        raise RuntimeError("a callback's")

    held = Held(monkeypatch, until=3)
    config = job(small_config, tmp_path, callback=held.callback(monkeypatch, also=failing))
    with pytest.raises(Exception, match="a callback's"):
        train_here(config)
    del config["callback"]
    assert min(train_here(config).losses) == 3


@pytest.mark.slow
def test_a_run_that_loses_its_folder_while_it_writes_puts_nothing_there(small_config, tmp_path, monkeypatch):
    """It ends when the writing is over, as where training waits for it."""
    held = Held(monkeypatch, until=3)
    taken = held.callback(monkeypatch, also=lambda: (tmp_path / ".lock").write_text(OTHER_RUN))
    with pytest.raises(CheckpointError, match="another run has taken over"):
        train_here(job(small_config, tmp_path, callback=taken))
    assert list(tmp_path.glob("*step*")) == []


@pytest.mark.slow
def test_no_checkpoint_is_begun_where_one_is_written_and_none_is_stated(small_config, tmp_path, monkeypatch):
    """An interval that the job has chosen gives way to storage that is slower: the next one comes later."""
    held, seen, real = Held(monkeypatch, until=1), [], Saver.wanted

    def wanted(self):
        found = real(self)
        seen.append((self._in_flight is not None, found))
        if len(seen) > 4:
            held.go.set()
        return found

    monkeypatch.setattr(Saver, "wanted", wanted)
    monkeypatch.setattr(Saver, "every_steps", lambda self: 2)
    config = job(small_config, tmp_path)
    config["checkpoint"] = {"path": str(tmp_path)}
    told = train_here(config)
    assert [found for in_flight, found in seen if in_flight][:3] == [False, False, False]
    assert saved_steps(told)[0] == 2
