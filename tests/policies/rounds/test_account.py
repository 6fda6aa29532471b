"""What is owed to jobs, kept while shares change, and the order of claims by urgency."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
from ballast_policies.rounds.claims import by_urgency, priorities
from ballast_policies.rounds.memory import HALF_LIFE_ROUNDS, RoundMemory
from ballast_policies.rounds.values import Placement, PoolPart

from tests.policies.rounds.played import at, job, node, play

ROUND = 60.0


def shares_of(**share):
    return {job: {"v100": x} for job, x in share.items()}


def owed(**share):
    """The memory of job a, that was promised 800 s and had 400; ``share``: in force now."""
    return RoundMemory(
        promised={"a": {"v100": 800.0}}, received={"a": {"v100": 400.0}}, shares=shares_of(**share)
    )


def shares_of_round(number):
    """A little different from the last one's."""
    shift = 0.01 * (number % 3)
    return shares_of(a=0.5 - shift, b=0.3 + shift, c=0.2)


def test_jobs_get_their_shares_although_every_round_has_new_ones():
    """100 rounds of one GPU: 49, 31 and 20 of them, within three."""
    rounds = play([node("n0", 1)], [job(name) for name in "abc"], 100, shares=shares_of_round)
    turns = Counter(job for _, _, decided in rounds for job in decided.placements)
    assert turns["a"] == pytest.approx(49, abs=3)
    assert turns["b"] == pytest.approx(31, abs=3)
    assert turns["c"] == pytest.approx(20, abs=3)


def test_after_a_half_life_half_is_forgotten():
    """Promised and received alike, and what has passed since is added."""
    seconds = HALF_LIFE_ROUNDS * ROUND
    after = owed(a=0.5).until(seconds, {}, running={"a": at("n0")}, round_seconds=ROUND)
    assert after.promised["a"]["v100"] == pytest.approx(400.0 + 0.5 * seconds)
    assert after.received["a"]["v100"] == pytest.approx(200.0 + seconds)


def test_nothing_is_forgotten_of_a_job_that_waits():
    """What it is owed grows with every second of its share."""
    memory = owed(a=0.01)
    for number in range(100):
        memory = memory.until(
            ROUND * (number + 1), memory.shares, running={"b": at("n0")}, round_seconds=ROUND
        )
    assert memory.promised["a"]["v100"] == pytest.approx(800.0 + 0.01 * 100 * ROUND)
    assert memory.received["a"]["v100"] == pytest.approx(400.0)


def test_a_job_that_is_gone_has_its_account_closed():
    after = owed(b=1.0).until(1.0, {}, running={}, round_seconds=ROUND)
    assert set(after.promised) == set(after.received) == {"b"}


BOTH = Placement(
    gpu_type="v100",
    pool="a",
    nodes=("n0", "n1", "n1", "n1"),
    parts=(
        PoolPart(pool="a", gpu_type="v100", gpus=1),
        PoolPart(pool="spot", gpu_type="v100", gpus=3),
    ),
)
"""A gang with a quarter of its GPUs in pool a."""


def test_an_account_is_rebuilt_from_how_long_gangs_have_run():
    """At today's shares, as long as the oldest; a gang in two pools by its GPUs; clocks go back."""
    since = {"old": 100.0, "both": 300.0, "later": 900.0}
    memory = RoundMemory.from_running(
        {"old": at("n0"), "both": BOTH, "later": at("n0")},
        since,
        shares_of(old=0.5, both=0.25, waits=0.25),
        now=400.0,
        columns={"a": "sure", "spot": "cheap"},
    )
    assert memory.promised == shares_of(old=150.0, both=75.0, waits=75.0)
    assert memory.received == {
        "old": {"sure": 300.0},
        "both": {"sure": 25.0, "cheap": 75.0},
        "later": {"sure": 0.0},
    }


def test_a_gang_receives_by_the_pools_of_its_gpus_and_its_speed_beside_another():
    """Nothing passes by a clock that was set back."""
    memory = RoundMemory(shares=shares_of(a=0.5), at=100.0)
    options = {"running": {"a": BOTH}, "round_seconds": ROUND, "columns": {"spot": "cheap"}}
    later = memory.until(180.0, {}, **options, speeds={"a": 0.5})
    assert (later.promised, later.received) == (shares_of(a=40.0), {"a": {"v100": 10.0, "cheap": 30.0}})
    back = dataclasses.replace(later, shares=memory.shares).until(90.0, {}, **options)
    assert (back.promised, back.received) == (later.promised, later.received)


def test_priority_is_share_over_received_fraction():
    """Dissertation section 5.5: twice the share or half the time is twice the priority."""
    shares = np.array([[0.5, 0.5], [0.25, 0.0]])
    received = np.array([[820.0, 320.0], [320.0, 0.0]])
    found = priorities(shares, 820.0 * shares, received, round_seconds=360.0)
    np.testing.assert_allclose(found, [[0.5, 1.0], [0.5, 0.0]])


def test_urgency_goes_from_high_to_low_and_ties_by_the_keys_in_turn():
    """The order is decided by values alone, so it can be replayed."""
    order = by_urgency(np.array([1.0, 2.0, 2.0, 2.0]), np.array([0, 5, 5, 4]), np.array([0, 1, 0, 9]))
    assert order.tolist() == [3, 2, 1, 0]
