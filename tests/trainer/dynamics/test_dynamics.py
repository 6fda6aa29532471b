"""The kinds of change compute less, and what they compute is right."""

import math

import pytest
import torch
from ballast_policies.contract.job import DynamicConfig
from ballast_trainer.dynamics.block_change import ChangingModule
from ballast_trainer.dynamics.early_exit import ExitingBlock
from ballast_trainer.dynamics.mixture_of_depths import RoutedBlock
from ballast_trainer.dynamics.mixture_of_experts import EXPERTS, Experts
from ballast_trainer.dynamics.registry import build_dynamic, build_dynamics
from ballast_trainer.dynamics.sparse_attention import BLOCK, RoutedAttention
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.models.gpt import Attention, Block
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

DIM, LENGTH = 32, 64


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def flops(module, inputs):
    """Multiply-adds of the matrix products in a forward and a backward, as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        module(inputs.requires_grad_()).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("kind", ["earlyExit", "mixtureOfDepths", "mixtureOfExperts", "sparseAttention"])
def test_a_changed_block_computes_less(kind):
    """Real products disappear, and more of them the further the change has come."""
    dynamic = build_dynamic(DynamicConfig(kind=kind, end_step=1, target=0.9), 11)
    counts = []
    for strength in (0.0, 0.7, 0.95):
        torch.manual_seed(1)
        block = dynamic.prepare(8, Block(DIM, 2, 0.0))
        for module in block.modules():
            if isinstance(module, ChangingModule):
                module.strength = strength
            if isinstance(module, Experts):
                with torch.no_grad():
                    module.router.bias[0] += 1.0  # routing is uneven
        width = DIM + 1 if kind == "earlyExit" else DIM
        inputs = torch.randn(2, LENGTH, width)
        if kind == "earlyExit":
            inputs[..., -1] = 0
            inputs[:, : int(strength * 0.7 * LENGTH), -1] = 1  # what the layers before let out
        if kind == "sparseAttention":
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                counts.append(flops(block, inputs))
        else:
            counts.append(flops(block, inputs))
    assert counts[0] > counts[1] > counts[2] > 0, counts


def test_positions_that_exited_are_left_alone():
    """As many as planned are out after the layer, and their hidden state stays what it was."""
    block = ExitingBlock(Block(DIM, 2, 0.0), depth=0.5)
    block.strength = 0.8
    marked = functional.pad(torch.randn(3, LENGTH, DIM), (0, 1))
    marked[:, 10:15, -1] = 1
    after = block(marked)
    assert torch.equal(after[:, 10:15], marked[:, 10:15])
    assert after[..., -1].sum(1).tolist() == [math.floor(0.8 * 0.5 * LENGTH)] * 3
    assert not torch.equal(after[:, :10], marked[:, :10])


def test_attention_among_the_positions_that_are_left_is_causal():
    """A change of a later position changes no earlier output."""
    block = ExitingBlock(Block(DIM, 2, 0.0), depth=0.0)
    marked = functional.pad(torch.randn(1, LENGTH, DIM), (0, 1))
    marked[:, ::3, -1] = 1
    other = marked.clone()
    other[:, 50, :-1] += 1.0
    assert torch.allclose(block(marked)[:, :50], block(other)[:, :50], atol=1e-6)


def test_a_router_picks_its_best_positions():
    """The rest passes by unchanged, and the router gets a gradient."""
    block = RoutedBlock(Block(DIM, 2, 0.0), depth=0.5)
    block.strength = 0.75
    hidden = torch.randn(2, LENGTH, DIM)
    after = block(hidden)
    scores = block.router(hidden).squeeze(-1)
    picked = torch.zeros(2, LENGTH, dtype=torch.bool).scatter(
        1, scores.topk(LENGTH // 4, dim=1).indices, True
    )
    changed = (after != hidden).any(-1)
    assert torch.equal(changed, picked)
    after.sum().backward()
    assert block.router.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("strength", [0.0, 1.0])
def test_experts_equal_one_position_at_a_time(strength):
    """Each position's expert by its gate; what is over the capacity, in order, is zero."""
    experts = Experts(DIM, depth=0.5)
    experts.strength = strength
    hidden = torch.randn(2, 24, DIM)
    out = experts(hidden).view(-1, DIM)
    flat = hidden.view(-1, DIM)
    gates = torch.softmax(experts.router(flat), dim=-1)
    slots = len(flat) if strength == 0.0 else math.ceil(len(flat) / EXPERTS)
    used = [0] * EXPERTS
    for position, (x, gate) in enumerate(zip(flat, gates, strict=True)):
        chosen = int(gate.argmax())
        used[chosen] += 1
        expected = torch.zeros(DIM)
        if used[chosen] <= slots:
            expected = functional.gelu(x @ experts.up[chosen]) @ experts.down[chosen] * gate[chosen]
        torch.testing.assert_close(out[position], expected, atol=1e-5, rtol=1e-5)
    assert experts.token_imbalance == pytest.approx(max(used) * EXPERTS / len(flat))


def test_sparse_attention_is_dense_attention_under_its_mask():
    """Own block and the best earlier ones, causal inside; all blocks kept is the dense layer itself."""
    attention = Attention(DIM, 2, 0.0)
    routed = RoutedAttention(attention, depth=1.0)
    hidden = torch.randn(2, LENGTH, DIM)
    assert torch.equal(routed(hidden), attention(hidden))
    routed.strength = 0.5
    blocks = LENGTH // BLOCK
    assert routed.kept_blocks(LENGTH) == blocks // 2
    q, k, v = attention.qkv(hidden).view(2, LENGTH, 3, 2, DIM // 2).permute(2, 0, 3, 1, 4)
    pooled_q, pooled_k = (x.reshape(2, 2, blocks, BLOCK, -1).mean(3) for x in (q, k))
    scores = pooled_q @ pooled_k.transpose(-1, -2)
    place = torch.arange(blocks)
    scores = scores.masked_fill(place[None] > place[:, None], -math.inf)
    scores = scores.masked_fill(place[None] == place[:, None], math.inf)
    picked = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(blocks // 2).indices, True)
    mask = picked.repeat_interleave(BLOCK, 2).repeat_interleave(BLOCK, 3)
    mask &= torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    expected = attention.out(mixed.transpose(1, 2).reshape(2, LENGTH, DIM))
    torch.testing.assert_close(routed(hidden), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["earlyExit", "mixtureOfDepths", "mixtureOfExperts", "sparseAttention"])
def test_a_change_of_blocks_needs_a_transformer(kind):
    """Refused for models that have no blocks, with the reason."""
    with pytest.raises(ConfigurationError, match="family transformer"):
        build_dynamics([DynamicConfig(kind=kind, end_step=1, target=0.5)], 5, "recurrent")


def test_two_changes_that_route_around_blocks_are_refused():
    """Early exit and mixture of depths would both decide which positions a block sees."""
    pair = [DynamicConfig(kind=kind, end_step=1, target=0.5) for kind in ("earlyExit", "mixtureOfDepths")]
    with pytest.raises(ConfigurationError, match="both route"):
        build_dynamics(pair, 5)


def test_pruning_replaces_linear_layers_wherever_they_are():
    """Nested ones too, with their parameters."""
    block = Block(DIM, 2, 0.0)
    weight = block.mlp.up.weight
    pruned = build_dynamic(DynamicConfig(kind="pruning", end_step=1, target=0.5), 5).prepare(1, block)
    assert not any(isinstance(module, nn.Linear) for module in pruned.modules())
    assert pruned.mlp.up.weight is weight


@pytest.mark.processes
def test_the_experts_token_imbalance_is_measured_while_training(gang, small_config):
    """Of every layer with experts, over all ranks, at each look at the layers: 1 is even, 4 all on one."""
    change = {"kind": "mixtureOfExperts", "startStep": 2, "endStep": 6, "target": 1.0}
    config = small_config(
        totalSteps=9, dynamics=[change], rebalance={"enabled": True, "everySteps": 4, "minGain": 0.9}
    )
    running = gang(config, ranks=2)
    assert set(running.exit_codes().values()) == {0}, running.errors()
    looks = running.events("tokenImbalance")
    assert [look["step"] for look in looks] == [4, 8]
    for look in looks:
        assert sorted(look["layers"]) == ["2", "4", "6"]
        assert all(1 <= value <= EXPERTS for value in look["layers"].values())
    assert len({value for look in looks for value in look["layers"].values()}) > 2
