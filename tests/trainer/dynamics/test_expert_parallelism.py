"""Experts shared by the replicas of a stage: tokens travel, and the loss curve is that of one process."""

import itertools

import pytest
import torch
from ballast_policies.contract.job.dynamics import ExpertsSettings
from ballast_trainer.distributed.mesh import Mesh
from ballast_trainer.dynamics.mixture_of_experts import (
    Experts,
    OwnExperts,
    SharedExperts,
    better_placement,
    first_placement,
    rank_loads,
)
from ballast_trainer.layers.running import CURRENT_FORWARD
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.examples import first_daily
from tests.trainer.tensor_parallel.ranks import on_ranks

EXPERTS = {"count": 5, "topK": 2, "everyBlocks": 1, "parallel": True}


def experts(**fields):
    return [{"kind": "mixtureOfExperts", "experts": {**EXPERTS, **fields}}]


@given(tokens=st.lists(st.integers(0, 1000), min_size=2, max_size=32), ranks=st.integers(1, 8))
def test_a_better_placement_is_better(tokens, ranks):
    """Never fuller than the one in force, every expert on a rank; and it stays once it is found."""
    before = first_placement(len(tokens), ranks)
    after = better_placement(before, tokens, ranks)
    fullest = [max(rank_loads(each, tokens, ranks)) for each in (before, after)]
    assert after == before or fullest[1] < fullest[0] * 0.95
    # The rank that becomes the fullest had at most the mean of what was placed before.
    mean, largest = sum(tokens) / ranks, max(tokens)
    assert fullest[1] <= (mean + largest * (1 - 1 / ranks)) / 0.95 + 1e-9
    assert better_placement(after, tokens, ranks) == after or fullest[1] > max(mean, largest)


@given(tokens=st.lists(st.integers(0, 100), min_size=2, max_size=6), ranks=st.integers(1, 3))
@example(tokens=[12, 17, 17, 18], ranks=3)
def test_the_largest_first_is_within_a_third_of_the_best_placement(tokens, ranks):
    """Graham 1969, theorem 2: 4/3 - 1/(3 ranks); and experts stay for gains below a twentieth."""
    after = better_placement(first_placement(len(tokens), ranks), tokens, ranks)
    every = itertools.product(range(ranks), repeat=len(tokens))
    best = min(max(rank_loads(placement, tokens, ranks)) for placement in every)
    bound = best * (4 / 3 - 1 / (3 * ranks)) / 0.95
    assert max(rank_loads(after, tokens, ranks)) <= bound + 1e-9


def test_one_full_expert_gets_a_rank_for_itself():
    """The others share the rest, and ranks keep what they have where it is as good."""
    assert better_placement((0, 1, 0, 1), [90, 10, 40, 40], 2) == (0, 1, 1, 1)
    assert better_placement((0, 1, 0, 1), [25, 25, 25, 25], 2) == (0, 1, 0, 1)


class FusedExperts(torch.nn.Module):
    """Two linear maps in one tensor, as transformers has them."""

    num_experts = 2

    def __init__(self):
        super().__init__()
        self.maps = torch.nn.Parameter(torch.randn(2, 4, 4))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        every = torch.einsum("nd,ekd->nek", hidden_states, self.maps)
        chosen = every.gather(1, top_k_index.unsqueeze(-1).expand(-1, -1, every.shape[-1]))
        return (chosen * top_k_weights.unsqueeze(-1)).sum(1)


def gradients_above_frozen_layers(world, kind, size):
    """Of the maps of two experts shared by ``size`` replicas, the last of which computes no rows."""
    torch.manual_seed(0)
    hidden = torch.randn(3, 6, 4)[world.data.index % 3]
    if kind == "own":
        part = FusedExperts()
        shared, weights = OwnExperts(part), [part.maps]
        arguments = (torch.zeros(6, 1, dtype=torch.int64), torch.ones(6, 1))
    else:
        part = shared = Experts(torch.nn.Linear(4, 4), 4, ExpertsSettings(count=2, top_k=1, parallel=True))
        weights, arguments = [one.weight for one in part.experts], ()
    if size > 1:
        shared.shared = SharedExperts.over(world.data, 2)
    CURRENT_FORWARD.set(0, 0)
    part(hidden, *arguments).square().sum().backward()
    return torch.stack([torch.zeros_like(one) if one.grad is None else one.grad for one in weights])


@pytest.mark.processes
@pytest.mark.parametrize(("kind", "size"), [("own", 2), ("copies", 3)])
def test_a_rank_without_rows_exchanges_gradients_above_frozen_layers(kind, size):
    """The inputs need no gradient there; the sum over the replicas is what they compute alone."""
    shared = on_ranks(gradients_above_frozen_layers, size, kind, size, mesh=Mesh(data=size))
    alone = on_ranks(gradients_above_frozen_layers, size, kind, 1, mesh=Mesh(data=size))
    assert torch.count_nonzero(shared[-1]) == 0
    torch.testing.assert_close(sum(shared), sum(alone))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("ranks", "data", "fields", "training"),
    first_daily(
        [
            (2, 2, {"balance": "loss"}, {"recompute": True}),
            (3, 3, {"balance": "none", "dropTokens": True, "capacityFactor": 1.0}, {}),
            # A step of Adam is as large for a gradient of rounding errors, and would change who goes where.
            (4, 2, {"balance": "bias", "balanceWeight": 0.05}, {"optimizer": "sgd", "learningRate": 0.05}),
        ],
        1,
    ),
    ids=["two replicas", "three replicas that drop tokens", "two stages of two replicas"],
)
def test_shared_experts_learn_as_one_process_does(
    gang, small_config, same_curve, ranks, data, fields, training
):
    """Tokens, results and gradients travel between the ranks; layers move, experts change places, and the
    loads are told by expert and by rank.
    """
    config = small_config(totalSteps=6, training=training)
    config["pipeline"] |= {"microbatches": 6, "globalBatchSize": 12}
    config["rebalance"] = {"everySteps": 3, "minGain": 0.0}
    alone = experts(**fields)
    alone[0]["experts"]["parallel"] = False
    running = gang({**config, "dynamics": experts(**fields), "parallelism": {"data": data}}, ranks=ranks)
    same_curve(running, {**config, "dynamics": alone})
    if ranks == data:
        return
    newest = running.events("tokenImbalance")[-1]
    for layer, loads in newest["rankLoads"].items():
        assert len(loads) == data and sum(loads) == 2 * sum(newest["loads"][layer])
        assert max(newest["placement"][layer]) < data
    assert sum(newest["placed"].values()) > 0
