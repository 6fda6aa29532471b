"""Early exit, mixture of depths, mixture of experts: what is computed is right, and follows the states."""

import math

import pytest
import torch
from ballast_policies.contract.job.dynamics import (
    Confidence,
    DepthsSettings,
    ExitsSettings,
    ExpertsSettings,
    LoadBalance,
)
from ballast_trainer.dynamics.early_exit import ExitingBlock
from ballast_trainer.dynamics.mixture_of_depths import RoutedBlock
from ballast_trainer.dynamics.mixture_of_experts import Experts
from ballast_trainer.models.gpt import Block, Mlp
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from tests.support.examples import first_fast
from tests.trainer.distributed.waits import Waits

DIM, LENGTH = 32, 64


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def flops(module, inputs):
    """Multiply-adds of the matrix products in a forward and a backward, as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        module(inputs.requires_grad_()).sum().backward()
    return counter.get_total_flops()


def exiting(threshold, **settings):
    block = ExitingBlock(Block(DIM, 2, 0.0), ExitsSettings(threshold=threshold, **settings), hazard=0.0)
    block.strength = 1.0
    return block


def test_exactly_the_confident_positions_leave():
    """Those whose state the block turned by less than the threshold; the next block leaves them alone."""
    marked = functional.pad(torch.randn(3, LENGTH, DIM), (0, 1))
    first = exiting(0.99)
    states = Block.forward(first.block, marked[..., :-1])
    alike = functional.cosine_similarity(marked[..., :-1], states, dim=-1)
    threshold = float(alike.detach().flatten().median())
    first._settings = ExitsSettings(threshold=threshold)
    after = first(marked)
    assert torch.equal(after[..., -1] > 0, alike >= threshold)
    assert first.left == pytest.approx(0.5, abs=0.01)
    counts = after[..., -1].sum(1)
    assert len(set(counts.tolist())) > 1, "sequences differ in how many leave"
    second = exiting(1.0)
    later = second(after)
    out = after[..., -1] > 0
    assert torch.equal(later[out], after[out])
    # Each sequence's remaining positions attend among each other, however many its neighbours have.
    for row in range(3):
        alone = Block.forward(second.block, after[row : row + 1, ~out[row], :-1])
        torch.testing.assert_close(later[row, ~out[row], :-1], alone[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("target", [0.29, 0.58, 0.7])
def test_a_target_means_whole_positions(target):
    """As many pass a block by, or leave, as the target says of a sequence of 100."""
    hidden = torch.randn(2, 100, DIM)
    routed = RoutedBlock(Block(DIM, 2, 0.0), DepthsSettings())
    exits = ExitingBlock(Block(DIM, 2, 0.0), ExitsSettings(threshold=1e-9), hazard=1.0)
    routed.strength = exits.strength = target
    routed(hidden)
    exits(functional.pad(hidden, (0, 1)))
    assert 1 - float(routed.computed) == pytest.approx(target) == exits.left


def test_no_more_leave_than_the_target_allows():
    """And one position of each sequence always stays."""
    marked = functional.pad(torch.randn(2, LENGTH, DIM), (0, 1))
    block = exiting(1e-9)
    block.strength = 0.25
    assert block(marked)[..., -1].sum(1).tolist() == [LENGTH / 4] * 2
    block.strength = 1.0
    assert block(marked)[..., -1].sum(1).tolist() == [LENGTH - 1] * 2


def test_a_block_computes_less_the_more_have_left():
    """Real products disappear."""
    counts = []
    for share in (0.0, 0.5, 0.9):
        marked = functional.pad(torch.randn(2, LENGTH, DIM), (0, 1))
        marked[:, : int(share * LENGTH), -1] = 1
        counts.append(flops(exiting(1.0), marked))
    assert counts[0] > 1.8 * counts[1] > 5 * counts[2] > 0


@pytest.mark.slow
def test_a_head_learns_which_states_the_block_would_leave_as_they_are():
    """Its loss reaches it alone; after some steps it lets settled positions pass before the block runs."""
    block = exiting(0.8, confidence=Confidence.HEAD, saturation=0.9)
    with torch.no_grad():
        block.block.mlp.up.weight.mul_(3)
    optimizer = torch.optim.Adam(block.head.parameters(), lr=0.05)
    # States along one direction are long, so the block cannot turn them; the others are short.
    direction = torch.randn(DIM)
    shares = []
    for _ in range(60):
        states = torch.randn(4, LENGTH, DIM) * 0.1
        states[:, ::2] += 50 * direction
        marked = functional.pad(states, (0, 1))
        out = block(marked)
        out[..., :-1].sum().backward()
        assert block.head.weight.grad is None or torch.isfinite(block.head.weight.grad).all()
        optimizer.step()
        block.zero_grad()
        shares.append(block.left)
    assert shares[0] == 0
    last = block(marked)[..., -1]
    assert last[:, ::2].mean() > 0.95 and last[:, 1::2].mean() < 0.05


def test_sampled_exits_reach_every_layer():
    """About the configured share leaves at a layer drawn at random, without any confidence."""
    settings = ExitsSettings(threshold=1.0, sampled=0.5)
    block = ExitingBlock(Block(DIM, 2, 0.0), settings, hazard=0.5)
    block.strength = 1.0
    marked = functional.pad(torch.randn(8, LENGTH, DIM), (0, 1))
    assert 0.4 < float(block(marked)[..., -1].detach().mean()) < 0.6
    block.eval()
    assert float(block(marked)[..., -1].detach().sum()) == 0


def test_a_router_picks_its_best_positions():
    """The rest passes by unchanged, the router gets a gradient, and a GPU is not waited for."""
    block = RoutedBlock(Block(DIM, 2, 0.0), DepthsSettings())
    block.strength = 0.75
    hidden = torch.randn(2, LENGTH, DIM)
    with Waits() as waits:
        after = block(hidden)
    assert waits.found == []
    scores = block.router(hidden).squeeze(-1)
    best = scores.topk(LENGTH // 4, dim=1).indices
    picked = torch.zeros(2, LENGTH, dtype=torch.bool).scatter(1, best, True)
    assert torch.equal((after != hidden).any(-1), picked)
    after.sum().backward()
    assert block.router.weight.grad.abs().sum() > 0


@pytest.mark.slow
def test_the_predictor_learns_what_the_router_picks():
    """From a position alone; then evaluation needs no later positions, and is causal."""
    block = RoutedBlock(Block(DIM, 2, 0.0), DepthsSettings(predictor_weight=1.0))
    block.strength = 0.5
    optimizer = torch.optim.Adam(block.predictor.parameters(), lr=0.02)
    for _ in range(120):
        block(torch.randn(8, LENGTH, DIM)).sum().backward()
        optimizer.step()
        block.zero_grad()
    assert block.agreement > 0.85
    block.eval()
    hidden = torch.randn(1, LENGTH, DIM)
    other = hidden.clone()
    other[:, 50:] += 1.0
    torch.testing.assert_close(block(hidden)[:, :50], block(other)[:, :50])
    assert not torch.equal(block(hidden), hidden)
    with torch.no_grad():
        block.predictor.bias.fill_(-99.0)
    assert torch.equal(block(hidden), hidden) and block.computed == 0


def experts_of(**settings):
    return Experts(Mlp(DIM), DIM, ExpertsSettings(**settings))


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("drops", [False, True])
def test_experts_equal_one_position_at_a_time(top_k, drops):
    """Each position's experts by their gates; what is over the capacity, first choices first, is left out."""
    experts = experts_of(count=4, top_k=top_k, drop_tokens=drops, capacity_factor=0.75)
    with torch.no_grad():
        for one in experts.experts.values():
            one.up.weight.add_(torch.randn_like(one.up.weight) * 0.3)
        experts.router.weight[0] += 0.1
    hidden = torch.randn(2, 24, DIM)
    out = experts(hidden).view(-1, DIM)
    flat = hidden.view(-1, DIM)
    scores = torch.softmax(experts.router(flat), dim=-1)
    best = scores.topk(top_k, dim=-1)
    gates = best.values / best.values.sum(-1, keepdim=True) if top_k > 1 else best.values
    slots = math.ceil(0.75 * len(flat) * top_k / 4) if drops else len(flat)
    used, expected = [0] * 4, torch.zeros_like(flat)
    for choice in range(top_k):
        for position, x in enumerate(flat):
            chosen = int(best.indices[position, choice])
            used[chosen] += 1
            if used[chosen] <= slots:
                expected[position] += experts.experts[str(int(chosen))](x) * gates[position, choice]
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert experts.loads == used
    assert experts.dropped == pytest.approx(sum(max(0, n - slots) for n in used) / sum(used))
    assert (experts.dropped > 0) is drops


class InsistingMlp(Mlp):
    """Takes whole batches alone, as those of decoders that have experts themselves (Mixtral, Qwen)."""

    def forward(self, hidden):
        batch, length, width = hidden.shape
        return super().forward(hidden.reshape(-1, width)).view(batch, length, width)


@pytest.mark.parametrize("kind", [Mlp, InsistingMlp])
def test_upcycled_experts_begin_as_the_dense_layer(kind):
    """With normalised gates the first output is that of the MLP that they copy."""
    mlp = kind(DIM)
    hidden = torch.randn(2, 24, DIM)
    experts = Experts(mlp, DIM, ExpertsSettings(count=4, top_k=2))
    torch.testing.assert_close(experts(hidden), mlp(hidden), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_uneven_routing_costs_compute_until_tokens_are_dropped():
    """The fullest expert sets the price of a layer, as of grouped kernels; a capacity bounds it."""
    hidden = torch.randn(4, LENGTH, DIM)
    even, uneven = experts_of(), experts_of()
    bounded = experts_of(drop_tokens=True, capacity_factor=1.0)
    for experts in (uneven, bounded):
        with torch.no_grad():
            experts.router.weight[1:] = 0
            experts.router.weight[0] = hidden.mean((0, 1)) * 50
    costs = [flops(experts, hidden.clone()) for experts in (even, uneven, bounded)]
    assert costs[1] > 1.3 * costs[0] > 0 and costs[2] < costs[1]


@pytest.mark.slow
@pytest.mark.parametrize("balance", first_fast(["bias", "loss", "none"]))
def test_balance_evens_out_what_the_routers_weights_prefer(balance):
    """The auxiliary loss trains the router, the bias follows the counts; without either it stays."""
    weight = 0.1 if balance == "loss" else 0.05
    experts = experts_of(count=4, top_k=1, balance=LoadBalance(balance), balance_weight=weight)
    with torch.no_grad():
        experts.router.weight.mul_(0.3)
        experts.router.weight[0, 0] = 0.7
    optimizer = torch.optim.SGD(experts.router.parameters(), lr=1.0)
    hidden = functional.pad(torch.randn(8, LENGTH, DIM - 1), (1, 0), value=1.0)
    first = None
    for _ in range(100):
        out = experts(hidden)
        (out * 0).sum().backward()
        first = first or max(experts.loads)
        if balance == "loss":
            optimizer.step()
        elif balance == "bias":
            assert experts.counts.sum() == 8 * LENGTH
            experts.follow_counts()
        experts.zero_grad()
    assert (max(experts.loads) < 0.7 * first) is (balance != "none")


def test_a_frozen_layer_goes_on_choosing_the_same_experts():
    """The bias follows the counts of layers that learn."""
    experts = experts_of(count=4, balance=LoadBalance.BIAS, balance_weight=1.0)
    hidden = torch.randn(2, 24, DIM)
    for learns in (True, False):
        experts.requires_grad_(learns)
        before = experts.bias.clone()
        experts(hidden)
        experts.follow_counts()
        assert torch.equal(experts.bias, before) is not learns


def test_routers_with_a_threshold_decide_what_their_blocks_compute():
    """Up to the capacity; a sequence that no token is picked from keeps its best position."""
    block = RoutedBlock(Block(DIM, 2, 0.0), DepthsSettings(threshold=0.5))
    block.strength = 0.25
    hidden = torch.zeros(2, 8, DIM)
    # Of the first sequence three positions are wanted, of the second none.
    hidden[..., 0], hidden[0, [1, 4, 6], 0] = -1.0, 1.0
    with torch.no_grad():
        block.router.weight.zero_()
        block.router.bias.zero_()
        block.router.weight[0, 0] = 1.0
    assert torch.equal(block(hidden)[0, 0], hidden[0, 0])
    assert block.computed == 4 / 16
    with torch.no_grad():
        block.router.bias.fill_(9.0)
    block(hidden)
    assert block.computed == 12 / 16, "never above the capacity"
