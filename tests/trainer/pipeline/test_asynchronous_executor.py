"""Schedules without a flush: weights follow the recurrence of their versions; ranks are threads."""

import pytest
import torch
from ballast_policies.planning.schedules.builders.asynchronous import double_buffered
from ballast_policies.planning.schedules.registry import build_schedule
from ballast_policies.planning.schedules.validate import validate, weight_versions
from ballast_trainer.layers.boundaries import Boundary
from ballast_trainer.pipeline.executor.order import RankOrder
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.support.examples import examples
from tests.trainer.pipeline.executor_threads import RATE, half_square, run
from tests.trainer.pipeline.small_layers import Curve, curve_batch


class Shift(nn.Module):
    """x -> x + w: the loss of a stack of them is a quadratic of the sum of their weights."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([weight], dtype=torch.float64))

    def forward(self, value):
        return value + self.weight


def shifts(schedule):
    """The quadratic's stages, one a rank, and the updates of plain gradient descent on them."""
    modules = [{rank: Shift(0.3 * (rank + 1))} for rank in range(schedule.ranks)]

    def apply_gradients(rank, stage, *, step, microbatches):
        weight = modules[rank][stage].weight
        with torch.no_grad():
            weight -= RATE * weight.grad / microbatches
        weight.grad = None

    return modules, apply_gradients


def trained_quadratic(schedule, steps, told_after=None):
    """Final weights of sum(w) -> 1 by stage, and what the ranks counted."""
    modules, apply_gradients = shifts(schedule)
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
        apply_gradients=apply_gradients,
        told_after=told_after,
    )
    return [float(modules[rank][rank].weight.detach()) for rank in range(schedule.ranks)], peak_usage


def recurrence(stages, updates, used):
    """W(t+1) = W(t) - v grad f at the versions that ``used(stage, t)`` says, f = (sum(w) - 1)^2 / 2."""
    weights = [[0.3 * (stage + 1)] for stage in range(stages)]
    for t in range(updates):
        gradient = sum(weights[s][used(s, t)] for s in range(stages)) - 1
        for history in weights:
            history.append(history[-1] - RATE * gradient)
    return [history[-1] for history in weights]


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

    def schedule_of(count):
        if name == "PipeDream2BW":
            return double_buffered(p, count * m, update_every=m)
        return build_schedule(name, ranks=p, microbatches=count * m)

    lead = RankOrder(schedule_of(steps), 0, steps).lead
    done = min(steps, told_after + lead + 1)
    got, _ = trained_quadratic(schedule_of(steps), steps, told_after)
    wanted, _ = trained_quadratic(schedule_of(done), done)
    assert got == wanted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["PipeDream", "PipeDreamVerticalSync", "PipeDream2BW"])
def test_a_model_with_a_recurrent_layer_learns_by_the_versions_of_the_schedule(name):
    """Three stages of a nonlinear model equal the explicit recurrence to 1e-12 in double precision."""
    ranks, steps = 3, 5
    microbatches = 4
    schedule = (
        double_buffered(ranks, steps * microbatches, update_every=microbatches)
        if name == "PipeDream2BW"
        else build_schedule(name, ranks=ranks, microbatches=steps * microbatches)
    )
    modules = [{rank: Curve(rank)} for rank in range(ranks)]

    def apply_gradients(rank, stage, *, step, microbatches):
        with torch.no_grad():
            for parameter in modules[rank][stage].parameters():
                parameter.sub_(RATE * parameter.grad / microbatches)
                parameter.grad = None

    boundary = Boundary.of(torch.ones(2, 3, 4, dtype=torch.float64, requires_grad=True))
    losses, _ = run(
        schedule, modules, steps=steps, batch=curve_batch, boundary=boundary, apply_gradients=apply_gradients
    )

    histories = [[vector(Curve(stage))] for stage in range(ranks)]
    versions, wanted_losses, gathered = weight_versions(schedule), [], [0.0] * ranks
    for k in range(schedule.microbatches):
        used = [Curve(stage) for stage in range(ranks)]
        for stage, module in enumerate(used):
            torch.nn.utils.vector_to_parameters(histories[stage][versions[stage, k]], module.parameters())
        inputs, targets = curve_batch(k // microbatches)
        value = inputs.chunk(microbatches)[k % microbatches]
        for module in used:
            value = module(value)
        loss = half_square(value, targets.chunk(microbatches)[k % microbatches])
        loss.backward()
        wanted_losses.append(float(loss.detach()))
        for stage, module in enumerate(used):
            gathered[stage] = gathered[stage] + torch.cat([p.grad.flatten() for p in module.parameters()])
            if (k + 1) % schedule.update_every == 0:
                history = histories[stage]
                history.append(history[-1] - RATE * gathered[stage] / schedule.update_every)
                gathered[stage] = 0.0
    for stage in range(ranks):
        torch.testing.assert_close(vector(modules[stage][stage]), histories[stage][-1], rtol=0, atol=1e-12)
    means = [sum(wanted_losses[i : i + microbatches]) / microbatches for i in range(0, len(wanted_losses), 4)]
    assert losses == pytest.approx(means, abs=1e-12)


def vector(module):
    return torch.nn.utils.parameters_to_vector(module.parameters()).detach().clone()
