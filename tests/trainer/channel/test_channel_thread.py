"""The channel thread retries, never blocks training, and tells at once what cannot wait."""

import threading

import pytest
from ballast_client.api_server import ChannelError
from ballast_policies.contract.messages import Rank
from ballast_policies.contract.plan import Directive, Plan
from ballast_trainer.channel import channel_thread as channel_thread_module
from ballast_trainer.channel.base import Messages
from ballast_trainer.channel.channel_thread import ChannelThread
from ballast_trainer.distributed.stopping import StopSignal

from tests.support.waiting import WAIT_SECONDS, eventually
from tests.trainer.channel.messages import ACK, PLAN, REPORT


@pytest.fixture(autouse=True)
def looks_often(monkeypatch):
    """The thread's own pause between two looks is half a second."""
    monkeypatch.setattr(channel_thread_module, "POLL_SECONDS", 0.01)


class UnreliableChannel:
    """Fails a number of times, then keeps what it is given."""

    def __init__(self, failures, error=None):
        self.failures, self.error = failures, error or ChannelError("not now")
        self.written = Messages()
        self.plan = PLAN

    def read_plan(self):
        """The plan set by the test."""
        return self.plan

    def read_config(self):
        """Not used."""

    def write(self, messages):
        """Fail, or keep."""
        if self.failures:
            self.failures -= 1
            raise self.error
        self.written = self.written.replaced_by(messages)


def test_messages_that_could_not_be_sent_are_sent_again():
    """An acknowledgement survives two failed calls."""
    channel = UnreliableChannel(failures=2)
    channel_thread = ChannelThread(channel, PLAN)
    channel_thread.send(Messages(ack=ACK))
    channel_thread.send(Messages(report=REPORT), now=False)
    eventually(lambda: channel.written.ack == ACK, "the acknowledgement arrives")
    channel_thread.close(finished_step=12)
    assert channel.written.report == REPORT
    assert channel.written.finished_step == 12


@pytest.mark.parametrize("error", [ChannelError("not now"), RuntimeError("can't start new thread")])
def test_an_outage_is_told_once(caplog, error):
    """Not at each look; whatever it is, the Lease is renewed afterwards, or the job would count as hung."""
    channel = UnreliableChannel(failures=5, error=error)
    channel_thread = ChannelThread(channel, PLAN, renew_seconds=0.01)
    for outage in (1, 2):
        eventually(lambda: channel.failures == 0, "it is over")
        channel_thread.send(Messages(ack=ACK))
        eventually(lambda: channel.written.ack == ACK, "the acknowledgement arrives")
        told = [record.getMessage() for record in caplog.records]
        assert told.count(f"channel: {error}; trying again") == outage
        channel.failures, channel.written = 5, Messages()
    channel_thread.close()


def test_that_the_job_is_done_is_told_however_often_that_fails():
    """As while the API server restarts: without it, the operator would launch the job again."""
    channel = UnreliableChannel(failures=20)
    ChannelThread(channel, PLAN).close(finished_step=12)
    assert (channel.written.finished_step, channel.written.closing) == (12, True)


def test_a_channel_that_stays_away_does_not_keep_the_process(monkeypatch):
    monkeypatch.setattr(channel_thread_module, "FINISH_SECONDS", 0.0)
    channel_thread = ChannelThread(UnreliableChannel(failures=float("inf")), PLAN)
    channel_thread.close(finished_step=12)
    eventually(lambda: not channel_thread._thread.is_alive(), "the thread ends")


def test_a_process_that_is_told_to_stop_gives_up_telling_that_the_job_is_done(monkeypatch):
    """Its pod is deleted: it ends before it is killed, and not after the two minutes meant for it."""
    monkeypatch.setattr(channel_thread_module, "CLOSE_SECONDS", 0.0)
    stop, stays_away = StopSignal(), UnreliableChannel(failures=float("inf"))
    channel_thread = ChannelThread(stays_away, PLAN, stop=stop)
    closing = threading.Thread(target=channel_thread.close, kwargs={"finished_step": 12}, daemon=True)
    closing.start()
    eventually(lambda: channel_thread._outbox.finished_step == 12, "it tries")
    stop.receive()
    eventually(lambda: not closing.is_alive(), "it gives up")


@pytest.mark.parametrize("finished_step", [None, 12])
def test_a_process_that_is_told_to_stop_tries_its_last_messages_again(monkeypatch, finished_step):
    """Also where its save has taken most of the grace period: the Lease is given up."""
    monkeypatch.setattr(channel_thread_module, "CLOSE_SECONDS", WAIT_SECONDS)
    stop, channel = StopSignal(), UnreliableChannel(failures=0)
    channel_thread = ChannelThread(channel, PLAN, stop=stop)
    eventually(lambda: channel_thread._written > 0, "it has told of itself")
    stop.receive()
    channel.failures = 2
    channel_thread.close(finished_step=finished_step)
    assert (channel.written.finished_step, channel.written.closing) == (finished_step, True)


def test_a_new_plan_is_seen_while_training_runs():
    channel = UnreliableChannel(failures=0)
    channel_thread = ChannelThread(channel, PLAN)
    ranks = (Rank(rank=0, pod="a-1-0", address="127.0.0.1", gpu_type="v100"),)
    channel.plan = Plan(job="a", epoch=2, launch=1, directive=Directive.SHRINK, ranks=ranks)
    eventually(lambda: channel_thread.plan().epoch == 2, "the new plan is seen")
    channel_thread.close()


class CountingChannel(UnreliableChannel):
    """Keeps every message that was written, in order."""

    def __init__(self):
        super().__init__(failures=0)
        self.all = []

    def write(self, messages):
        """Keep."""
        self.all.append(messages)
        super().write(messages)


def test_progress_waits_for_the_next_renewal():
    """What happens is told at once; a report that tells of steps alone is not, nor is it lost at the end."""
    channel = CountingChannel()
    channel_thread = ChannelThread(channel, PLAN, renew_seconds=3600)
    channel_thread.send(Messages(ack=ACK, report=REPORT))
    eventually(lambda: channel.written.report == REPORT, "the first report")
    later = REPORT.replace(step=REPORT.step + 1)
    channel_thread.send(Messages(report=later), now=False)
    channel_thread.send(Messages(ack=ACK))
    eventually(lambda: channel.all[-1].report == later, "the report goes out with an acknowledgement")
    count = len(channel.all)
    channel_thread.send(Messages(report=REPORT.replace(step=REPORT.step + 2)), now=False)
    channel_thread.close()
    assert len(channel.all) == count + 1
    assert (channel.all[-1].report.step, channel.all[-1].closing) == (REPORT.step + 2, True)


def test_the_lease_is_renewed_without_anything_to_tell():
    """A loop that stands still in a long step is alive."""
    channel = CountingChannel()
    channel_thread = ChannelThread(channel, PLAN, renew_seconds=0.01)
    eventually(lambda: len(channel.all) > 2, "renewals")
    channel_thread.close()


def test_a_report_of_an_event_does_not_wait_for_the_next_renewal(monkeypatch):
    """A checkpoint: it is told after a part of the time between two renewals, by a clock of the test's."""
    now = [100.0]
    monkeypatch.setattr(channel_thread_module, "monotonic", lambda: now[0])
    channel = CountingChannel()
    channel_thread = ChannelThread(channel, PLAN, renew_seconds=2.0)
    channel_thread.send(Messages(report=REPORT))
    eventually(lambda: channel.written.report == REPORT, "the first report")
    saved = REPORT.replace(checkpoint_step=REPORT.step)
    channel_thread.send(Messages(report=saved), now=False)
    now[0] += 0.6
    eventually(lambda: channel.written.report == saved, "the checkpoint")
    assert sum(messages.report is None for messages in channel.all) <= 1
    channel_thread.close()


def test_the_rate_of_losses_may_change_within_an_epoch():
    """Nothing else of a plan may: a change of ranks has another epoch."""
    channel = CountingChannel()
    channel_thread = ChannelThread(channel, PLAN)
    other = PLAN.replace(failures_per_hour=0.5, reason="another", launch=PLAN.launch + 1)
    channel.plan = other
    eventually(lambda: channel_thread.plan().failures_per_hour == 0.5, "the rate")
    assert channel_thread.plan() == PLAN.replace(failures_per_hour=0.5)
    channel_thread.close()
