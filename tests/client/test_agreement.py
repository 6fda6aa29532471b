"""Ranks leave after the same step, however far apart they are."""

import itertools
import socket
import struct
import threading
import time

import pytest
from ballast_client import agreement
from ballast_client.agreement import Follower, LastStep, Leader

from tests.support.waiting import WAIT_SECONDS, eventually


class Ranks:
    """Ranks that meet at the end of each step, as data-parallel ones do."""

    def __init__(self, count, *, ahead=0):
        self.lasts = [LastStep() for _ in range(count)]
        self.asked = []
        self.leader = Leader(
            self.lasts[0],
            address="127.0.0.1",
            port=0,
            ranks=count,
            token="t",
            asked=self.asked.append,
        )
        self.followers = [
            Follower(last, address="127.0.0.1", port=self.leader.port, rank=rank, token="t")
            for rank, last in enumerate(self.lasts)
            if rank
        ]
        self.done = [0] * count
        self.left = [None] * count
        self.ahead = ahead
        self.met = threading.Condition()
        self.threads = [
            threading.Thread(target=self._train, args=(rank,), daemon=True) for rank in range(count)
        ]
        for thread in self.threads:
            thread.start()

    def _train(self, rank):
        for step in itertools.count(1):
            with self.met:  # no rank is more than `ahead` steps before another: queues on a GPU are so deep
                self.met.wait_for(lambda step=step: min(self.done) >= step - 1 - self.ahead * rank)
                self.done[rank] = step
                self.met.notify_all()
            if self.lasts[rank].reached(step):
                self.left[rank] = step
                return

    def end(self):
        for thread in self.threads:
            thread.join(WAIT_SECONDS)
        for one in (self.leader, *self.followers):
            one.close()
        return self.left


@pytest.mark.parametrize(("count", "ahead"), [(1, 0), (2, 0), (4, 0), (3, 7)])
def test_all_ranks_leave_after_the_same_step(count, ahead):
    """Also where some are several steps ahead of others."""
    ranks = Ranks(count, ahead=ahead)
    while not ranks.leader.agree():
        pass
    left = ranks.end()
    assert len(set(left)) == 1 and left[0] is not None


def test_ranks_train_on_where_one_does_not_take_part(monkeypatch):
    """Nothing hangs, and a rank that comes later makes it possible."""
    monkeypatch.setattr(agreement, "MEET_SECONDS", 0.2)
    first, second = LastStep(), LastStep()
    leader = Leader(first, address="127.0.0.1", port=0, ranks=2, token="t", asked=print)
    assert not leader.agree()
    assert not first.reached(1)
    follower = Follower(second, address="127.0.0.1", port=leader.port, rank=1, token="t")
    monkeypatch.setattr(agreement, "MEET_SECONDS", WAIT_SECONDS)
    assert leader.agree()
    assert first.reached(2)
    while not second.reached(2):
        time.sleep(0.01)
    leader.close()
    follower.close()


class Held(LastStep):
    """Answers once it is told to."""

    def __init__(self):
        super().__init__()
        self.asked, self.may_answer, self.answers = threading.Event(), threading.Event(), []

    def hold(self):
        self.asked.set()
        self.may_answer.wait(WAIT_SECONDS)
        self.answers.append(super().hold())
        return self.answers[-1]


def test_an_answer_that_came_too_late_does_not_count(monkeypatch):
    """The rank has trained on since, and is asked again."""
    monkeypatch.setattr(agreement, "MEET_SECONDS", 0.2)
    first, second = LastStep(), Held()
    leader = Leader(first, address="127.0.0.1", port=0, ranks=2, token="t", asked=print)
    follower = Follower(second, address="127.0.0.1", port=leader.port, rank=1, token="t")
    while not second.asked.is_set():
        assert not leader.agree()
    second.may_answer.set()
    eventually(lambda: second.answers, "it answers")
    assert not second.reached(40)
    monkeypatch.setattr(agreement, "MEET_SECONDS", WAIT_SECONDS)
    assert leader.agree()
    assert not first.reached(40) and first.reached(41)
    leader.close()
    follower.close()


def test_a_rank_that_waits_continues_when_rank_0_is_lost():
    """Its connection ends: there is no agreement any more."""
    last = LastStep()
    last.hold()
    leader = Leader(LastStep(), address="127.0.0.1", port=0, ranks=2, token="t", asked=print)
    follower = Follower(last, address="127.0.0.1", port=leader.port, rank=1, token="other")
    assert last.reached(5) is False  # the wrong token: rank 0 hangs up, and the hold is released
    leader.close()
    follower.close()


@pytest.mark.parametrize("said", [b"join \xff 1\n", b"join t 2\n", b"GET / HTTP/1.1\n", b""])
def test_a_stranger_is_hung_up_on_without_an_error(said):
    """A scanner of ports, say, which may reset the connection."""
    leader = Leader(LastStep(), address="127.0.0.1", port=0, ranks=2, token="t", asked=print)
    others = set(threading.enumerate())
    with socket.create_connection(("127.0.0.1", leader.port), WAIT_SECONDS) as stranger:
        if said:
            stranger.sendall(said)
            assert stranger.recv(1) == b""
        else:
            eventually(lambda: started_since(others), "it is listened to")
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    for thread in started_since(others):
        thread.join(WAIT_SECONDS)
    leader.close()


def started_since(others):
    return [thread for thread in {*threading.enumerate()} - others if thread.is_alive()]


def test_a_rank_that_is_told_to_end_asks_rank_0():
    """A node is drained under one rank only: all save."""
    heard = threading.Event()
    leader = Leader(
        LastStep(), address="127.0.0.1", port=0, ranks=3, token="t", asked=lambda why: heard.set()
    )
    follower = Follower(LastStep(), address="127.0.0.1", port=leader.port, rank=2, token="t")
    follower.ask()
    assert heard.wait(WAIT_SECONDS)
    leader.close()
    follower.close()
