"""The thread that keeps what jobs did after they are deleted.

Nobody waits for it. What it cannot write waits in a bounded queue, and beyond that is dropped and counted: a
full disk, a locked or a broken file, a database that is away cost history, never a job.
"""

import contextlib
import dataclasses
import logging
import math
import os
import queue
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ballast_policies.contract.decode import decode_text
from ballast_policies.contract.errors import ContractError

from ballast_operator.errors import HistoryError, RowsRefused
from ballast_operator.history.recent import Happened, Recent
from ballast_operator.history.recording import TWIN, Decided, JobRecord, Kept, Rows, TwinResult
from ballast_operator.kube.kinds import Object
from ballast_operator.metrics import Metrics

if TYPE_CHECKING:  # SQLAlchemy takes 40 MiB: only an operator that keeps history has it
    from ballast_operator.history.store import History

logger = logging.getLogger(__name__)

MOST_WAITING = 20_000
"""Rows that wait to be written."""

WRITE_SECONDS, TRIM_SECONDS, TOLD_SECONDS = 2.0, 600.0, 60.0
DECIDED_SECONDS, FIRST_REPLAY_SECONDS, REPLAY_SECONDS = 10.0, 3_600.0, 86_400.0
REPLAY_CPU_SECONDS = 3_600
MOST_BATCH = 2_000

GONE = "it was gone when an operator began to lead: deleted before, or not in a backup that was restored"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Limits of history: jobs that have changed in so many days, and so many of them, the newest."""

    days: float = 90.0
    jobs: int = 100_000


class HistoryWriter:
    """The thread that writes what ``recent`` tells into the database ``history``, which is its alone.

    What happens while this replica does not lead is left out. ``work_out``: this thread is the one that works
    out what ``recent`` has noted; else it does so at the end alone, after the other.

    Attributes:
        twin: how far the last replay of what is kept was off; None: there was none.
    """

    def __init__(
        self,
        history: "History",
        recent: Recent,
        metrics: Metrics,
        *,
        keep: Keep,
        leads: Callable[[], bool],
        work_out: bool,
    ) -> None:
        self._history, self._recent, self._metrics, self._keep = history, recent, metrics, keep
        self._leads, self._works_out, self._clock = leads, work_out, recent.clock
        self._waiting: queue.Queue[JobRecord | Happened | Kept] = queue.Queue(MOST_WAITING)
        self._batch: list[JobRecord | Happened | Kept] = []
        self._trimmed_at = self._told_at = self._led_until = float("-inf")
        self._rows, self._decided_at = Rows(), float("-inf")
        self._decided: Decided | None = None
        self._present: tuple[float, str, frozenset[str]] | None = None
        self.twin: TwinResult | None = None
        self._replaying: subprocess.Popen[bytes] | None = None
        self._replay_at, self._twin_read = recent.clock() + FIRST_REPLAY_SECONDS, False
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="history", daemon=True)
        recent.told = self._told

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def hand_over(self) -> None:
        """Still take in what is noted by now: this replica is about to give its lease back."""
        if self._leads():
            self._led_until = self._clock()

    def stop(self) -> None:
        """Write what waits and what is noted, and end; no later than in ten seconds."""
        self._ends.set()
        self._thread.join(timeout=10.0)

    def _told(self, at: float, news: Object | Happened, deleted: bool) -> None:
        """Take in a job that has changed or is deleted, or what has happened to one."""
        if at > self._led_until and not self._leads():
            return
        try:
            if isinstance(news, Happened):
                self._waiting.put_nowait(news)
                return
            record = JobRecord.of(news, at, deleted=deleted)
            self._waiting.put_nowait(record)
            for row in self._rows.of_job(record.uid, news, at, deleted=deleted):
                self._waiting.put_nowait(row)
        # Or a status that nobody here has written.
        except (queue.Full, LookupError, TypeError, ValueError, AttributeError):
            self._metrics.history_dropped.inc()

    def compare(self, present: Iterable[Object], namespace: str) -> None:
        """Take in all jobs of a namespace (empty: of the cluster) as a leader finds them. From any thread.

        Others that are in history have been deleted while nobody looked, or by a restore of etcd.
        """
        self._present = self._clock(), namespace, frozenset(item["metadata"]["uid"] for item in present)

    def _end_missing(self) -> None:
        if self._present is None:
            return
        at, namespace, present = self._present
        of = [namespace] if namespace else None
        known = self._history.jobs(namespaces=of, deleted=False, most=self._keep.jobs)
        rows: list[JobRecord | Happened] = []
        for job in known:
            if job.uid not in present and job.updated <= at:
                rows.append(dataclasses.replace(job, deleted=at, updated=at))
                rows.append(Happened(at=at, uid=job.uid, what="Deleted", text=GONE))
        self._history.put(rows)
        self._present = None

    def decided(self, decided: Decided) -> None:
        """Take in a decision; of several in a row the newest is kept. From any thread."""
        self._decided = decided

    def _keep_decision(self) -> None:
        decided, now = self._decided, self._clock()
        if decided is None or (now - self._decided_at < DECIDED_SECONDS and not self._ends.is_set()):
            return
        self._decided, self._decided_at = None, now
        try:
            for row in self._rows.of_decision(decided):
                self._waiting.put_nowait(row)
        except queue.Full:
            self._metrics.history_dropped.inc()

    def replay_daily(self) -> None:
        """Have another process replay the last day once a day, and take in what it finds."""
        replaying = self._replaying
        if (replaying is not None and replaying.poll() is None) or not self._history.is_open:
            return
        try:
            if replaying is not None and replaying.returncode:
                logger.warning("the replay of the last day has ended with %d", replaying.returncode)
            if replaying is not None or not self._twin_read:
                self._replaying, self._twin_read = None, True
                self._take_in_twin()
            if self._clock() >= self._replay_at and self._leads():
                self._replay_at = self._clock() + REPLAY_SECONDS
                line = [sys.executable, "-m", "ballast_operator.cli", "twin", "--keep", "--output", "json"]
                known = {"BALLAST_HISTORY": self._history.where}
                self._replaying = subprocess.Popen(line, stdout=subprocess.DEVNULL, env=os.environ | known)
                _put_last(self._replaying.pid)
        except (HistoryError, ContractError, OSError) as error:
            logger.warning("the last day is not replayed: %s", error)

    def _take_in_twin(self) -> None:
        rows = self._history.kept(TWIN, until=math.inf)
        if rows:
            self.twin = decode_text(TwinResult, rows[-1].content, unknown="ignore", spelling=str)
            self._replay_at = max(self._replay_at, self.twin.until + REPLAY_SECONDS)

    def _run(self) -> None:
        while not self._ends.wait(WRITE_SECONDS):
            self.write()
            self.replay_daily()
        if self._replaying is not None:
            self._replaying.kill()
            self._replaying.wait()
        self.write()
        self._history.close()

    def write(self) -> None:
        """Write what waits; what cannot be written now is kept for the next time."""
        try:
            if self._works_out or self._ends.is_set():
                self._recent.work_out()
            self._keep_decision()
            while self._fill():
                self._history.put(self._batch)
                self._batch = []
            if self._clock() - self._trimmed_at > TRIM_SECONDS:
                oldest = self._clock() - 86_400 * self._keep.days
                self._history.trim(oldest=oldest, jobs=self._keep.jobs)
                self._trimmed_at = self._clock()
            self._end_missing()
        except HistoryError as error:
            self._failed(error)
        except Exception:  # nothing of history may end its thread
            logger.exception("history was not written")
            self._batch = []

    def _fill(self) -> bool:
        with contextlib.suppress(queue.Empty):
            while len(self._batch) < MOST_BATCH:
                self._batch.append(self._waiting.get_nowait())
        return bool(self._batch)

    def _failed(self, error: HistoryError) -> None:
        self._metrics.history_failures.inc()
        if isinstance(error, RowsRefused):
            self._metrics.history_dropped.inc(len(self._batch))
            self._batch = []
        if time.monotonic() - self._told_at > TOLD_SECONDS:
            self._told_at = time.monotonic()
            logger.warning("%s", error)


def _put_last(process: int) -> None:
    """Leave CPU to the operator beside it, end after an hour of CPU, be the first to go for memory."""
    os.setpriority(os.PRIO_PROCESS, process, 10)
    if sys.platform == "linux":
        resource.prlimit(process, resource.RLIMIT_CPU, (REPLAY_CPU_SECONDS, REPLAY_CPU_SECONDS))
        Path(f"/proc/{process}/oom_score_adj").write_text("1000")
