"""Bubbles: the simulator against the papers' formulas, and the split of idle time."""

import itertools

import pytest
from ballast_policies.planning.schedules.builders.asynchronous import pipedream
from ballast_policies.planning.schedules.builders.synchronous import (
    interleaved_one_forward_one_backward,
    interleaved_zero_bubble,
    one_forward_one_backward,
)
from ballast_policies.planning.schedules.builders.v_shaped import zero_bubble_v
from ballast_policies.planning.schedules.costs import StageCosts, even_costs
from ballast_policies.planning.schedules.registry import build_schedule
from ballast_policies.planning.schedules.simulate import simulate, split_bubble
from ballast_policies.planning.schedules.validate import validate
from hypothesis import given
from hypothesis import strategies as st

seconds = st.floats(0.01, 5.0)


@pytest.mark.parametrize(
    ("p", "m", "v"), [c for c in itertools.product((4, 8), (8, 16), (1, 2, 3)) if c[1] % c[0] == 0]
)
def test_bubble_is_p_minus_1_over_v_m(p, m, v):
    """The simulated idle time over the ideal time of interleaved 1F1B equals the formula."""
    schedule = interleaved_one_forward_one_backward(p, m, v)
    trace = simulate(schedule, even_costs(p * v, forward=1 / v, backward=2 / v))
    ideal = 3 * m
    assert (trace.makespan - ideal) / ideal == pytest.approx((p - 1) / (v * m), rel=1e-12)


@pytest.mark.parametrize("name", ["1F1B", "GPipe", "LoopedBFS"])
def test_gpipe_and_1f1b_have_the_same_bubble(name):
    """(p - 1) / m."""
    p, m = 4, 8
    schedule = build_schedule(name, ranks=p, microbatches=m)
    trace = simulate(schedule, even_costs(p))
    assert trace.makespan / (3 * m) - 1 == pytest.approx((p - 1) / m, rel=1e-12)


def test_zero_bubble_schedules_have_the_bubbles_measured_of_torch():
    """With F = I = W: of (p, m) = (4, 16), H1 (p - 1) / 3m, and ZB-V 1 / 16 of a third."""
    p, m = 4, 16
    h1 = simulate(interleaved_zero_bubble(p, m), even_costs(p, forward=1.0, backward=2.0, backward_input=1.0))
    assert h1.makespan / (3 * m) - 1 == pytest.approx((p - 1) / (3 * m), rel=1e-12)
    assert max(validate(interleaved_zero_bubble(p, m)).in_flight) == p
    v = simulate(zero_bubble_v(p, m), even_costs(2 * p, forward=0.5, backward=1.0, backward_input=0.5))
    assert v.makespan < h1.makespan


@given(
    forward=st.lists(seconds, min_size=4, max_size=4),
    ratio=st.floats(0.5, 3.0),
    m=st.integers(1, 12),
)
def test_inherent_and_dynamic_bubble_add_up_to_the_idle_time(forward, ratio, m):
    """Even stages have no dynamic part, and the inherent one is (p - 1) / (m + p - 1)."""
    schedule = one_forward_one_backward(4, m)
    costs = StageCosts(forward=tuple(forward), backward=tuple(ratio * f for f in forward))
    split = split_bubble(schedule, costs)
    trace = simulate(schedule, costs)
    idle = sum(trace.makespan - busy for busy in trace.busy) / (4 * trace.makespan)
    assert split.inherent + split.dynamic == pytest.approx(idle, abs=1e-9)
    even = split_bubble(schedule, even_costs(4))
    assert even.dynamic == pytest.approx(0, abs=1e-12)
    assert split.inherent == pytest.approx(3 / (m + 3), abs=1e-9)


def test_without_a_flush_the_bubble_is_paid_once():
    """PipeDream's idle time does not grow with the run; 1F1B's does with every flush."""

    def idle(schedule):
        return simulate(schedule, even_costs(4)).makespan - 3 * schedule.microbatches

    assert idle(pipedream([1] * 4, 8)) == idle(pipedream([1] * 4, 80)) == pytest.approx(9)
    assert 10 * idle(one_forward_one_backward(4, 8)) == pytest.approx(90)
