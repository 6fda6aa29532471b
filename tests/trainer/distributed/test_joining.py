"""Ranks that join wait until they are called, and the others never wait for one that has ended."""

import math
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ballast_policies.contract.plan import Directive
from ballast_trainer.distributed.joining import (
    announce_ready,
    call_new_ranks,
    new_ranks_ready,
    wait_until_called,
)
from ballast_trainer.distributed.process_group import World, reach_store, told_once
from ballast_trainer.distributed.stopping import StopSignal
from ballast_trainer.errors import PeerLost, Stopped
from ballast_trainer.loop.plan_following import PlanFollower

from tests.support.plans import local_plan
from tests.support.waiting import WAIT_SECONDS

OLD, FIRST, SECOND = "job-1-0", "job-1-1", "job-1-2"
GROWN = local_plan([OLD, FIRST, SECOND]).replace(epoch=2, directive=Directive.GROW)


@pytest.fixture
def world():
    """One rank that trains, and its store."""
    return World(
        epoch=1, rank=0, size=1, processes=(OLD,), device=torch.device("cpu"), store=dist.HashStore()
    )


def joins(store, process, entered):
    """Start a new rank of the grown plan on a thread."""

    def run():
        announce_ready(store, GROWN, process)
        wait_until_called(store, GROWN, process, StopSignal())
        entered.append(process)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_new_ranks_enter_together_once_all_are_there(world):
    """One alone is not called; both answer the call, and enter."""
    entered = []
    announce_ready(world.store, GROWN, FIRST)
    assert not call_new_ranks(world, GROWN)
    threads = [joins(world.store, process, entered) for process in (FIRST, SECOND)]
    for process in (FIRST, SECOND):
        announce_ready(world.store, GROWN, process)
    assert new_ranks_ready(world, GROWN)
    assert call_new_ranks(world, GROWN, seconds=WAIT_SECONDS)
    for thread in threads:
        thread.join(WAIT_SECONDS)
    assert sorted(entered) == [FIRST, SECOND]


def test_a_new_rank_that_has_ended_is_not_waited_for(world):
    """It was ready, then it was gone: no rank enters; a later call, which it answers, is a new one."""
    entered, now = [], [0.0]
    threads = [joins(world.store, FIRST, entered)]
    for process in (FIRST, SECOND):
        announce_ready(world.store, GROWN, process)

    def passes(seconds):
        now[0] += seconds

    assert not call_new_ranks(world, GROWN, sleep=passes, clock=lambda: now[0])
    assert not entered
    threads.append(joins(world.store, SECOND, entered))
    assert call_new_ranks(world, GROWN, seconds=WAIT_SECONDS)
    for thread in threads:
        thread.join(WAIT_SECONDS)
    assert sorted(entered) == [FIRST, SECOND]


def test_a_new_rank_that_is_told_to_stop_does_not_wait_for_the_others(world):
    """They may be in a long step: it has nothing to save, and they need not call it."""
    stop = StopSignal()
    for process in (FIRST, SECOND):
        announce_ready(world.store, GROWN, process)

    def sleep(seconds):
        stop.received = True

    with pytest.raises(Stopped, match="nothing to save"):
        wait_until_called(world.store, GROWN, FIRST, stop, sleep=sleep)
    assert not new_ranks_ready(world, GROWN)


def test_a_new_rank_that_is_told_to_stop_once_it_has_answered_does_not_count(world):
    """It waits for a slower one, and would be missed in the group that all the others enter."""
    stop, now = StopSignal(), [0.0]
    for process in (FIRST, SECOND):
        announce_ready(world.store, GROWN, process)

    def stops(seconds):
        stop.received = True

    def has_answered(seconds):
        raise TimeoutError

    def passes(seconds):
        if not now[0]:
            with pytest.raises(Stopped):
                wait_until_called(world.store, GROWN, FIRST, stop, sleep=stops)
            with pytest.raises(TimeoutError):
                wait_until_called(world.store, GROWN, SECOND, StopSignal(), sleep=has_answered)
        now[0] += seconds

    assert not call_new_ranks(world, GROWN, sleep=passes, clock=lambda: now[0])


def test_a_growth_that_is_taken_back_is_not_waited_for(world):
    """The operator has seen that a new pod has ended, and has written the next plan."""
    for process in (FIRST, SECOND):
        announce_ready(world.store, GROWN, process)
    assert not call_new_ranks(world, GROWN, replaced=lambda: True, seconds=math.inf)


def test_a_growth_that_has_replaced_the_agreed_plan_waits_for_its_own_ranks(world):
    """The ranks have agreed on plan 2; until rank 0 hands it out there is plan 3, whose ranks never came."""
    newest = GROWN.replace(epoch=3)
    model, run = SimpleNamespace(world=world), SimpleNamespace(plan=local_plan([OLD]))
    channel = SimpleNamespace(plan=lambda: newest)
    follower = PlanFollower(SimpleNamespace(model=model, run=run, channel=channel), saver=None)
    assert follower.newest_epoch() == 1
    assert follower.follow_plan(2) is None
    assert run.plan.epoch == 1
    assert model.world is world


def test_all_ranks_train_with_the_configuration_of_rank_0():
    """The user has changed it while the job ran, and the operator wrote it with the next plan."""
    store, before, after = dist.HashStore(), {"totalSteps": 9}, {"totalSteps": 9, "rebalance": {}}
    assert told_once(store, "config", before, tells=True) == before
    assert told_once(store, "config", after, tells=False) == before


@pytest.mark.slow
@pytest.mark.parametrize("told", [False, True])
def test_a_store_that_accepts_and_does_not_answer_is_not_waited_for_longer_than_a_rank(told):
    """Torch would wait for ever; a rank that is told to stop leaves at once."""
    stop = StopSignal()

    def tell():
        # The first looks whether anybody listens.
        with server.accept()[0], server.accept()[0]:
            stop.received = told
            ended.wait(WAIT_SECONDS)

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as pool:
        ended, port = threading.Event(), server.getsockname()[1]
        pool.submit(tell)
        ends = pytest.raises(Stopped) if told else pytest.raises(PeerLost, match=r"not answer on.*To fix: ")
        with ends:
            reach_store("127.0.0.1", port, WAIT_SECONDS if told else 1.0, stop)
        ended.set()
