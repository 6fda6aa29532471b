"""The executor: gradients and updates are those of one process, on ranks that are threads of the test's."""

import queue
import threading
import typing
from collections import Counter

import pytest
import torch
from ballast_policies.contract.job.training import TrainingConfig
from ballast_policies.planning.schedules.registry import SCHEDULES, build_schedule
from ballast_policies.planning.schedules.validate import validate, weight_versions
from ballast_trainer.layers.boundaries import Boundary
from ballast_trainer.layers.layer import Layer
from ballast_trainer.layers.layer_stack import LayerStack
from ballast_trainer.pipeline.executor.executor import Executor
from ballast_trainer.pipeline.executor.links import link_of, links_of
from ballast_trainer.pipeline.executor.order import RankOrder
from ballast_trainer.pipeline.layout import ScheduleRequest
from ballast_trainer.profiling.meter import Meter
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.support.examples import examples, first_fast
from tests.support.waiting import WAIT_SECONDS


def half_square(output, target):
    return ((getattr(output, "hidden", output) - target) ** 2).mean() / 2


RATE = 0.1


class Threads:
    """Messages between threads, by (from, to, tag)."""

    def __init__(self):
        self.boxes = {}
        self.lock = threading.Lock()

    def box(self, *key):
        with self.lock:
            return self.boxes.setdefault(key, queue.Queue())

    def at(self, rank):
        threads = self

        class At:
            def send(self, tensor, message, tag):
                assert message.source == rank
                threads.box(rank, message.target, tag).put(tensor.clone())
                return Done()

            def receive(self, into, message, tag):
                assert message.target == rank
                return Coming(into, threads.box(message.source, rank, tag))

        return At()


class Done:
    def wait(self):
        pass


class Coming:
    def __init__(self, into, box):
        self.into, self.box = into, box

    def wait(self):
        self.into.copy_(self.box.get(timeout=WAIT_SECONDS))


def run(
    schedule,
    modules_by_rank,
    *,
    steps,
    batch,
    boundary,
    apply_gradients=None,
    loss=half_square,
    told_after=None,
):
    """Carry the schedule out; returns (loss by step, what was counted by rank).

    After its step ``told_after`` every rank is told to end as soon as all of them can.
    """
    transport, outcomes = Threads(), {}
    config = TrainingConfig(optimizer="torch.optim:SGD", learning_rate=RATE)

    def rank_main(rank):
        meter = Meter(schedule.stages, torch.device("cpu"), None)
        stacks = {
            stage: LayerStack([Layer(stage, module, config)], meter, 0, torch.device("cpu"))
            for stage, module in modules_by_rank[rank].items()
        }

        def update(stage, *, step, replicas):
            apply_gradients(rank, stage, step=step, replicas=replicas)

        executor = Executor(
            stacks,
            (boundary,) * (schedule.stages - 1),
            meter=meter,
            loss=loss,
            device=torch.device("cpu"),
            transport=transport.at(rank),
        )
        try:
            order = RankOrder(schedule, rank, steps)
            executor.begin(order, 0, batch, update)
            losses = []
            while not executor.ended:
                losses.append(executor.advance())
                if len(losses) - 1 == told_after:
                    executor.end_after(told_after + order.lead)
            outcomes[rank] = losses, executor.finish()
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(schedule.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS)
    for outcome in outcomes.values():
        if isinstance(outcome, Exception):
            raise outcome
    assert sorted(outcomes) == list(range(schedule.ranks))
    losses = [
        sum(part for part in parts if part is not None)
        for parts in zip(*(outcomes[rank][0] for rank in range(schedule.ranks)), strict=True)
    ]
    return losses, [outcomes[rank][1] for rank in range(schedule.ranks)]


def draw(module, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)


class Curve(nn.Module):
    """A small nonlinear layer with a recurrent part, whose weights torch keeps in a list of its own."""

    def __init__(self, seed):
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.cell = nn.GRU(4, 4, batch_first=True, dtype=torch.float64)
        draw(self, seed)

    def forward(self, value):
        return value + self.cell(torch.tanh(self.linear(value)))[0]


class Line(nn.Module):
    """A small nonlinear layer whose backward can be split."""

    def __init__(self, seed):
        super().__init__()
        self.first, self.second = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))
        draw(self, seed)

    def forward(self, value):
        return value + self.second(torch.tanh(self.first(value)))


class Carried(typing.NamedTuple):
    """What :class:`Carrying` hands on: of three tensors, one has no gradient; a constant."""

    hidden: torch.Tensor
    skips: dict
    mask: torch.Tensor
    factor: int = 2


class Carrying(Line):
    """A small layer that hands on a tree; the first one takes a tensor."""

    def forward(self, value):
        if isinstance(value, torch.Tensor):
            value = Carried(value, {"first": super().forward(value)}, value[..., :1] > 0)
        hidden = super().forward(value.hidden) + value.factor * value.mask * value.skips["first"]
        return value._replace(hidden=hidden)


def curve_batch(step):
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randn(2, 8, 3, 4, generator=generator, dtype=torch.float64)
    return inputs, targets


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
@pytest.mark.parametrize("layer", first_fast([Carrying, Curve, Line]))
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
        (mean / 8).backward()
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
    assert tuple(sorted(sent)) == links_of(schedule.stage_ranks, schedule.microbatches)


class Shift(nn.Module):
    """x -> x + w: the loss of a stack of them is a quadratic of the sum of their weights."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([weight], dtype=torch.float64))

    def forward(self, value):
        return value + self.weight


def descent(modules):
    """The updates of plain gradient descent on the stages of each rank."""

    def apply_gradients(rank, stage, *, step, replicas):
        with torch.no_grad():
            for parameter in modules[rank][stage].parameters():
                parameter.sub_(RATE * parameter.grad / replicas)
                parameter.grad = None

    return apply_gradients


def trained_quadratic(schedule, steps, told_after=None):
    """Final weights of sum(w) -> 1 by stage, and what the ranks counted."""
    modules = [{rank: Shift(0.3 * (rank + 1))} for rank in range(schedule.ranks)]
    microbatches = schedule.microbatches // steps
    batch = (
        torch.zeros(microbatches, 1, dtype=torch.float64),
        torch.ones(microbatches, 1, dtype=torch.float64),
    )
    boundary = Boundary.of(torch.ones(1, 1, dtype=torch.float64, requires_grad=True))
    _, peak_usage = run(
        schedule,
        modules,
        steps=steps,
        batch=lambda step: batch,
        boundary=boundary,
        apply_gradients=descent(modules),
        told_after=told_after,
    )
    return [float(modules[rank][rank].weight.detach()) for rank in range(schedule.ranks)], peak_usage


@examples(15)
@given(
    name=st.sampled_from(["PipeDream", "PipeDreamVerticalSync", "PipeDream2BW"]),
    p=st.integers(1, 4),
    steps=st.integers(1, 4),
)
def test_what_a_schedule_claims_is_what_is_counted(name, p, steps):
    """Microbatches in flight and versions held, by stage, equal those that planning found."""
    schedule = build_schedule(name, ranks=p, microbatches=steps * p)
    facts = validate(schedule)
    _, peak_usage = trained_quadratic(schedule, steps)
    assert tuple(c.in_flight[rank] for rank, c in enumerate(peak_usage)) == facts.stage_in_flight
    assert tuple(c.versions[rank] for rank, c in enumerate(peak_usage)) == facts.versions_held


@pytest.mark.slow
@examples(20)
@given(
    name=st.sampled_from(["PipeDream", "PipeDreamVerticalSync", "PipeDream2BW"]),
    p=st.integers(1, 4),
    m=st.integers(1, 5),
    steps=st.integers(1, 6),
    told_after=st.integers(0, 5),
)
def test_a_run_told_to_end_early_is_the_shorter_run(name, p, m, steps, told_after):
    """Every rank drains after the same step, whatever it has begun by then, and nothing is left over."""
    if name == "PipeDream2BW":
        m = max(m, p)

    run_of = ScheduleRequest(name=name, ranks=p, microbatches=m).run_of
    lead = RankOrder(run_of(steps), 0, steps).lead
    done = min(steps, told_after + lead + 1)
    got, _ = trained_quadratic(run_of(steps), steps, told_after)
    wanted, _ = trained_quadratic(run_of(done), done)
    assert got == wanted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["PipeDream", "PipeDreamVerticalSync", "PipeDream2BW"])
def test_a_model_with_a_recurrent_layer_learns_by_the_versions_of_the_schedule(name):
    """Three stages of a nonlinear model equal the explicit recurrence to 1e-12 in double precision.

    The hooks of their parameters see each microbatch.
    """
    seen = []

    def hooked(module):
        for parameter in module.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return module

    ranks, steps, microbatches = 3, 5, 4
    schedule = ScheduleRequest(name=name, ranks=ranks, microbatches=microbatches).run_of(steps)
    modules = [{rank: hooked(Curve(rank))} for rank in range(ranks)]
    parameters = [p for held in modules for module in held.values() for p in module.parameters()]
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(seen.append)
    boundary = Boundary.of(torch.ones(2, 3, 4, dtype=torch.float64, requires_grad=True))
    learning = descent(modules)
    losses, _ = run(
        schedule, modules, steps=steps, batch=curve_batch, boundary=boundary, apply_gradients=learning
    )

    histories = [[vector(Curve(stage))] for stage in range(ranks)]
    versions, wanted_losses, gathered = weight_versions(schedule), [], [0.0] * ranks
    for k in range(schedule.microbatches):
        used = [hooked(Curve(stage)) for stage in range(ranks)]
        for stage, module in enumerate(used):
            torch.nn.utils.vector_to_parameters(histories[stage][versions[stage, k]], module.parameters())
        inputs, targets = curve_batch(k // microbatches)
        value = inputs.chunk(microbatches)[k % microbatches]
        for module in used:
            value = module(value)
        loss = half_square(value, targets.chunk(microbatches)[k % microbatches])
        (loss / schedule.update_every).backward()
        wanted_losses.append(float(loss.detach()))
        for stage, module in enumerate(used):
            gathered[stage] = gathered[stage] + torch.cat([p.grad.flatten() for p in module.parameters()])
            if (k + 1) % schedule.update_every == 0:
                history = histories[stage]
                history.append(history[-1] - RATE * gathered[stage])
                gathered[stage] = 0.0
    for stage in range(ranks):
        torch.testing.assert_close(vector(modules[stage][stage]), histories[stage][-1], rtol=0, atol=1e-12)
    means = [sum(wanted_losses[i : i + microbatches]) / microbatches for i in range(0, len(wanted_losses), 4)]
    assert losses == pytest.approx(means, abs=1e-12)
    assert Counter(map(id, seen)) == dict.fromkeys(map(id, parameters), schedule.microbatches)


def vector(module):
    return torch.nn.utils.parameters_to_vector(module.parameters()).detach().clone()
