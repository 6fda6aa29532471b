"""The operator's wall clock is set wrong while jobs run: what they are billed, and what ends them."""

import datetime
import email.utils
import random
import time
from collections.abc import Mapping
from typing import Any

import pytest
from ballast_operator.views.clock import FOLLOWED_AFTER_SECONDS, SteadyClock

from tests.operator.loops.simulated.simulation import START, Simulation, at

TICK_SECONDS, TICKS = 60.0, 90


class Steady(Simulation):
    """Whose operator reads a ``SteadyClock`` of a wall clock that is ``ahead``."""

    def start_operator(self) -> None:
        self.clock = SteadyClock(super()._time, self._seconds)
        super().start_operator()

    def _time(self) -> datetime.datetime:
        return self.clock()


async def after(aheads: Mapping[int, float], *, answers: bool = False, **spec: Any) -> Steady:
    """A job of two GPUs after all ticks; ``aheads``: from a tick on the clock is so many seconds ahead.

    ``answers``: those of the API server say its time, which is right.
    """
    simulation = Steady(nodes={"a": ("fast", 2)}, pools={"fast": {"pricePerGpuHour": 36.0}})
    simulation.add_job("one", totalSteps=1_000_000, **spec)
    for tick in range(TICKS):
        simulation.ahead = datetime.timedelta(seconds=aheads.get(tick, simulation.ahead.total_seconds()))
        if answers:
            date = email.utils.format_datetime(simulation.now, usegmt=True)
            simulation.clock.heard(date, (simulation.now + simulation.ahead).timestamp())
        if tick == TICKS - 1:  # what it has cost is summed up when it lets go of its GPUs
            simulation.change("one", suspend=True)
        await simulation.tick(seconds=TICK_SECONDS)
    await simulation.ticks(5, seconds=TICK_SECONDS)
    return simulation


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
async def test_steps_that_are_taken_back_bill_and_end_nothing(seed: int):
    """By hours and by seconds, back and ahead: to the microsecond all is as with a clock that is right."""
    draw, tick, aheads = random.Random(seed), 3, dict[int, float]()
    most = int(FOLLOWED_AFTER_SECONDS / TICK_SECONDS)
    while tick < TICKS - 2 * most:
        aheads[tick] = draw.choice((-1.0, 1.0)) * draw.choice((3.0, 90.0, 3_600.0, 86_400.0, 31e6))
        tick += draw.randrange(1, most)
        if draw.random() < 0.7:  # else it is another step at once
            aheads[tick] = 0.0
            tick += draw.randrange(1, most)
    aheads[tick] = 0.0
    limits = {"deadline": at(7_000), "onDeadlineMissed": "Fail", "activeDeadlineSeconds": 6_000}
    right, wrong = await after({}, **limits), await after(aheads, **limits)
    assert wrong.state("one") == "Suspended"
    assert wrong.status("one") == right.status("one")
    assert wrong.status("one").cost_so_far == pytest.approx(TICKS * TICK_SECONDS * 2 * 0.01, rel=0.02)
    assert wrong.policy()["status"]["bill"] == right.policy()["status"]["bill"]


@pytest.mark.parametrize("ahead", [-7_200.0, 7_200.0])
async def test_a_step_that_lasts_counts_and_the_log_says_so(ahead: float, caplog: pytest.LogCaptureFixture):
    """The deadline is two hours off: only a clock that is ahead, and stays so, passes it."""
    simulation = await after({10: ahead}, deadline=at(7_300), onDeadlineMissed="Fail")
    assert simulation.state("one") == ("Failed" if ahead > 0 else "Suspended")
    assert simulation.clock() == simulation.now + simulation.ahead
    said = [record.message for record in caplog.records if "wall clock" in record.message]
    assert said == [
        f"the wall clock stepped by {ahead:+.0f} s; this counts if it is still so in 600 s",
        f"the operator's time steps by {ahead:+.0f} s, to the wall clock",
    ]


@pytest.mark.parametrize("ahead", [-7_200.0, 7_200.0])
async def test_a_wrong_clock_does_not_count_where_the_api_server_says_the_time(
    ahead: float, caplog: pytest.LogCaptureFixture
):
    """However long it is wrong: jobs and bill are as with a clock that is right."""
    limits = {"answers": True, "deadline": at(7_300), "onDeadlineMissed": "Fail"}
    right, wrong = await after({}, **limits), await after({10: ahead, 70: 0.0}, **limits)
    assert wrong.state("one") == "Suspended"
    assert wrong.status("one") == right.status("one")
    assert wrong.policy()["status"]["bill"] == right.policy()["status"]["bill"]
    said = [record.message for record in caplog.records if "clock" in record.message]
    fix = "s from the API server's, which counts. To fix: synchronise it (NTP)"
    off = f"{ahead:+.0f} {fix}"
    assert said == [f"this machine's clock is {text}" for text in (off, "as the API server's again")]


def test_a_new_operator_has_the_right_time_from_the_first_answer_on():
    """It is not a step: nothing was billed by the wrong time yet."""
    clock = SteadyClock(lambda: START + datetime.timedelta(days=1), lambda: 0.0)
    for date in ("", "yesterday", email.utils.format_datetime(START, usegmt=True)):
        clock.heard(date, (START + datetime.timedelta(days=1)).timestamp())
    assert clock() == START


@pytest.mark.parametrize(
    "date",
    [
        "Fri, 31 Dec 9999 23:59:59 GMT",
        f"Thu, 01 Jan {10**20} 00:00:00 GMT",
        f"Thu, 01 Jan 2026 00:00:00 +{10**20}",
        "Thu, 32 Jan 2026 00:00:00 GMT",
        "\0",
    ],
)
def test_a_date_that_cannot_be_is_none(date: str):
    """Of a proxy, perhaps: the clock goes on, and the request that it came with has not failed."""
    clock = SteadyClock(lambda: START, lambda: 0.0)
    clock.heard(date, START.timestamp())
    assert clock() == START


@pytest.mark.parametrize("zone", ["GMT", "+0200", "-0000", ""])
def test_a_date_without_a_zone_is_in_utc(zone: str, monkeypatch: pytest.MonkeyPatch):
    """Whatever the zone of the operator's machine is."""
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    clock = SteadyClock(lambda: START, lambda: 0.0)
    there = START.astimezone(datetime.timezone(datetime.timedelta(hours=2 * (zone == "+0200"))))
    clock.heard(f"{there:%a, %d %b %Y %H:%M:%S} {zone}", START.timestamp())
    monkeypatch.undo()
    time.tzset()
    assert clock() == START


def test_api_servers_whose_clocks_differ_neither_move_the_time_nor_flood_the_log(caplog):
    """They answer in turns: the first one's time goes on, and in 1000 s the log has a few lines of it."""
    seconds = [0.0]
    clock = SteadyClock(lambda: START + datetime.timedelta(seconds=seconds[0]), lambda: seconds[0])
    for second in range(1000):
        seconds[0] = float(second)
        now = START + datetime.timedelta(seconds=second)
        server = now + datetime.timedelta(seconds=30 * (second % 2))
        clock.heard(email.utils.format_datetime(server, usegmt=True), now.timestamp())
        assert clock() == now
    said = [record.message for record in caplog.records]
    assert 0 < len(said) <= 8
    assert len(set(said)) < len(said), "it was never said again"


def test_an_answer_that_takes_long_moves_no_clock():
    """The server said its time somewhere between the question and the answer."""
    clock = SteadyClock(lambda: START + datetime.timedelta(seconds=60), lambda: 0.0)
    server = START + datetime.timedelta(seconds=30)
    clock.heard(email.utils.format_datetime(server, usegmt=True), START.timestamp())
    assert clock() == START + datetime.timedelta(seconds=60)


def test_a_clock_that_is_slewed_is_followed_at_once():
    """A second too fast in a minute is nothing that passes by itself, and no step."""
    seconds = [0.0]
    clock = SteadyClock(lambda: START + datetime.timedelta(seconds=seconds[0] * 61 / 60), lambda: seconds[0])
    for minute in range(1, 100):
        seconds[0] = 60.0 * minute
        assert clock() == START + datetime.timedelta(seconds=61.0 * minute)
