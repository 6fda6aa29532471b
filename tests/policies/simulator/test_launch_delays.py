"""What a start costs in the simulation: its GPUs are held, and nothing is done."""

import functools

import pytest
from ballast_policies.simulator.settings import SettingsError

from tests.support.simulations import job, simulated, simulation, table

TABLE = table({("job", 1): {"v100": 1.0}})
SETTINGS = {"policy": "max-min-fairness", "round_seconds": 10.0}


def finishes(steps, *, gpus=1, arrivals=None, **settings):
    jobs = list(map(functools.partial(job, "job"), steps, arrivals or [0.0] * len(steps)))
    found = []
    for arrays in (False, True):
        result = simulated(jobs, {"v100": gpus}, TABLE, **SETTINGS, **settings, arrays=arrays)
        found.append([one["finish"] for one in result.to_json(per_job=True)["jobs"]])
    assert found[0] == pytest.approx(found[1], rel=1e-12)
    return found[0]


def test_a_gang_that_keeps_its_gpus_pays_its_launch_once():
    """However many rounds it runs, and whatever leaving costs."""
    assert finishes([35.0], launch_seconds=4.0, stop_seconds=2.0) == [39.0]


def test_gangs_that_take_turns_pay_for_each_turn():
    """By hand: 9 + 7 steps in two turns; then 6 of one (3 s of change), then 8 of the other (1 s)."""
    assert finishes([15.0, 15.0], launch_seconds=1.0, stop_seconds=2.0) == [29.0, 38.0]


def test_a_gang_that_finds_idle_gpus_does_not_wait_for_others_to_leave():
    """Who arrives in the middle of a round pays its launch alone."""
    assert finishes([20.0, 20.0], gpus=2, arrivals=[0.0, 3.0], launch_seconds=1.0, stop_seconds=5.0) == [
        21,
        24,
    ]


def test_a_gang_that_is_stopped_trains_on_for_the_notice():
    """By hand: half a second less is left after each of two turns that end with the other's."""
    assert finishes([15.0, 15.0], launch_seconds=1.0, stop_seconds=2.0, notice_seconds=0.5) == [28.5, 37.0]


def test_a_gang_whose_rest_takes_less_than_the_notice_is_done_with_it():
    """It is not launched again for the last step."""
    assert finishes([9.25, 15.0], launch_seconds=1.0, stop_seconds=2.0, notice_seconds=0.5) == [10.25, 28.0]


def test_without_costs_nothing_changes():
    """Zero is as if there were no such setting."""
    assert finishes([15.0, 15.0], launch_seconds=0.0, stop_seconds=0.0) == finishes([15.0, 15.0])


@pytest.mark.parametrize("settings", [{"ideal": True}, {"rules": "gavel"}])
def test_costs_of_starts_are_refused_where_they_would_not_count(settings):
    """Gavel's rules and ideal shares have none."""
    with pytest.raises(SettingsError, match=r"launch_seconds: 1 s.*To fix"):
        simulation(**SETTINGS, launch_seconds=1.0, **settings)


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_impossible_costs_are_named(seconds):
    """With the option's name."""
    with pytest.raises(SettingsError, match="stop_seconds"):
        simulation(**SETTINGS, stop_seconds=seconds)
