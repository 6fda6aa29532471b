"""Users' datasets, loaders and batch functions: any step's batch, in an order that the seed fixes."""

import pytest
import torch
from ballast_trainer.data.sources import ReplayedLoader, ShuffledDataset, batches_from
from ballast_trainer.errors import ConfigurationError
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset


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


def test_a_batch_function_is_used_as_it_is():
    """Its order is its own."""
    batches = batches_from(lambda seed, step, size: (torch.full((size,), step), torch.full((size,), seed)))
    inputs, targets = batches(3, 9, 2)
    assert (inputs.tolist(), targets.tolist()) == ([9, 9], [3, 3])


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([])


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (Endless(), "yields samples"),
        (iter([1, 2]), "can be read twice"),
        ({"inputs": 1}, "is no batch function"),
        ([], "has no sample"),
        (DataLoader(TensorDataset(torch.arange(3), torch.arange(3)), batch_size=2), "drop_last=True"),
        (DataLoader(TensorDataset(torch.arange(0), torch.arange(0)), batch_size=1), "yields no batch"),
        (DataLoader(TensorDataset(torch.arange(8)), batch_size=4), "pair of inputs and targets"),
        (lambda seed, step, size: (1, 2), "not a tensor"),
        (lambda seed, step, size: torch.zeros(3), "not a pair"),
    ],
)
def test_unusable_data_is_refused_with_the_reason(source, words):
    """With the field, what it gave and what to do."""
    with pytest.raises(ConfigurationError, match=words) as caught:
        batches_from(source)(0, 0, 4)
    assert caught.value.field == "data.name"
