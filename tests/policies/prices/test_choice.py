"""Where one job should run now."""

import dataclasses
import math

import numpy as np
import pytest
from ballast_policies.allocation.instance import from_arrays
from ballast_policies.allocation.policies.cost import min_cost_slo
from ballast_policies.prices.choice import (
    WAIT,
    Preferences,
    Situation,
    choose,
)
from ballast_policies.prices.hazard import RestartCosts
from ballast_policies.prices.options import Options, on_hull, usd_per_step, useful_parts
from hypothesis import example, given
from hypothesis import strategies as st

FREE = RestartCosts(startup_seconds=0.0, checkpoint_seconds=0.0, notice_seconds=0.0)


def options(*rows):
    """Of (steps/s, USD/h, preemptions/h, spot)."""
    speed, usd, hazard, spot = zip(*rows, strict=True)
    return Options(
        speed=np.array(speed, dtype=float),
        usd_per_hour=np.array(usd, dtype=float),
        hazard_per_hour=np.array(hazard, dtype=float),
        spot=np.array(spot, dtype=bool),
    )


def chosen(situation, offers, preferences=None):
    preferences = preferences or Preferences()
    return choose(situation, offers, preferences, useful_parts(offers, preferences.restart))


SPOT, DEMAND, NONE = (1.0, 1.0, 0.1, True), (1.0, 3.0, 0.0, False), (1.0, math.nan, 0.1, True)
LONG, HOURS_100 = {"steps": 1e6}, {"steps": 100 * 3600.0}
THERE = {**LONG, "at": 0}
SLOW_AND_FAST = [(1.0, 0.5, 0.0, True), (4.0, 4.0, 0.0, True), (4.0, 12.0, 0.0, False)]


@pytest.mark.parametrize(
    ("situation", "rows", "option"),
    [
        pytest.param(LONG, [(1.0, 1.0, 0, True), (2.0, 1.5, 0, True), DEMAND], 1, id="the cheapest steps"),
        pytest.param(
            LONG, [(1.0, 1.0, 30, True), (1.0, 1.2, 0.01, True), DEMAND], 1, id="losses have a price"
        ),
        pytest.param(THERE, [(1.0, 2.9, 2.0, True), DEMAND], 1, id="losses make spot dearer than on demand"),
        pytest.param(THERE, [SPOT, (1.0, 0.999, 0.1, True), DEMAND], 0, id="a small gain moves no job"),
        pytest.param(LONG, [SPOT, (1.0, 0.999, 0.1, True), DEMAND], 1, id="a job that starts has it"),
        pytest.param(THERE, [SPOT, (1.0, 0.5, 0.1, True), DEMAND], 1, id="a large gain"),
        *(
            pytest.param(
                {**THERE, "move_usd": usd},
                [SPOT, (1.0, 0.9, 0.1, True), DEMAND],
                option,
                id=f"egress for {usd}",
            )
            for usd, option in ((0.01, 1), (100.0, 0))
        ),
        *(
            pytest.param(
                {**HOURS_100, "seconds_to_deadline": hours * 3600.0},
                SLOW_AND_FAST,
                option,
                id=f"100 hours of steps within {hours}",
            )
            for hours, option in ((200, 0), (60, 1))
        ),
        pytest.param({"steps": 1e5}, [NONE, DEMAND], WAIT, id="without spot machines a job waits"),
        pytest.param({"steps": 1e5, "waited_seconds": 1e5}, [NONE, DEMAND], 1, id="for a while"),
        *(
            pytest.param(
                {"steps": 3600.0, "seconds_to_deadline": left}, [NONE, DEMAND], option, id=f"{left} s"
            )
            for left, option in ((1e5, WAIT), (4000.0, 1))
        ),
        *(
            pytest.param(
                {**HOURS_100, "seconds_to_deadline": hours * 3600.0},
                [NONE, DEMAND],
                option,
                id=f"a part of the slack is kept: {hours}",
            )
            for hours, option in ((120, WAIT), (108, 1))
        ),
        pytest.param({"steps": 1.0}, [NONE], WAIT, id="nothing can be had"),
        pytest.param({"steps": 1.0}, [(0.0, 1.0, 0.1, True)], WAIT, id="nothing can run it"),
    ],
)
def test_one_look_at_the_market(situation, rows, option):
    assert chosen(Situation(**situation), options(*rows)).option == option


@pytest.mark.parametrize("starts", [2, 4])
def test_a_move_pays_for_the_slack_that_it_takes(starts):
    """The premium of on-demand machines over the hours that one start less brings on demand sooner."""
    restart = dataclasses.replace(FREE, startup_seconds=720.0)
    preferences, hours, hazard = Preferences(restart=restart), 10.0, 0.05
    situation = Situation(
        steps=hours * 3600.0, at=0, seconds_to_deadline=hours * 3600.0 + (1 + starts) * 720.0
    )
    useful = float(useful_parts(options((1.0, 1.0, hazard, True)), restart)[0])
    left = hours / useful
    moments = np.linspace(0.0, left, 100_001)
    losses = hazard * moments
    lost_all_but_one = np.exp(-losses) * losses ** (starts - 1) / math.factorial(starts - 1)
    hours_sooner = float(np.trapezoid(lost_all_but_one, moments))
    premium = (3.0 - 1.0 / useful) * useful
    # The saving over the hours left is the machine's start-up and that premium.
    dearest = (left - premium * hours_sooner) / (left + 0.2)
    for usd, option in ((dearest - 0.001, 1), (dearest + 0.001, 0)):
        offers = options((1.0, 1.0, hazard, True), (1.0, usd, hazard, True), DEMAND)
        assert chosen(situation, offers, preferences).option == option
        without = dataclasses.replace(situation, seconds_to_deadline=None)
        assert chosen(without, offers, preferences).option == 1


def test_a_job_short_of_time_does_not_move_for_less_time_than_the_move_takes():
    """A machine that has just come back lasts as long again: too short to make up for its start."""
    there = dataclasses.replace(
        options((1.0, 1.0, 0.5, True), (1.0, 1.0, 0.0, True), DEMAND),
        there_seconds=np.array([9e9, 600.0, 9e9]),
    )
    steps = 100 * 3600.0
    situation = Situation(steps=steps, at=0, seconds_to_deadline=steps + 3600.0)
    assert chosen(situation, there).option == 0
    settled = dataclasses.replace(there, there_seconds=np.array([9e9, 9e9, 9e9]))
    assert chosen(situation, settled).option == 1


@pytest.mark.parametrize("slack", [None, 3600.0, 1e6])
def test_what_cannot_be_had_any_more_is_left(slack):
    """Also for a machine that has just come back."""
    steps = 100 * 3600.0
    gone = options((1.0, math.nan, 0.5, True), (1.0, 1.0, 0.0, True), DEMAND)
    gone = dataclasses.replace(gone, there_seconds=np.array([0.0, 0.0, 9e9]))
    situation = Situation(steps=steps, at=0, seconds_to_deadline=slack and steps + slack)
    assert chosen(situation, gone).option == 1


def test_at_the_last_moment_only_on_demand_is_sure():
    """With a cheaper spot machine available."""
    steps = 10 * 3600.0
    tight = Situation(steps=steps, seconds_to_deadline=10.1 * 3600.0)
    choice = chosen(tight, options(SPOT, DEMAND))
    assert (choice.option, choice.reason) == (1, "deadline")
    roomy = Situation(steps=steps, seconds_to_deadline=12 * 3600.0)
    assert chosen(roomy, options(SPOT, DEMAND)).option == 0


def test_dear_machines_are_waited_away_like_none():
    """Twice the price that spot machines have when they are there; a little more is taken."""
    for usd, option in ((2.9, WAIT), (1.1, 1)):
        offers = options((1.0, math.nan, 0.1, True), (1.0, usd, 0.1, True), DEMAND)
        offers = dataclasses.replace(offers, listed_usd_per_hour=np.array([1.0, usd, 3.0]))
        found = chosen(Situation(steps=100 * 3600.0, seconds_to_deadline=130 * 3600.0), offers)
        assert found.option == option


def test_what_comes_and_goes_has_to_prove_itself():
    """A job on demand leaves for it, or carries its data there, once it has lasted."""
    for there, away, first in ((0.0, 1, 1), (7200.0, 0, 0)):
        seconds = np.array([there, np.inf, np.inf])
        offers = options((1.0, 1.0, 0.1, True), (1.0, 1.2, 0.0, True), DEMAND)
        offers = dataclasses.replace(offers, there_seconds=seconds)
        far = Situation(steps=100 * 3600.0, seconds_to_deadline=150 * 3600.0, move_usd=np.array([0.5, 0, 0]))
        assert chosen(far, offers).option == first
        sure = dataclasses.replace(offers, usd_per_hour=np.array([1.0, math.nan, 3.0]))
        demand = Situation(steps=100 * 3600.0, seconds_to_deadline=130 * 3600.0, at=2)
        quick = Preferences(review_seconds=60.0)
        assert chosen(demand, sure, quick).option == (2 if away else 0)


OFFER = st.tuples(st.floats(0.1, 10), st.floats(0.1, 10))


def test_an_option_above_the_line_between_two_others_is_not_on_the_hull():
    """Two machines in turn do the same steps for less; both of two equal ones count."""
    rate, usd = np.array([2.0, 4.0, 1.5, 1.5, 0.0]), np.array([2.0, 5.0, 1.0, 1.0, np.nan])
    cost = np.where(rate > 0, usd / np.where(rate > 0, rate, 1.0), np.inf)
    assert on_hull(rate, cost).tolist() == [False, True, True, True, False]
    assert on_hull(np.array([1.0, 3.0]), np.array([2.0, 1.0])).tolist() == [False, True]


@pytest.mark.slow
@given(st.lists(OFFER, min_size=1, max_size=5), st.floats(1.05, 5))
@example([(2.0, 2.0), (4.0, 5.0), (1.5, 1.0)], 2.0)
def test_constant_prices_without_losses_give_the_linear_programs_cost(rows, slack):
    """Section 6.4.3 for one job: following the choice costs what optimal shares cost."""
    speed, usd = (np.array(column) for column in zip(*rows, strict=True))
    deadline, steps = 100 * 3600.0, 100 * 3600.0 / slack * speed.max()
    kinds = tuple(f"t{k}" for k in range(len(rows)))
    instance = dataclasses.replace(
        from_arrays(
            gpu_types=kinds,
            capacity=np.ones(len(rows)),
            gpus=np.ones(1),
            throughput=speed[None, :],
        ),
        steps_remaining=np.array([steps]),
        deadlines=np.array([deadline]),
        usd_per_hour=dict(zip(kinds, usd.tolist(), strict=True)),
    )
    answer = min_cost_slo.solve(instance)
    least = float(answer.x @ usd[instance.columns.kind]) / 3600.0
    least *= steps / float(instance.throughput(answer.x)[0])
    offers = options(*[(s, u, 0.0, False) for s, u in rows])
    preferences = Preferences(restart=FREE, hysteresis=0.0, speed_margin=0.0, review_seconds=600.0)
    now, left, at, spent = 0.0, steps, WAIT, 0.0
    useful = np.ones(len(rows))
    while left > 0 and now < 2 * deadline:
        situation = Situation(steps=left, seconds_to_deadline=deadline - now, at=at)
        at = choose(situation, offers, preferences, useful).option
        seconds = min(600.0, left / speed[at])
        now, left, spent = now + seconds, left - seconds * speed[at], spent + usd[at] * seconds / 3600.0
        left = 0.0 if left < 1e-6 else left
    assert now <= deadline * (1 + 1e-9)
    # The safety net moves to the fastest machine one review early: one review at the dearest price.
    assert spent <= least * 1.02 + usd.max() * 2 * preferences.review_seconds / 3600.0


@given(
    rows=st.lists(
        st.tuples(
            st.floats(0.1, 10),
            st.floats(0.1, 10) | st.just(math.nan),
            st.just(0.1) | st.floats(0, 30),
            st.booleans(),
        ),
        min_size=1,
        max_size=6,
    ),
    at=st.integers(WAIT, 5),
    steps=st.sampled_from([1.0, 1e3, 1e5, 1e7]),
    deadline=st.none() | st.floats(-1e5, 1e6),
    seconds=st.tuples(st.sampled_from([0.0, 180.0, 3600.0]), st.sampled_from([0.0, 30.0, 3000.0])),
    may_use_spot=st.booleans(),
)
@example([SPOT, (1.0, 0.5, 0.1, True), DEMAND], 0, 1e5, 1.1e5, (0.0, 0.0), True)
@example([(1.0, 1.0, 15.0, False)], 0, 1.0, 0.0, (0.0, 3000.0), False)  # it is lost before each save
def test_a_choice_is_always_something_that_can_be_had(rows, at, steps, deadline, seconds, may_use_spot):
    """Whatever the prices, rates and deadlines, wherever the job runs; on demand after the deadline."""
    offers, at = options(*rows), at if at < len(rows) else WAIT
    restart = RestartCosts(startup_seconds=seconds[0], checkpoint_seconds=seconds[1])
    preferences = Preferences(restart=restart, may_use_spot=may_use_spot)
    found = chosen(Situation(steps=steps, seconds_to_deadline=deadline, at=at), offers, preferences).option
    gains = np.isfinite(usd_per_step(offers, useful_parts(offers, restart)))
    if found == WAIT:
        assert deadline is None or deadline > 0 or not (gains & ~offers.spot).any()
    else:
        assert np.isfinite(offers.usd_per_hour[found]) and (may_use_spot or not offers.spot[found])


def test_prices_that_scale_together_change_nothing():
    """A currency is no reason to move."""
    rows = [(1.0, 1.0, 0.1, True), (2.0, 1.7, 0.2, True), (2.0, 5.0, 0.0, False)]
    for factor in (0.01, 100.0):
        scaled = options(*[(s, u * factor, h, spot) for s, u, h, spot in rows])
        for at in (WAIT, 0, 1, 2):
            assert chosen(Situation(steps=1e6, at=at), scaled) == chosen(
                Situation(steps=1e6, at=at), options(*rows)
            )
