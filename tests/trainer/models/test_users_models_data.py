"""Users' datasets, loaders and batch functions: any step's batch, in an order that the seed fixes."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy
import pytest
import torch
from ballast_policies.contract.job.model import ColumnsConfig, DataConfig
from ballast_trainer.causes import describe
from ballast_trainer.data.collate import BatchForm
from ballast_trainer.data.read_ahead import ReadAhead
from ballast_trainer.data.sources import ReplayedLoader, ShuffledDataset, batches_from, read_batch
from ballast_trainer.errors import ConfigurationError, DataError
from ballast_trainer.launch import ValidatedJob
from ballast_trainer.loop.batches import Batches
from ballast_trainer.models.protocol import Model
from ballast_trainer.models.registry import batch_form, data_source
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

from tests.support.jobs import small_job
from tests.support.one_process import train_here
from tests.support.waiting import eventually

USERS = "tests.trainer.models.users_module"
REGRESSION = f"{USERS}:regression"


@given(length=st.integers(1, 50), size=st.integers(1, 20), seed=st.integers(0, 9), epochs=st.integers(1, 4))
def test_a_dataset_is_seen_whole_in_every_epoch(length, size, seed, epochs):
    """Epochs laid end to end: each sample once in each, in another order; any step can be asked first."""
    dataset = ShuffledDataset(list(zip(torch.arange(length), torch.arange(length), strict=True)))
    steps = -(-epochs * length // size)
    order = [index for step in range(steps) for index in dataset.indices(seed, step, size)]
    for epoch in range(epochs):
        assert sorted(order[epoch * length : (epoch + 1) * length]) == list(range(length))
    again = ShuffledDataset(list(zip(torch.arange(length), torch.arange(length), strict=True)))
    inputs, targets = again(seed, steps - 1, size)
    assert inputs.tolist() == targets.tolist() == order[(steps - 1) * size : steps * size]


def shuffled_loader(size=4, length=10):
    numbers = torch.arange(length)
    return DataLoader(TensorDataset(numbers, numbers), batch_size=size, shuffle=True, drop_last=True)


def test_a_loader_is_replayed_to_any_step():
    """A shuffling loader gives a step the same batch, read in order, again, or from the middle."""
    reader = ReplayedLoader(shuffled_loader())
    order = [reader(7, step, 4)[0].tolist() for step in range(9)]
    assert len({tuple(batch) for batch in order}) > 2
    assert [reader(7, step, 4)[0].tolist() for step in (3, 3, 0, 8)] == [order[i] for i in (3, 3, 0, 8)]
    assert ReplayedLoader(shuffled_loader())(7, 5, 4)[0].tolist() == order[5]
    assert ReplayedLoader(shuffled_loader())(8, 5, 4)[0].tolist() != order[5]


def test_a_loader_is_not_read_again_for_a_step_just_gone():
    """The ends of a pipeline may be some steps apart; only going far back starts over."""

    class Counting:
        begun = 0

        def __iter__(self):
            self.begun += 1
            return iter(shuffled_loader(length=400))

    source = Counting()
    reader = ReplayedLoader(source)
    order = {step: reader(7, step, 4)[0].tolist() for step in (3, 4, 5)}
    assert {step: reader(7, step, 4)[0].tolist() for step in (4, 3, 5)} == order
    assert source.begun == 1
    assert reader(7, 0, 4)[0].tolist() not in order.values()
    assert source.begun == 2


class Box(NamedTuple):
    """A part of every image."""

    left: int
    top: int
    right: int
    bottom: int


class Growing:
    """A dataset to which another process adds samples."""

    length = 3

    def __len__(self):
        self.length += 1
        return self.length

    def __getitem__(self, index):
        return torch.tensor(index), torch.tensor(index)


def test_epochs_of_a_dataset_that_grows_stay_as_long_as_the_first():
    """Or a step's samples would depend on how often the length was asked for."""
    dataset = ShuffledDataset(Growing())
    order = [index for step in range(6) for index in dataset.indices(0, step, 2)]
    assert [sorted(order[at : at + 4]) for at in (0, 4, 8)] == [[0, 1, 2, 3]] * 3


class Unsized:
    def __init__(self, error):
        self.error = error

    def __len__(self):
        raise self.error

    def __getitem__(self, index):
        raise AssertionError("never asked")

    def __iter__(self):
        return iter(())


class Once:
    """A loader that is at its end when it is read a second time."""

    def __init__(self):
        self.left = [(torch.zeros(4), torch.zeros(4))] * 3

    def __iter__(self):
        while self.left:
            yield self.left.pop()


def test_a_loader_that_cannot_be_read_again_tells_after_how_many_batches_it_has_ended():
    reader = ReplayedLoader(Once())
    with pytest.raises(ConfigurationError, match=r"ended after 3 batches.*To fix: .*__iter__"):
        [reader(0, step, 4) for step in range(5)]


class Torn:
    """Sample 2 is on a block that the disk has lost."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 2:
            raise OSError(5, "Input/output error", "/data/shard-3")
        return torch.tensor(index), torch.tensor(index)


def stops(seed, step, size):
    raise StopIteration


def leaves(seed, step, size):
    raise SystemExit(0)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (Torn(), r"OSError: .*/data/shard-3.* \(test_users_models_data.py, line \d+, sample 2\)"),
        (stops, r"StopIteration \(test_users_models_data.py"),
        (leaves, r"SystemExit: 0 \(test_users_models_data.py"),
    ],
)
def test_data_that_fails_names_its_field_value_batch_and_place(source, words):
    """Whatever the user's code raises, an end of the process too."""
    with pytest.raises(DataError, match=rf"data.name: 'mine:data' does not give step 7: {words}.*To fix: "):
        read_batch(batches_from(source), 0, 6, 4, field="data.name", name="mine:data", what="step 7")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"inputs": 64}, r"IndexError.*layer 0, .*given inputs int64 \[4, 8\] from \d+ to 64\)"),
        ({"targets": 64}, r"IndexError.*given outputs .* and targets int64 \[4, 8\] from \d+ to 64\)"),
        ({"length": 9}, r"layer 0, .*given inputs int64 \[4, 9\] from \d+ to \d+\)"),
    ],
)
def test_samples_that_the_model_cannot_take_are_told_with_their_range(changes, words):
    """A vocabulary or a context that is too small, found in a later step."""
    args = {"step": 2, "vocabulary": 64, "length": 8, **changes}
    module = "tests.trainer.models.small_vocabulary"
    data = {"name": f"{module}:batches", "args": args}
    config = small_job(f"{module}:build", data=data, steps=4, microbatches=1)
    with pytest.raises(Exception) as caught:
        train_here(config)
    assert re.search(words + r"\. To fix: data.name and model.args", describe(caught.value))


class Endless(torch.utils.data.IterableDataset):
    def __init__(self, samples=()):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


ROWS = [
    {"text": "a", "input_ids": [n] * (n + 1), "labels": [n] * (n + 1), "score": float(n)} for n in range(4)
]
TOKENS = ColumnsConfig(inputs="input_ids", targets="labels")


def test_an_iterable_dataset_is_cut_into_batches_in_its_own_order():
    """Again in the next epoch; what does not fill a batch is left out."""
    samples = Endless([(torch.tensor(n), torch.tensor(n)) for n in range(5)])
    batch = batches_from(samples)
    assert [batch(0, step, 2)[0].tolist() for step in range(4)] == [[0, 1], [2, 3], [0, 1], [2, 3]]


@pytest.mark.parametrize("source", [ROWS, Endless(ROWS)])
def test_rows_are_read_by_their_columns_and_padded_to_the_longest_of_a_batch(source):
    """As Hugging Face datasets have them: inputs by 0, targets by -100, to a multiple."""
    form = BatchForm(columns=TOKENS, multiple=3)
    inputs, targets = batches_from(source, form)(0, 0, 4)
    assert inputs.shape == targets.shape == (4, 6)
    found = {
        int(row[0]): (row.tolist(), labels.tolist()) for row, labels in zip(inputs, targets, strict=True)
    }
    assert found[1] == ([1, 1, 0, 0, 0, 0], [1, 1, -100, -100, -100, -100])
    assert found[3] == ([3, 3, 3, 3, 0, 0], [3, 3, 3, 3, -100, -100])
    heights = [(torch.ones(length), torch.ones(length)) for length in (1, 2)]
    inputs, targets = BatchForm(multiple=1).of_samples(heights)
    assert (inputs.tolist(), targets.tolist()) == ([[1, 0], [1, 1]], [[1, -100], [1, 1]])


def test_labels_that_transformers_would_shift_are_refused_for_a_model_that_predicts_the_next_token():
    """They would teach it to repeat its input. A text of one token alone is both."""
    rows = [{"input_ids": [n, 5, 6], "labels": [-100, 5, 6], "score": [5, 6, -100]} for n in range(4)]
    form = BatchForm(columns=TOKENS, next_tokens=True)
    with pytest.raises(ConfigurationError, match=r"own tokens.*To fix: ") as caught:
        batches_from(rows, form)(0, 0, 4)
    assert caught.value.field == "data.name"
    columns = ColumnsConfig(inputs="input_ids", targets="score")
    for source, taken in (
        (rows, BatchForm(columns=columns, next_tokens=True)),
        (rows, BatchForm(columns=TOKENS)),
        ([{"input_ids": [4, 4], "labels": [4, 4]}] * 4, BatchForm(columns=TOKENS, next_tokens=True)),
    ):
        assert len(batches_from(source, taken)(0, 0, 4)) == 2


def test_a_collate_function_makes_the_batch_and_columns_may_choose_from_it():
    """As collators of transformers do, which return dicts."""

    def collate(rows):
        numbers = torch.tensor([row["score"] for row in rows])
        return {"input_ids": numbers, "labels": -numbers, "rest": rows}

    inputs, targets = batches_from(ROWS, BatchForm(columns=TOKENS, collate=collate))(0, 0, 4)
    assert sorted(inputs.tolist()) == [0, 1, 2, 3] and torch.equal(targets, -inputs)


@pytest.mark.parametrize(
    ("source", "form", "field", "words"),
    [
        (ROWS, BatchForm(), "data.columns", "missing, .*rows of text, input_ids, labels, score.*To fix: "),
        (
            ROWS,
            BatchForm(columns=ColumnsConfig(inputs="input_ids", targets="label")),
            "data.columns.targets",
            "'label' is not among text, ",
        ),
        (
            ROWS,
            BatchForm(columns=ColumnsConfig(inputs="text", targets="labels")),
            "data.columns",
            "str is no tensor .*To fix: data.collate",
        ),
        (
            ROWS,
            BatchForm(columns=TOKENS),
            "data.name",
            r"shapes \(1,\), \(2,\).*To fix: data.padToMultipleOf",
        ),
        (shuffled_loader(), BatchForm(multiple=2), "data.padToMultipleOf", "whole batches.*collate_fn"),
        (lambda seed, step, size: 1, BatchForm(collate=list), "data.collate", "whole batches"),
    ],
)
def test_rows_that_make_no_batch_are_refused_with_the_field(source, form, field, words):
    with pytest.raises(ConfigurationError, match=words) as caught:
        batches_from(source, form)(0, 0, 4)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (Endless(), "yields no batch"),
        (iter([1, 2]), "can be read twice"),
        ({"inputs": 1}, "is no batch function"),
        ([], "has no sample"),
        (Unsized(RuntimeError("not built")), "len.. of the Unsized fails: RuntimeError: not built"),
        (DataLoader(TensorDataset(torch.arange(3), torch.arange(3)), batch_size=2), "drop_last=True"),
        (DataLoader(TensorDataset(torch.arange(0), torch.arange(0)), batch_size=1), "yields no batch"),
        (DataLoader(TensorDataset(torch.arange(8)), batch_size=4), "pair of inputs and targets"),
        (lambda seed, step, size: (1, 2), "not a tensor"),
        (lambda seed, step, size: torch.zeros(3), "not a pair"),
        (
            lambda seed, step, size: ({"x": torch.zeros(4, 2), "id": list("abcd")}, torch.zeros(4)),
            "a list of 4 values, one a sample.*To fix: a tensor",
        ),
    ],
)
def test_unusable_data_is_refused_with_the_reason(source, words):
    """With the field, what it gave and what to do."""
    with pytest.raises(ConfigurationError, match=words) as caught:
        batches_from(source)(0, 0, 4)
    assert caught.value.field == "data.name"


@pytest.mark.parametrize(
    ("beside", "microbatches"),
    [
        ([None] * 4, 2),
        ((2, 2, 2, 2), 2),
        (Box(0, 0, 8, 6), 2),
        ({"left": 0, "top": 0, "right": 8, "bottom": 6}, 2),
        (list("abc"), 2),
        ([torch.zeros(4), torch.ones(4), "a", "b"], 2),
        (list("abcd"), 1),
    ],
)
def test_no_value_that_is_of_all_samples_is_refused(beside, microbatches):
    """As many as samples, by chance; or the one microbatch has all samples."""
    model = Model.from_layers([torch.nn.Identity()], loss=torch.nn.functional.mse_loss)
    form = batch_form(DataConfig(name="mine:data"), model, microbatches)
    source = batches_from(lambda seed, step, size: ((torch.zeros(4, 2), beside), torch.zeros(4)), form)
    assert source(0, 0, 4)[0][1] is beside


@pytest.fixture
def ahead():
    """Readers of a batch function by two workers, ended with their test."""
    made = []

    def reader(batch, size=4):
        def read(step):
            return read_batch(
                batches_from(batch), 7, step, size, field="data.name", name="mine:data", what=f"batch {step}"
            )

        made.append(ReadAhead(read, workers=2, last_step=12, pinned=False))
        return made[-1]

    yield reader
    for one in made:
        one.close()


@pytest.mark.slow
def test_any_step_can_be_read_ahead_and_none_disturbs_the_numbers_of_training(ahead):
    """In order, again, back, and from the middle; torch's generator stays as it was."""
    dataset = list(zip(torch.arange(30), torch.arange(30), strict=True))
    expected = [ShuffledDataset(dataset)(7, step, 4)[0].tolist() for step in range(12)]
    before = torch.get_rng_state()
    reader = ahead(dataset)
    assert [reader.batch(step)[0][0].tolist() for step in range(12)] == expected
    assert [reader.batch(step)[0][0].tolist() for step in (11, 9, 2, 3, 7)] == [
        expected[step] for step in (11, 9, 2, 3, 7)
    ]
    assert torch.equal(torch.get_rng_state(), before)


class Failing:
    def __len__(self):
        return 30

    def __getitem__(self, index):
        raise KeyError(f"no file for {index}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "data", [Failing(), lambda seed, step, size: (torch.zeros(size),) * 2 if step else (1, 2)]
)
def test_what_a_worker_cannot_read_is_told_as_without_it(ahead, data):
    """Broken samples, and what is no batch; each time, as a move may ask for it before the step does."""
    with pytest.raises((DataError, ConfigurationError)) as plain:
        read_batch(batches_from(data), 7, 0, 4, field="data.name", name="mine:data", what="batch 0")
    reader = ahead(data)
    for _ in range(2):
        with pytest.raises(type(plain.value)) as found:
            reader.batch(0)
        assert str(found.value) == str(plain.value)


@pytest.mark.slow
def test_a_worker_that_is_killed_ends_the_job_in_words(ahead):
    """As by the kernel when memory is short."""

    def read(seed, step, size):
        if step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((size, 1), step), torch.zeros(size)

    reader = ahead(read)
    with pytest.raises(DataError, match=r"has ended: .*To fix: more memory, fewer workers"):
        for step in range(4):
            reader.batch(step)


class Unsent:
    """As a tensor that shared memory has no room for, or an object that cannot be pickled."""

    def __init__(self, reason):
        self.reason = reason

    def __reduce__(self):
        raise RuntimeError(self.reason)


class Unsents(Dataset):
    def __init__(self, reason):
        self.reason = reason

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return Unsent(self.reason), torch.zeros(4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("unable to allocate shared memory(shm) for file </x>", r"/dev/shm .*MiB.* To fix: a larger one"),
        ("cannot pickle this", "cannot pickle this"),
    ],
)
def test_what_a_worker_cannot_send_ends_the_job(reason, told):
    """The rank would wait for ever; a small /dev/shm is named with its remedy, not the data."""
    batch = torch.zeros(4), torch.zeros(4)
    ahead = ReadAhead(lambda _: batch, workers=1, last_step=2, pinned=False, told=lambda: Unsent(reason))
    with pytest.raises(DataError, match=told):
        ahead.batch(0)
    loader = batches_from(DataLoader(Unsents(reason), batch_size=None, num_workers=1))
    with pytest.raises(DataError, match=told):
        read_batch(loader, 7, 0, 4, field="data.name", name="mine:data", what="batch 0")


@pytest.mark.slow
@pytest.mark.processes
def test_processes_of_a_loader_end_with_their_rank(tmp_path):
    """A killed rank tells them nothing; a server of forks would live as long as they do."""
    rank = subprocess.Popen([sys.executable, "-c", READS.format(folder=str(tmp_path))])
    found = lambda: [int(log.stem) for log in tmp_path.glob("*.log")]  # noqa: E731
    try:
        eventually(found, "a process of the loader reads", lambda: str(rank.poll()))
    finally:
        rank.kill()
        rank.wait()
    (process,) = found()
    eventually(lambda: not Path(f"/proc/{process}").exists(), "it ends", lambda: f"{process} lives")


READS = """
from ballast_trainer.data.sources import batches_from
from tests.trainer.models.users_module import Recorded
from torch.utils.data import DataLoader
import time
data = DataLoader(Recorded({folder!r}), batch_size=8, num_workers=1, multiprocessing_context="forkserver")
batches_from(data)(7, 0, 8)
time.sleep(600)
"""


class Flaky:
    """A dataset with some samples that cannot be read."""

    def __init__(self, bad, length=30):
        self.bad, self.length = bad, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index in self.bad:
            raise OSError(5, f"no block {index}")
        return torch.tensor([float(index)]), torch.tensor([float(index)])


def skipping(source, most=9, form=None):
    batch = batches_from(source, form)
    batch.bad.most = most
    return batch


def unread(bad, most=9):
    return skipping(Flaky(bad), most)


def uncollated(bad, most=9):
    def collate(samples):
        for index in (int(inputs) for inputs, _ in samples):
            if index in bad:
                raise OSError(5, f"no block {index}")
        return torch.utils.data.default_collate(samples)

    return skipping(Flaky({}), most, BatchForm(collate=collate))


@pytest.mark.parametrize("flaky", [unread, uncollated])
def test_a_bad_sample_is_replaced_alike_in_every_order_of_reading(flaky):
    """By another one, the same whether its rank met it before or was told; all others stay as they were."""
    plain, first = batches_from(Flaky({})), flaky({4, 7})
    order = [first(3, step, 5)[0].flatten().tolist() for step in range(12)]
    assert first.bad.known.keys() == {4, 7} and "no block" in first.bad.known[4]
    for step, found in enumerate(order):
        before = plain(3, step, 5)[0].flatten().tolist()
        assert [now for was, now in zip(before, found, strict=True) if was not in {4, 7}] == [
            was for was in before if was not in {4, 7}
        ]
        assert not {4, 7}.intersection(found)
        assert flaky({4, 7})(3, step, 5)[0].flatten().tolist() == found
    elsewhere = flaky({7})
    assert elsewhere.agree([first.told(), elsewhere.told()])
    assert [elsewhere(3, step, 5)[0].flatten().tolist() for step in range(12)] == order


@pytest.mark.parametrize("flaky", [unread, uncollated])
def test_more_bad_samples_than_stated_end_the_job(flaky):
    """With the newest one; those that other ranks met count."""
    batch = flaky({4, 7}, most=1)
    with pytest.raises(OSError, match="no block"):
        [batch(3, step, 5) for step in range(12)]
    with pytest.raises(DataError, match=r"skipBadSamples allows .1.: 2, the last 9: gone.*To fix: "):
        batch.agree([{9: "gone"}])
    with pytest.raises(OSError, match="no block"):
        flaky(set(range(30)), most=99)(3, 0, 5)


def test_an_error_of_a_whole_batch_leaves_no_sample_out():
    """As of a collator that gives lists; it ends the job with what it says."""

    def collate(samples):
        if len(samples) > 1:
            raise ValueError("lengths differ")
        return torch.utils.data.default_collate(samples)

    batch = skipping(Flaky({}), form=BatchForm(collate=collate))
    with pytest.raises(ValueError, match="lengths differ"):
        batch(3, 0, 5)
    assert not batch.bad.known


class Numbered:
    """An iterator that goes on after an error; each batch a number."""

    def __init__(self, bad, end):
        self.bad, self.end, self.at = bad, end, -1

    def __iter__(self):
        return Numbered(self.bad, self.end)

    def __next__(self):
        self.at += 1
        if self.at == self.end:
            raise StopIteration
        if self.at in self.bad:
            raise OSError(5, f"no shard {self.at}")
        return torch.tensor([self.at, self.at]), torch.tensor([0, 0])


class Loader(Numbered):
    """One that can be read twice."""

    __next__ = None


def test_a_loaders_bad_batch_is_left_out_on_all_ranks():
    """A rank that could read it drops it, too; then both are at the same place."""
    one, other = skipping(Loader({2}, 6)), skipping(Loader({}, 6))
    for reader in (one, other):
        assert [reader(0, step, 2)[0][0].item() for step in range(2)] == [0, 1]
    assert (one(0, 2, 2)[0][0].item(), other(0, 2, 2)[0][0].item()) == (3, 2)
    told = [one.told(), other.told()]
    assert [one.agree(told), other.agree(told)] == [True, True]
    told = [one.told(), other.told()]
    assert [one.agree(told), other.agree(told)] == [False, False]
    assert [(one(0, step, 2)[0][0].item(), other(0, step, 2)[0][0].item()) for step in (2, 3, 4)] == [
        (3, 3),
        (4, 4),
        (5, 5),
    ]


def test_samples_that_are_iterated_lose_the_whole_batch_of_a_bad_one():
    """So that ranks that could read it stay at the same place."""
    samples = [(torch.tensor(n), torch.tensor(n)) for n in range(8)]

    class Rows(torch.utils.data.IterableDataset):
        def __iter__(self):
            return Once()

    class Once:
        def __init__(self):
            self.left = list(samples)

        def __next__(self):
            if not self.left:
                raise StopIteration
            sample = self.left.pop(0)
            if sample[0] == 3:
                raise OSError("no row 3")
            return sample

    batch = skipping(Rows())
    assert [batch(0, step, 2)[0].tolist() for step in range(3)] == [[0, 1], [4, 5], [6, 7]]


def test_a_generator_that_has_raised_cannot_go_on_and_ends_the_job():
    """Its epoch would end there without a word."""

    class Broken(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield torch.tensor(0), torch.tensor(0)
            raise OSError("no row 1")

    with pytest.raises(OSError, match="no row 1"):
        skipping(Broken())(0, 0, 2)


class Texts:
    """603 samples of 1 to 90 numbers, whose lengths a column, an attribute or nothing tells."""

    def __init__(self, known):
        self._all = [1 + n * 37 % 90 for n in range(603)]
        self.column_names = ["length"] if known == "column" else []
        self.lengths = {"attribute": self._all, "some": self._all[:-1]}.get(known)

    def __len__(self):
        return len(self._all)

    def __getitem__(self, index):
        return self._all if index == "length" else (torch.full((self._all[index],), index), torch.tensor(0))


@pytest.mark.parametrize("known", ["column", "attribute"])
def test_samples_of_about_one_length_are_in_a_batch(known):
    """All of them once an epoch, in another order in each; little is padded."""

    def batches(**training):
        data = {"name": f"{__name__}:Texts", "args": {"known": known}, "padToMultipleOf": 1}
        config = small_job(REGRESSION, data=data, microbatches=3, batch=3, training=training)
        job = ValidatedJob.from_mapping(config)
        return [job.model.batch(0, step, 3)[0] for step in range(402)]

    grouped, drawn = batches(groupByLength=True), batches()
    epochs = [torch.cat([batch[:, 0] for batch in part]) for part in (grouped[:201], grouped[201:])]
    assert all(sorted(epoch.tolist()) == list(range(603)) for epoch in epochs)
    assert epochs[0].tolist() != epochs[1].tolist()
    widths = [batch.shape[1] for batch in grouped]
    # 201 batches of an epoch are sorted 50 at a time.
    assert widths[:50] == sorted(widths[:50], reverse=True) and widths[50] > widths[49]
    longest = sum(1 + n * 37 % 90 for n in range(603)) * 2 / 3
    assert sum(widths) < 1.05 * longest < 0.8 * sum(batch.shape[1] for batch in drawn)


LAUNCHES = {
    "other batches": [(3, True), (9, True), (3, True)],
    "sorted from now on": [(9, False), (9, True), (3, True)],
    "sorted no longer": [(3, True), (9, False), (3, False)],
}


@pytest.mark.parametrize("launches", LAUNCHES.values(), ids=LAUNCHES)
def test_an_epoch_sorted_by_length_goes_on_as_it_was_begun(launches, caplog):
    """Resumed within it with other batches it has each sample once, as the next one; else that is told."""
    position, found = "", []
    for (size, grouped), until in zip(launches, (54, 270, 1206), strict=True):
        data = {"name": f"{__name__}:Texts", "args": {"known": "column"}, "padToMultipleOf": 1}
        training = {"groupByLength": grouped}
        config = small_job(REGRESSION, data=data, microbatches=size, batch=size, training=training)
        job = ValidatedJob.from_mapping(config)
        batches, source = Batches(job.config, job.model, torch.device("cpu")), job.model.batch
        batches.continue_from(0, position)
        steps = range((until - len(found)) // size)
        found += [index for step in steps for index in source.indices(0, step, size)]
        position = batches.position(steps.stop)
    told = "groupByLength was true before step" in caplog.text
    assert told == (launches[0][1] and not launches[1][1])
    assert told or sorted(found[:603]) == list(range(603))
    assert sorted(found[603:]) == list(range(603))


@pytest.mark.parametrize(
    ("data", "training", "words"),
    [
        (
            {"name": f"{USERS}:loader", "args": {"size": 8}},
            {"dataloaderNumWorkers": 2},
            r"dataloaderNumWorkers: 2, .*To fix: 0, and num_workers",
        ),
        (None, {"skipBadSamples": 2}, r"skipBadSamples: 2, .*To fix: 0, or a dataset"),
        (
            None,
            {"groupByLength": True},
            r"groupByLength: the data have an order.*To fix: false, or a dataset",
        ),
        *(
            (
                {"name": f"{__name__}:Texts", "args": args},
                {"groupByLength": True},
                r"groupByLength: the Texts does not say how long each of its 603 samples.*To fix: a column",
            )
            for args in ({"known": "nothing"}, {"known": "some"})
        ),
    ],
    ids=["workers for a loader", "samples of a function", "order of a function", "no lengths", "too few"],
)
def test_data_that_cannot_be_read_so_are_refused(data, training, words):
    """A loader is read in its own order, by its own workers; a batch function chooses its samples."""
    model = {"name": "gpt", "layers": 4} if data is None else REGRESSION
    with pytest.raises(ConfigurationError, match=words):
        train_here(small_job(model, data=data, microbatches=4, batch=8, training=training))


def halves(*, second):
    """Half of the samples, drawn by torch and numpy: those to train on, or the others."""
    inputs = torch.randn(64, 16, generator=torch.Generator().manual_seed(5))
    targets = torch.from_numpy(numpy.random.permutation(64)).float()[:, None]
    return random_split(TensorDataset(inputs, targets), [0.5, 0.5])[second]


def test_what_the_data_s_function_draws_is_the_same_in_each_process():
    """A split at random: by ``training.seed``, so a restart trains on no sample that was held out."""
    first, second = ({"name": f"{__name__}:halves", "args": {"second": at}} for at in range(2))
    config = small_job(
        REGRESSION,
        data=first,
        evaluation={"everySteps": 4, "data": second},
        steps=4,
        microbatches=4,
        batch=8,
        training={"seed": 3},
    )
    found = []
    for process in range(2):
        torch.manual_seed(process)
        numpy.random.seed(process)
        told = train_here(config)
        found.append((told.losses, told.evaluations()))
    assert found[0] == found[1]
    trained, validated = (data_source(DataConfig(**data), seed=3)[:][0].tolist() for data in (first, second))
    assert not any(sample in validated for sample in trained)
