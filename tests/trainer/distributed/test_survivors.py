"""Ranks notice every loss, whenever it comes, and a group that failed to begin hinders none that follows."""

import multiprocessing
import os
import random
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from ballast_trainer.distributed.connections import CONNECTIONS
from ballast_trainer.distributed.joining import Returning, wait_for_growth
from ballast_trainer.distributed.process_group import is_peer_failure, join
from ballast_trainer.distributed.stopping import StopSignal
from ballast_trainer.distributed.survivors import Fate, Survivors
from ballast_trainer.errors import PeerLost

from tests.support.examples import first_daily
from tests.support.gang import forks
from tests.support.plans import local_plan
from tests.support.waiting import WAIT_SECONDS, eventually
from tests.trainer.tensor_parallel.ranks import on_ranks

A, B, C = "job-1-0", "job-1-1", "job-1-2"


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def connection():
    """The other end of a connection of this process's group."""
    with socket.create_server(("127.0.0.1", 0)) as server, CONNECTIONS.opening():
        mine = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    theirs.setblocking(False)
    with mine, theirs:
        yield theirs
    CONNECTIONS.forget()


def is_open(connection):
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True


@pytest.mark.parametrize("names", [lambda s: s.enter([A, B]), lambda s: s.expect([B])])
def test_a_loss_is_noticed_that_was_told_before_its_rank_was_a_member(store, connection, names):
    """It is seen at a look before: between two groups, or as a rank that joins is killed."""
    survivors = Survivors(store, A)
    survivors.enter([A, C])
    Fate.GONE.tell(store, B)
    survivors.look(store)
    assert is_open(connection)
    names(survivors)
    survivors.look(store)
    assert not is_open(connection)


def test_a_process_killed_as_it_was_counted_on_begins_the_next_round(store, connection):
    """It has told what it holds, and was killed before it heard how all go on; in a pod it comes back."""
    mine, theirs, again = Survivors(store, A), Survivors(store.clone(), B), Survivors(store.clone(), B)
    mine.enter([A, B])
    theirs.enter([A, B])
    with ThreadPoolExecutor() as threads:
        threads.submit(theirs.agree, "old", lambda told: told[B])
        assert mine.agree("mine", lambda told: told[B]) == "old"
        mine.enter([A, B])
        mine.look(store)
        assert is_open(connection)
        heard = threads.submit(again.come_back, "new", [A, B])
        eventually(lambda: mine.look(store) or not is_open(connection), "its return is noticed")
        assert mine.agree("mine", lambda told: told[B]) == heard.result() == "new"


@pytest.mark.parametrize(
    ("others", "because"),
    [
        (lambda s: s.leave(), "job-1-0 has ended"),
        (lambda s: s.come_back("", [A, B]), "all ranks were killed"),
    ],
)
def test_a_process_does_not_come_back_where_none_is_left_that_could_decide(store, others, because):
    """In a pod: its end is that of a rank that lost the others, and the launch ends."""
    with ThreadPoolExecutor() as threads:
        threads.submit(others, Survivors(store.clone(), A))
        with pytest.raises(PeerLost, match=because):
            Survivors(store, B).come_back("", [A, B])


@pytest.mark.slow
def test_whoever_agrees_at_a_store_that_does_not_answer_is_woken():
    """Its node is gone, without an end of its connections: the rank goes on at another one."""
    here, there = multiprocessing.Pipe()
    server = forks().Process(target=_serves, args=(there,))
    server.start()
    try:
        survivors = Survivors(dist.TCPStore("127.0.0.1", here.recv(), is_master=False), A)
        survivors.enter([A, B])
        with ThreadPoolExecutor() as threads:
            agreed = threads.submit(survivors.agree, "", lambda told: "")
            eventually(lambda: survivors.agreeing, "it waits for the other one")
            os.kill(server.pid, signal.SIGSTOP)
            assert survivors.notice(None)
            try:
                error = agreed.exception(WAIT_SECONDS)
            finally:
                server.kill()
        assert is_peer_failure(error) and survivors.store_lost
    finally:
        server.kill()
        server.join()


def _serves(pipe):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    while True:
        signal.pause()


def test_no_plan_grows_that_has_a_rank_that_is_gone(store):
    """One that is killed may be back before the others have noticed: the grown plan would have it twice."""
    plan, returning = local_plan([A, B]), Returning(store, 1)
    back = threading.Thread(target=wait_for_growth, args=(store.clone(), f"{B}.1", StopSignal()))
    Fate.GONE.tell(store, B)
    back.start()
    eventually(lambda: store.check(["returning/1"]), "it is back")
    assert returning.growth(plan) == plan
    grown = returning.growth(plan.replace(ranks=plan.ranks[:1]))
    assert [rank.process for rank in grown.ranks] == [A, f"{B}.1"]
    back.join()


@pytest.mark.slow
def test_a_group_begins_after_one_that_has_failed_to(store):
    """A rank is lost as the others go on: those that had entered and those that had not meet in the next."""
    reached = store.clone()
    shutting = threading.Event()

    def shut():
        eventually(dist.get_pg_count, "the group is about to begin")
        while not shutting.is_set():
            CONNECTIONS.shut()

    waking = threading.Thread(target=shut)
    waking.start()
    with pytest.raises(PeerLost):
        enter(reached, [A, B], 1, 0)
    shutting.set()
    waking.join()
    other = forks().Process(target=_enters, args=(store.port,))
    other.start()
    world = enter(reached, [A, C], 2, 0)
    assert world.sum([2.0]) == [3.0]
    world.leave()
    other.join()
    assert other.exitcode == 0


def enter(store, processes, epoch, rank):
    return join(
        store=store,
        plan=local_plan(processes, epoch=epoch),
        rank=rank,
        device=torch.device("cpu"),
        timeout_seconds=120,
    )


def _enters(port):
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    world = enter(store, [A, C], 2, 1)
    assert world.sum([1.0]) == [3.0]
    world.leave()


def numbers_of(rank):
    """Of many magnitudes, so that the order of adding shows."""
    draw = random.Random(rank)
    return [draw.uniform(-1, 1) * 10.0 ** draw.randint(-8, 8) for _ in range(40)]


def several_sums(world):
    return torch.tensor([world.sum(numbers_of(world.rank)) for _ in range(3)], dtype=torch.float64)


@pytest.mark.processes
@pytest.mark.parametrize("ranks", first_daily([5, 2, 3, 8]))
def test_all_ranks_hold_the_same_sum_bit_for_bit(ranks):
    sums = on_ranks(several_sums, ranks)
    expected = torch.tensor([numbers_of(rank) for rank in range(ranks)], dtype=torch.float64).sum(0)
    for one in sums:
        assert torch.equal(one, sums[0])
    torch.testing.assert_close(sums[0], expected.expand(3, -1), rtol=1e-12, atol=1e-9)
