"""Validation data: the same whole batches each time, in their own order; refusals before the first step."""

import pytest
import torch
from ballast_policies.contract.job.job import JobConfig
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.launch import ValidatedJob
from ballast_trainer.loop.validation_data import validation_data
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.support.jobs import small_job

MODEL = {"name": "gpt", "layers": 4}


class Stream(IterableDataset):
    """An endless one would do as well: it has no length."""

    def __iter__(self):
        return iter([(torch.tensor(n), torch.tensor(n)) for n in range(10)])


class Unsized(TensorDataset):
    """One whose length is not known yet."""

    def __len__(self):
        raise RuntimeError("the index is not built")


def numbers(kind="dataset", length=10, size=4, **settings):
    """Samples 0 to ``length`` - 1 in some form."""
    samples = TensorDataset(torch.arange(length), torch.arange(length))
    return {
        "dataset": lambda: samples,
        "loader": lambda: DataLoader(samples, batch_size=size, drop_last=True, **settings),
        "ragged": lambda: DataLoader(samples, batch_size=size),
        "stream": lambda: DataLoader(Stream(), batch_size=size, drop_last=True),
        "samples": Stream,
        "function": lambda: lambda seed, number, size: (torch.full((size,), number), torch.rand(size)),
        "unsized": lambda: Unsized(torch.arange(length)),
        "nothing": lambda: 7,
    }[kind]()


def data_of(batches=None, **args):
    evaluation = {"data": {"name": f"{__name__}:numbers", "args": args}}
    if batches is not None:
        evaluation["batches"] = batches
    return ValidatedJob.from_mapping(small_job(MODEL, evaluation=evaluation)).validation


def read(data):
    return [data.batch(data.seed, number, 4)[0].tolist() for number in range(data.count)]


@pytest.mark.parametrize("kind", ["dataset", "loader", "ragged"])
def test_all_whole_batches_are_read_in_their_order(kind):
    """Where the data has a length, ``batches`` may be left out; what fills no batch is, each time."""
    data = data_of(kind=kind)
    assert read(data) == read(data) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("kind", ["dataset", "samples"])
def test_fewer_batches_may_be_asked_for(kind):
    """The first ones count; of samples that are iterated, whose number is not known, too."""
    assert read(data_of(1, kind=kind)) == [[0, 1, 2, 3]]


def test_a_loader_that_shuffles_is_the_same_in_every_evaluation():
    """Torch is seeded before it is read, and has its own numbers back afterwards."""
    data = data_of(kind="loader", length=40, shuffle=True)
    before = torch.get_rng_state()
    first = read(data)
    assert first == read(data) and first != sorted(first)
    assert torch.equal(before, torch.get_rng_state())


def test_a_function_is_seeded_by_the_batch():
    """One that draws from torch's generator gives the same batch again."""
    data = data_of(2, kind="function")
    again = [data.batch(data.seed, 1, 4)[1].tolist() for _ in range(2)]
    assert again[0] == again[1]
    assert read(data) == [[0] * 4, [1] * 4]


def test_a_stream_is_read_from_its_start_each_time():
    """As many batches as it was asked for, which it must have."""
    data = data_of(2, kind="stream")
    assert read(data) == read(data) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ConfigurationError, match=r"evaluation.batches: the loader .* yields 2. To fix"):
        data.batch(data.seed, 2, 4)


def test_the_model_s_own_data_is_drawn_by_another_seed():
    """So evaluations do not see the batches of the training."""
    config = small_job(MODEL, evaluation={"batches": 3})
    job = ValidatedJob.from_mapping(config)
    data = validation_data(JobConfig.from_mapping(config), job.model)
    assert (data.count, data.seed == job.config.training.seed) == (3, False)
    trained = job.model.batch(job.config.training.seed, 0, 4)[0]
    assert not torch.equal(data.batch(data.seed, 0, 4)[0], trained)


@pytest.mark.parametrize(
    ("batches", "args", "message"),
    [
        (3, {"kind": "dataset"}, "evaluation.batches: 3, and evaluation.data has 2 whole batches of 4"),
        (3, {"kind": "ragged"}, "evaluation.batches: 3, and evaluation.data has 2 whole batches of 4"),
        (None, {"kind": "dataset", "length": 3}, "evaluation.data.name: has no whole batch of 4 samples"),
        (None, {"kind": "function"}, "evaluation.batches: missing: evaluation.data has no length"),
        (None, {"kind": "stream"}, "evaluation.batches: missing"),
        (2, {"kind": "nothing"}, "evaluation.data.name: a int is no batch function"),
        (2, {"kind": "unsized"}, "evaluation.data.name: len() of the Unsized fails: RuntimeError: the index"),
        (2, {"length": "no"}, "evaluation.data.args: {'length': 'no'} do not fit"),
    ],
)
def test_data_that_cannot_be_used_is_refused(batches, args, message):
    """Before the first step, with the field, the value and what to do."""
    with pytest.raises(ConfigurationError) as caught:
        data_of(batches, **args)
    assert str(caught.value).startswith(message)
    assert "To fix" in str(caught.value)


def test_a_loader_of_other_batches_names_the_field():
    """Found as the first batch is read."""
    data = data_of(1, kind="loader", size=5)
    with pytest.raises(ConfigurationError, match=r"evaluation.data.name: .*globalBatchSize is 4"):
        read(data)
