"""How a rank that is told to stop votes on the end of the job."""

import multiprocessing
import os
import signal

import pytest
from ballast_policies.contract.messages import HANDOVER_ENV
from ballast_trainer.distributed.stopping import (
    LEAVE_SECONDS,
    STOP_SECONDS_ENV,
    StopSignal,
    handover_seconds,
    stop_seconds,
)
from ballast_trainer.errors import ConfigurationError

from tests.support.waiting import WAIT_SECONDS

RANKS = 4


class Told:
    """Signals of all ranks, told at the same moment, with a clock that moves when told."""

    def __init__(self, *ranks: int, handover: float = 15.0, grace: float | None = 30.0) -> None:
        self.now = 0.0
        self.signals = [StopSignal(handover_seconds=handover, clock=lambda: self.now) for _ in range(RANKS)]
        for stop in self.signals:
            stop.seconds = grace
        for rank in ranks:
            self.signals[rank].receive()

    def stops(self, saving_seconds: float = 0.1) -> bool:
        votes = [
            stop.votes(rank, RANKS, saving_seconds=saving_seconds) for rank, stop in enumerate(self.signals)
        ]
        return sum(votes) >= RANKS


def test_ranks_that_may_be_released_wait_for_it_and_then_ask_all_to_save():
    """Two of four pods are evicted: for half of the grace the job trains on."""
    told = Told(1, 3)
    assert not told.stops()
    told.now = 14.9
    assert not told.stops()
    told.now = 15.0
    assert told.stops()


@pytest.mark.parametrize("ranks", [(0,), (0, 3), (0, 1, 2, 3)], ids=["rank 0", "rank 0 and another", "all"])
def test_a_job_that_nobody_could_continue_saves_at_once(ranks):
    """Rank 0 is never released, and of a job that is deleted all ranks are told."""
    assert Told(*ranks).stops()


def test_without_an_operator_that_releases_ranks_the_job_saves_at_once():
    """Under torchrun, and of a job of one size, waiting would win nothing."""
    assert Told(2, handover=0.0).stops()
    assert not Told().stops()


def test_a_slow_save_shortens_the_wait():
    """Twice the time to save is kept, whatever the operator allows."""
    told = Told(2)
    told.now = 30.0 - LEAVE_SECONDS - 2 * 10.0
    assert not told.stops(saving_seconds=9.9)
    assert told.stops(saving_seconds=10.0)
    told.now = 0.0
    assert told.stops(saving_seconds=20.0)


def test_a_second_signal_does_not_begin_the_wait_again():
    """A kubelet and a node agent may both send one."""
    told = Told(2)
    told.now = 10.0
    told.signals[2].receive()
    told.now = 15.0
    assert told.stops()


def test_the_time_to_wait_comes_from_the_environment():
    """The operator sets it where a plan may release ranks."""
    assert handover_seconds({}) == 0.0
    assert handover_seconds({HANDOVER_ENV: "15"}) == 15.0
    with pytest.raises(ConfigurationError, match=HANDOVER_ENV):
        handover_seconds({HANDOVER_ENV: "soon"})


def test_a_deadline_that_is_none_is_refused():
    """With the variable's name."""
    with pytest.raises(ConfigurationError, match=STOP_SECONDS_ENV):
        stop_seconds({STOP_SECONDS_ENV: "soon"})
    assert (stop_seconds({}), stop_seconds({STOP_SECONDS_ENV: "30"})) == (None, 30.0)


def _fork_one(told):
    """A rank that forks, as a user's pool does; tells how the fork ended, and whom it would have woken."""
    StopSignal().install(seconds=60.0, overdue=print)
    told_by_fork, tells = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(tells, str(signal.set_wakeup_fd(-1)).encode())
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(3)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    told.put((status, int(os.read(told_by_fork, 16))))


def test_a_process_that_a_user_forks_ends_by_sigterm_alone():
    """``multiprocessing.Pool`` ends its processes so and waits for them; the job is not told to stop."""
    spawned = multiprocessing.get_context("spawn")
    told = spawned.Queue()
    rank = spawned.Process(target=_fork_one, args=(told,))
    rank.start()
    assert told.get(timeout=WAIT_SECONDS) == (-signal.SIGTERM, -1)
    rank.join()
