"""What ranks agree on: the same floats on each of them, however many there are."""

import random

import pytest
import torch

from tests.support.examples import first_daily
from tests.trainer.tensor_parallel.ranks import on_ranks


def numbers_of(rank):
    """Of many magnitudes, so that the order of adding shows."""
    draw = random.Random(rank)
    return [draw.uniform(-1, 1) * 10.0 ** draw.randint(-8, 8) for _ in range(40)]


def several_sums(world):
    return torch.tensor([world.sum(numbers_of(world.rank)) for _ in range(3)], dtype=torch.float64)


@pytest.mark.processes
@pytest.mark.parametrize("ranks", first_daily([5, 2, 3, 8]))
def test_all_ranks_hold_the_same_sum_bit_for_bit(ranks):
    sums = on_ranks(several_sums, ranks)
    expected = torch.tensor([numbers_of(rank) for rank in range(ranks)], dtype=torch.float64).sum(0)
    for one in sums:
        assert torch.equal(one, sums[0])
    torch.testing.assert_close(sums[0], expected.expand(3, -1), rtol=1e-12, atol=1e-9)
