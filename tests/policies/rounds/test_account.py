"""What is owed to jobs, kept while shares change, and the order of claims by urgency."""

from collections import Counter

import numpy as np
import pytest
from ballast_policies.rounds.claims import by_urgency, priorities
from ballast_policies.rounds.memory import HALF_LIFE_ROUNDS, RoundMemory

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
