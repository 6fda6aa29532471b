"""Schedules with a flush: the gradients of one process; and the order of messages, of every schedule."""

import pytest
import torch
from ballast_policies.planning.schedules.registry import SCHEDULES, build_schedule
from ballast_trainer.layers.boundaries import Boundary
from ballast_trainer.pipeline.executor.groups import link_of, links_of
from ballast_trainer.pipeline.executor.order import RankOrder
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.pipeline.executor_threads import half_square, run
from tests.trainer.pipeline.small_layers import Carrying, Curve, Line, curve_batch


def gradients_of(schedule, layer):
    """All gradients of one step of a flushing schedule, summed over replicas, by stage."""
    modules = [
        {stage: layer(stage) for stage, holders in enumerate(schedule.stage_ranks) if rank in holders}
        for rank in range(schedule.ranks)
    ]
    each = 8 // schedule.microbatches
    boundary = Boundary.of(layer(0)(torch.ones(each, 3, 4, dtype=torch.float64, requires_grad=True)))
    losses, _ = run(schedule, modules, steps=1, batch=curve_batch, boundary=boundary)
    summed = {}
    for held in modules:
        for stage, module in held.items():
            mine = torch.cat([p.grad.flatten() for p in module.parameters()])
            summed[stage] = summed.get(stage, 0) + mine
    return losses[0], summed


@pytest.mark.parametrize(
    ("name", "ranks", "replicas"),
    [
        ("1F1B", 3, ()),
        ("GPipe", 3, ()),
        ("Interleaved1F1B", 2, ()),
        ("LoopedBFS", 2, ()),
        ("ZeroBubbleH1", 3, ()),
        ("ZeroBubbleV", 2, ()),
        ("DualPipeV", 2, ()),
        ("1F1B", 3, (2, 1)),
        ("1F1B", 4, (1, 2, 1)),
        ("GPipe", 4, (2, 2)),
    ],
)
@pytest.mark.parametrize("layer", [Curve, Line, Carrying])
def test_a_schedule_with_a_flush_gives_the_gradients_of_one_process(name, ranks, replicas, layer):
    """Also with replicas of a stage, several stages a rank, split backwards, and trees of tensors."""
    schedule = build_schedule(name, ranks=ranks, microbatches=8, chunks=2, replicas=replicas)
    loss, gradients = gradients_of(schedule, layer)
    modules = [layer(stage) for stage in range(schedule.stages)]
    inputs, targets = curve_batch(0)
    wanted_loss = 0.0
    for source, target in zip(inputs.chunk(8), targets.chunk(8), strict=True):
        value = source
        for module in modules:
            value = module(value)
        mean = half_square(value, target)
        mean.backward()
        wanted_loss += float(mean.detach()) / 8
    assert loss == pytest.approx(wanted_loss, abs=1e-12)
    for stage, module in enumerate(modules):
        wanted = torch.cat([p.grad.flatten() for p in module.parameters()])
        torch.testing.assert_close(gradients[stage], wanted, rtol=0, atol=1e-12)


@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    ranks=st.integers(2, 4),
    rounds=st.integers(2, 3),
    replicas=st.none() | st.lists(st.integers(1, 3), min_size=2, max_size=4),
)
def test_messages_of_a_link_are_sent_in_the_order_they_are_needed(name, ranks, rounds, replicas):
    """So a transport without tags carries every schedule, with a channel for each direction of each link."""
    if replicas is not None and SCHEDULES[name].build_replicated is not None:
        schedule = build_schedule(name, ranks=sum(replicas), microbatches=6 * rounds, replicas=replicas)
    else:
        schedule = build_schedule(name, ranks=ranks, microbatches=2 * ranks * rounds, chunks=2)
    sent, needed = {}, {}
    for rank in range(schedule.ranks):
        order = RankOrder(schedule, rank, 1)
        for message in (planned.sent for planned in order.planned):
            if message is not None:
                sent.setdefault(link_of(message), []).append(message)
        for message in order.messages:
            needed.setdefault(link_of(message), []).append(message)
    assert sent == needed
    assert tuple(sorted(sent)) == links_of(schedule)
