"""Exits by the softmax of small exit heads that learn from the model's own targets."""

import pytest
import torch
from ballast_policies.contract.job.dynamics import Confidence, ExitsSettings
from ballast_trainer.dynamics.early_exit import ExitHead, ExitingBlock
from ballast_trainer.errors import TrainerError
from ballast_trainer.layers.running import CURRENT_FORWARD
from ballast_trainer.models.gpt import Block

from tests.trainer.distributed.waits import Waits

CLASSES = 8


@pytest.fixture
def running(monkeypatch):
    """Lets layers find these targets, as in a step's only microbatch."""

    def set_targets(targets):
        monkeypatch.setattr(CURRENT_FORWARD, "targets_of", lambda step: (targets,))
        monkeypatch.setattr(CURRENT_FORWARD, "microbatch", 0)

    return set_targets


def exiting(threshold=0.8, **settings):
    torch.manual_seed(0)
    fields = {"vocabulary": CLASSES, "rank": 4, "head_weight": 1.0, **settings}
    exits = ExitsSettings(confidence=Confidence.SOFTMAX, threshold=threshold, **fields)
    block = ExitingBlock(Block(16, 2, 0.0), exits, hazard=0.0)
    block.strength = 0.75
    return block


@pytest.mark.slow
def test_positions_leave_where_their_class_is_told_apart(running):
    """Before it has learnt none does; then those whose class the exit head knows, up to the target."""
    block = exiting()
    known = torch.eye(16)[torch.arange(12) % 4][None].repeat(2, 1, 1) * 4
    targets = (torch.arange(12) % 4)[None].repeat(2, 1)
    running(targets)
    marked = torch.cat([known, torch.zeros(2, 12, 1)], -1)
    block(marked)
    assert block.left == 0.0
    optimizer = torch.optim.Adam(block.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        block(marked).sum().mul(0).backward()
        optimizer.step()
    block(marked)
    assert 0 < block.left <= 0.75
    assert block.exit_head(known).argmax(-1).eq(targets).float().mean() > 0.9


def test_an_exit_waits_for_the_device_where_it_has_to_choose(running):
    """How many are not out, and which; its share where it is told."""
    block = exiting()
    running(torch.randint(0, CLASSES, (2, 6)))
    with Waits() as waits:
        block(torch.cat([torch.randn(2, 6, 16), torch.zeros(2, 6, 1)], -1))
    assert waits.found == ["scalar", "nonzero"]
    with Waits() as waits:
        assert block.left == 0.0
    assert waits.found == ["scalar"]


def test_the_exits_loss_trains_the_blocks_too(running):
    """The weighted sum: at weight 0 a block has no gradient of the exit, at 1 it has."""
    found = []
    for weight in (0.0, 1.0):
        block = exiting(head_weight=weight)
        torch.nn.init.normal_(block.exit_head.up.weight)
        running(torch.randint(0, CLASSES, (2, 6)))
        block(torch.cat([torch.randn(2, 6, 16), torch.zeros(2, 6, 1)], -1)).sum().mul(0).backward()
        found.append(float(block.block.mlp.up.weight.grad.abs().sum()))
    assert found[0] == 0 < found[1]


def test_a_trial_of_a_plan_has_no_targets(running):
    """The block runs, and no loss is taken of what is no microbatch."""
    running(torch.zeros(2, 6, dtype=torch.int64))
    CURRENT_FORWARD.microbatch = None
    head = ExitHead(16, 4, CLASSES)
    assert head.loss(head(torch.randn(2, 6, 16)), torch.ones(2, 6, dtype=torch.bool)) is None


@pytest.mark.parametrize(
    ("targets", "problem"),
    [
        (torch.zeros(2, dtype=torch.int64), "a class for each position"),
        (torch.zeros(2, 6), "a class for each position"),
        (torch.full((2, 6), CLASSES), "exits.vocabulary: 8"),
    ],
    ids=["one a sequence", "no classes", "outside"],
)
def test_targets_that_an_exit_cannot_learn_from_are_refused(running, targets, problem):
    running(targets)
    head = ExitHead(16, 4, CLASSES)
    with pytest.raises(TrainerError, match=problem):
        head.loss(head(torch.randn(2, 6, 16)), torch.ones(2, 6, dtype=torch.bool))


def test_positions_without_a_target_teach_nothing(running):
    """Marked by -100, as torch does; all of them: no loss."""
    head = ExitHead(16, 4, CLASSES)
    logits, everyone = head(torch.randn(2, 6, 16)), torch.ones(2, 6, dtype=torch.bool)
    running(torch.full((2, 6), -100))
    assert head.loss(logits, everyone) is None
    targets = torch.full((2, 6), -100)
    targets[0, 0] = 3
    running(targets)
    assert torch.isfinite(head.loss(logits, everyone))
