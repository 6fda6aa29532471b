"""Loaders that tell where they are: a job continues in its data without reading it again."""

import re
from types import SimpleNamespace

import pytest
import torch
from ballast_policies.contract.job.job import JobConfig
from ballast_trainer.data.collate import BatchForm
from ballast_trainer.data.sources import LoaderPosition, ReplayedLoader, batches_from
from ballast_trainer.errors import CheckpointError, ConfigurationError, TrainerError
from ballast_trainer.loop.batches import Batches
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SubsetRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.support.gang import assert_same_curve
from tests.support.jobs import small_job
from tests.support.one_process import train_here
from tests.trainer.models.users_module import Recorded

STEPS = 12


class Streamed(IterableDataset):
    """Samples in their order, with the place of the next one as state."""

    buffer_size = 4  # as a user may name something else

    def __init__(self, notes):
        self.numbers, self.at, self.start = Recorded(notes), 0, 0

    def __iter__(self):
        self.at, self.start = self.start, 0
        while self.at < len(self.numbers):
            self.at += 1
            yield self.numbers[self.at - 1]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.start = state["at"]


def a_job(folder, name, **args):
    (folder / "notes").mkdir(exist_ok=True)
    return small_job(
        "tests.trainer.models.users_module:regression",
        data={"name": f"{__name__}:{name}", "args": {"notes": str(folder / "notes"), **args}},
        steps=STEPS,
        microbatches=4,
        batch=8,
        training={"learningRate": 0.05},
    )


def read_by(folder):
    return [int(line) for log in sorted((folder / "notes").glob("*.log")) for line in log.read_text().split()]


@pytest.mark.processes
def test_another_number_of_ranks_continues_in_the_loader(gang, tmp_path, monkeypatch):
    """Three ranks save, two resume, each of which reads what is left alone."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    whole.mkdir(), resumed.mkdir()
    expected = train_here(a_job(whole, "Streamed")).losses
    saved = {"checkpoint": {"path": str(tmp_path / "saved")}}
    first = gang({**a_job(whole, "Streamed"), **saved, "totalSteps": 8}, ranks=3).succeeded()
    rest = gang(a_job(resumed, "Streamed") | saved, ranks=2).succeeded()
    found = first.losses() | rest.losses()
    assert_same_curve(found, expected)
    assert len(read_by(resumed)) == 2 * 4 * 8


def test_a_loader_goes_back_a_little_by_what_it_has_told_and_far_by_reading(tmp_path):
    """Another seed in between, as of an evaluation, does not make it read all again."""
    reader, source = ReplayedLoader(Streamed(tmp_path), BatchForm()), Streamed(tmp_path)
    order = [ReplayedLoader(source)(7, step, 8)[1].tolist() for step in range(9)]
    assert [reader(7, step, 8)[1].tolist() for step in range(9)] == order
    before = len(read_by_file(tmp_path))
    reader(8, 0, 8)
    assert reader(7, 8, 8)[1].tolist() == order[8]
    assert len(read_by_file(tmp_path)) - before == 16
    assert reader(7, 1, 8)[1].tolist() == order[1]


def shuffling(notes, kind):
    numbers, options = Recorded(notes), {"batch_size": 8, "shuffle": True, "drop_last": True}
    if kind is DataLoader:
        return kind(numbers, generator=torch.Generator().manual_seed(1), **options)
    return kind(numbers, **options)


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_the_order_of_a_loader_with_its_own_generator_is_that_of_seed_and_epoch(tmp_path, kind):
    """Epochs that it was read for in between, as by an evaluation, change none that follows."""
    order = [ReplayedLoader(shuffling(tmp_path, kind))(7, step, 8)[1].tolist() for step in range(12)]
    reader = ReplayedLoader(shuffling(tmp_path, kind))
    first = reader(8, 0, 8)[1].tolist()
    assert [reader(7, step, 8)[1].tolist() for step in range(12)] == order
    assert reader(8, 0, 8)[1].tolist() == first
    assert reader(7, 1, 8)[1].tolist() == order[1]


def test_a_sampler_is_told_the_epoch(tmp_path):
    """As by the loop of its user: each epoch has the order that the sampler has for it."""
    numbers = Recorded(tmp_path)
    sampler = DistributedSampler(numbers, num_replicas=1, rank=0)
    reader = ReplayedLoader(DataLoader(numbers, batch_size=8, sampler=sampler))
    for epoch in range(2):
        read = torch.cat([reader(7, 5 * epoch + step, 8)[0] for step in range(5)])
        sampler.set_epoch(epoch)
        assert torch.equal(read, numbers.inputs[list(sampler)])


class Stream(Streamed):
    """As one of Hugging Face: it begins where it was told to in each epoch that is the one of its state."""

    def __init__(self, notes):
        super().__init__(notes)
        self.epoch, self.told = 0, {}

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        self.start = self.told["at"] if self.told.get("epoch") == self.epoch else 0
        return super().__iter__()

    def state_dict(self):
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.told = state


def test_a_loader_of_a_stream_continues_and_begins_the_next_epoch_from_its_start(tmp_path):
    """The dataset of a loader is told the epoch, as the loader's user would tell it."""

    def opened():
        return ReplayedLoader(StatefulDataLoader(Stream(tmp_path), batch_size=8))

    whole, stopped, resumed = opened(), opened(), opened()
    order = [whole(7, step, 8)[1].tolist() for step in range(12)]
    for step in range(3):
        stopped(7, step, 8)
    position = stopped.position(7, 3)
    assert position is not None
    resumed.continue_from(7, position)
    assert [resumed(7, step, 8)[1].tolist() for step in range(3, 12)] == order[3:]


def read_by_file(folder):
    return [line for log in folder.glob("*.log") for line in log.read_text().split()]


class Odd(Streamed):
    state = None

    def state_dict(self):
        return {"at": self.state}

    def load_state_dict(self, state):
        raise KeyError("offset")


def test_a_state_that_cannot_be_saved_is_refused_in_words():
    """A checkpoint must not run code of others when it is read."""
    position = LoaderPosition(3, 0, {"file": re.compile("x")})
    with pytest.raises(ConfigurationError, match=r"state_dict.. of the loader cannot be saved.*To fix: "):
        position.to_text()
    kept = LoaderPosition(3, 1, {"at": 5, "seen": [torch.arange(3)]})
    again = LoaderPosition.from_text(3, kept.to_text())
    assert (again.step, again.epoch, again.state["at"]) == (3, 1, 5)
    assert torch.equal(again.state["seen"][0], torch.arange(3))


@pytest.mark.slow
def test_a_loader_that_refuses_a_state_ends_the_job_with_its_words(tmp_path):
    """Of another release of the user's module."""
    saved = {"checkpoint": {"path": str(tmp_path / "saved")}}
    train_here(a_job(tmp_path, "Streamed") | saved, stop_after=4)
    with pytest.raises(TrainerError, match=r"KeyError: 'offset' \(test_loaders_with_state.py, line \d+"):
        train_here(a_job(tmp_path, "Odd") | saved)


class Buffered(Streamed):
    """Of Hugging Face's form: samples pass through a buffer, and the state is that of what fills it."""

    def __init__(self, notes):
        super().__init__(notes)
        self._ex_iterable = SimpleNamespace(ex_iterable=SimpleNamespace(buffer_size=4))

    def __iter__(self):
        held = []
        for sample in super().__iter__():
            held.append(sample)
            if len(held) == 4:
                yield held.pop(1)
        yield from held


@pytest.mark.slow
def test_a_stream_whose_state_is_without_its_buffer_is_read_again(tmp_path, caplog):
    """Samples that wait in the buffer would be skipped; a warning says what that costs."""
    job = a_job(tmp_path, "Buffered")
    expected = train_here(job).losses
    saved = {"checkpoint": {"path": str(tmp_path / "saved")}}
    stopped = train_here(job | saved, stop_after=4).losses
    assert "read again from its first sample" in caplog.text
    assert stopped | train_here(job | saved).losses == expected


@pytest.mark.parametrize("name", ["Recorded", "loader"])
def test_a_batch_of_another_size_goes_on_after_the_last_sample(tmp_path, name, caplog):
    """Of a dataset no sample is left out or read twice; a loader, whose batches are its own, is told."""
    job = a_job(tmp_path, name) | {"totalSteps": 4, "checkpoint": {"path": str(tmp_path / "saved")}}
    train_here(job | {"totalSteps": 3})
    larger = {"pipeline": {"microbatches": 4, "globalBatchSize": 16}}
    if name == "loader":
        job["data"]["args"]["size"] = 16
    train_here(job | larger)
    if name == "Recorded":
        assert sorted(read_by(tmp_path)) == list(range(40))
    assert ("some samples come twice or never" in caplog.text) == (name == "loader")


@pytest.mark.parametrize("length", [40, 56])
def test_a_dataset_of_another_length_than_before_is_told(tmp_path, length, caplog):
    """Files were added between two launches, say: epochs are as long as it is now."""
    job = a_job(tmp_path, "Recorded") | {"checkpoint": {"path": str(tmp_path / "saved")}}
    train_here(job | {"totalSteps": 3})
    job["data"]["args"]["length"] = length
    train_here(job | {"totalSteps": 4})
    assert ("has 56 samples, and had 40 before step 4" in caplog.text) == (length == 56)


@pytest.mark.parametrize("samples", ['"24"', "-8", "2.5", "null"])
def test_a_checkpoint_with_no_number_of_samples_is_refused_in_words(tmp_path, samples):
    """Its manifest was changed by hand, say."""
    model = SimpleNamespace(batch=batches_from(Recorded(tmp_path)))
    batches = Batches(JobConfig.from_mapping(a_job(tmp_path, "Recorded")), model, torch.device("cpu"))
    with pytest.raises(CheckpointError, match=r"the checkpoint of step 3 notes .*To fix: "):
        batches.continue_from(3, f'{{"samples": {samples}}}')


@pytest.mark.parametrize("damaged", ["!", "cut", "AAAA", "other"])
def test_a_checkpoint_with_a_damaged_state_of_a_loader_is_refused_in_words(tmp_path, damaged):
    """Neither base64 nor torch tells which checkpoint that is, and what to do."""
    text = LoaderPosition(3, 1, {"at": 5}).to_text()
    other = LoaderPosition(3, None, {"at": 5}).to_text()
    position = {"!": f"!{text}", "cut": text[: len(text) // 8 * 4], "other": other}.get(damaged, damaged)
    model = SimpleNamespace(batch=batches_from(Streamed(tmp_path)))
    batches = Batches(JobConfig.from_mapping(a_job(tmp_path, "Streamed")), model, torch.device("cpu"))
    with pytest.raises(
        CheckpointError, match=r"the checkpoint of step 3 notes .*state of a loader.*To fix: "
    ):
        batches.continue_from(3, position)


def loader(notes, size=8):
    return DataLoader(Recorded(notes, length=9 * size), batch_size=size, drop_last=True)


def test_a_loader_with_a_smaller_last_batch_is_told_before_the_first_step(tmp_path, caplog):
    """The job would end with the first epoch, hours later."""
    batches_from(DataLoader(Recorded(tmp_path), batch_size=8))
    assert not caplog.text
    batches_from(DataLoader(Recorded(tmp_path), batch_size=16))
    assert "the last batch of an epoch has 8 samples, not 16" in caplog.text
    caplog.clear()
    batches_from(DataLoader(Recorded(tmp_path), batch_size=16, sampler=SubsetRandomSampler(range(32))))
    assert not caplog.text
