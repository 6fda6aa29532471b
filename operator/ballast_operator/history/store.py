"""What jobs did, kept in a SQLite file after they are deleted.

One thread writes; nobody waits for it. What it cannot write waits in a bounded queue, and beyond that is
dropped and counted: a full disk, a locked or a broken file cost history, never a job.
"""

import contextlib
import dataclasses
import json
import logging
import math
import os
import queue
import resource
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ballast_policies.contract import ContractError
from ballast_policies.contract.decode import decode_text

from ballast_operator.history.recent import Happened, Recent, seconds_of
from ballast_operator.history.recording import TWIN, Decided, Kept, Rows, TwinResult
from ballast_operator.kube.kinds import Object, key_of
from ballast_operator.metrics import Metrics

logger = logging.getLogger(__name__)

MOST_WAITING = 20_000
"""Rows that wait to be written."""

WRITE_SECONDS, TRIM_SECONDS, BUSY_SECONDS, TOLD_SECONDS = 2.0, 600.0, 2.0, 60.0
DECIDED_SECONDS, FIRST_REPLAY_SECONDS, REPLAY_SECONDS = 10.0, 3_600.0, 86_400.0
REPLAY_CPU_SECONDS = 3_600
MOST_BATCH, EVENTS_A_JOB, ROWS_KEPT, LONGEST = 2_000, 500, 2_000, 2_000

_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    uid TEXT PRIMARY KEY, namespace TEXT NOT NULL, name TEXT NOT NULL, team TEXT NOT NULL,
    created REAL, finished REAL, deleted REAL, updated REAL NOT NULL,
    state TEXT NOT NULL, message TEXT NOT NULL, launches INTEGER NOT NULL, restarts TEXT NOT NULL,
    step INTEGER NOT NULL, total_steps INTEGER NOT NULL, gpu_seconds REAL NOT NULL, cost REAL NOT NULL,
    startup_cost REAL NOT NULL, lost_steps INTEGER NOT NULL, lost_cost REAL NOT NULL, goodput REAL,
    pools TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS jobs_by_time ON jobs (updated);
CREATE INDEX IF NOT EXISTS jobs_by_name ON jobs (namespace, name);
CREATE TABLE IF NOT EXISTS events (
    uid TEXT NOT NULL, at REAL NOT NULL, what TEXT NOT NULL, text TEXT NOT NULL, PRIMARY KEY (uid, at, what));
CREATE TABLE IF NOT EXISTS kept (
    what TEXT NOT NULL, uid TEXT NOT NULL, at REAL NOT NULL, content TEXT NOT NULL,
    PRIMARY KEY (what, uid, at));
PRAGMA user_version = 1;
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """What is kept: jobs that have changed in so many days, and so many of them, the newest."""

    days: float = 90.0
    jobs: int = 100_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A job that is or was there. Times in epoch seconds; None: that has not happened, or was not seen.

    Attributes:
        message: of the condition behind its state: why it failed, or waits.
        restarts: by cause.
        goodput: the part of its GPUs' time that was productive; None: not known.
        pools: pool -> (GPU seconds, cost).
    """

    uid: str
    namespace: str
    name: str
    team: str
    created: float | None
    finished: float | None
    deleted: float | None
    updated: float
    state: str
    message: str
    launches: int
    restarts: dict[str, int]
    step: int
    total_steps: int
    gpu_seconds: float
    cost: float
    startup_cost: float
    lost_steps: int
    lost_cost: float
    goodput: float | None
    pools: dict[str, Any]

    @classmethod
    def of(cls, item: Object, at: float, *, deleted: bool) -> "JobRecord":
        """From the object as it was seen last."""
        status: Any = item.get("status") or {}
        created, finished = item["metadata"].get("creationTimestamp"), status.get("finishedAt")
        conditions = {each["type"]: each for each in status.get("conditions") or []}
        state = status.get("state") or "New"
        said = conditions.get(state) or conditions.get("Admitted") or {}
        pools = {
            entry["pool"]: (entry.get("gpuSeconds", 0.0), entry.get("cost", 0.0))
            for entry in status.get("poolCosts") or []
        }
        namespace, name = key_of(item)
        return cls(
            uid=item["metadata"]["uid"],
            namespace=namespace,
            name=name,
            team=item["spec"].get("entity") or "",
            created=seconds_of(created, at) if created else None,
            finished=seconds_of(finished, at) if finished else None,
            deleted=at if deleted else None,
            updated=at,
            state=state,
            message=str(said.get("message", ""))[:LONGEST],
            launches=int(status.get("launches") or 0),
            restarts=dict(status.get("restarts") or {}),
            step=int((status.get("progress") or {}).get("step") or 0),
            total_steps=int(item["spec"].get("totalSteps") or 0),
            gpu_seconds=sum(seconds for seconds, _ in pools.values()),
            cost=float(status.get("costSoFar") or 0.0),
            startup_cost=sum(entry.get("startupCost", 0.0) for entry in status.get("poolCosts") or []),
            lost_steps=int(status.get("lostSteps") or 0),
            lost_cost=float(status.get("lostCost") or 0.0),
            goodput=(status.get("gpuTime") or {}).get("goodput"),
            pools=pools,
        )


_FIELDS = tuple(field.name for field in dataclasses.fields(JobRecord))
_JSON = ("restarts", "pools")
_PUT_JOB = f"INSERT OR REPLACE INTO jobs ({', '.join(_FIELDS)}) VALUES ({', '.join('?' * len(_FIELDS))})"
_PUT_KEPT = "INSERT OR REPLACE INTO kept (what, uid, at, content) VALUES (?, ?, ?, ?)"
_PUT_EVENT = "INSERT OR REPLACE INTO events (uid, at, what, text) VALUES (?, ?, ?, ?)"


class HistoryWriter:
    """The thread that writes what ``recent`` tells into a file.

    Args:
        path: of the file; its folder is there.
        recent: whose news are written.
        metrics: where rows that were dropped and writes that failed are counted.
        keep: for how long, and how much.
        leads: whether this replica writes; what happens while it does not is left out.
        work_out: this thread is the one that works out what ``recent`` has noted.
        clock: epoch seconds.

    Attributes:
        twin: how far the last replay of what is kept was off; None: there was none.
    """

    def __init__(
        self,
        path: Path,
        recent: Recent,
        metrics: Metrics,
        *,
        keep: Keep,
        leads: Callable[[], bool],
        work_out: bool,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path, self._recent, self._metrics, self._keep = path, recent, metrics, keep
        self._leads, self._works_out, self._clock = leads, work_out, clock
        self._waiting: queue.Queue[JobRecord | Happened | Kept] = queue.Queue(MOST_WAITING)
        self._batch: list[JobRecord | Happened | Kept] = []
        self._database: sqlite3.Connection | None = None
        self._trimmed_at = self._told_at = float("-inf")
        self._rows, self._decided_at = Rows(), float("-inf")
        self._decided: Decided | None = None
        self.twin: TwinResult | None = None
        self._replaying: subprocess.Popen[bytes] | None = None
        self._replay_at, self._twin_read = clock() + FIRST_REPLAY_SECONDS, False
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="history", daemon=True)
        recent.told = self._told

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def stop(self) -> None:
        """Write what waits, and end."""
        self._ends.set()
        self._thread.join(timeout=10.0)

    def _told(self, at: float, news: Object | Happened, deleted: bool) -> None:
        """Take in a job that has changed or is deleted, or what has happened to one."""
        if not self._leads():
            return
        try:
            if isinstance(news, Happened):
                self._waiting.put_nowait(news)
                return
            record = JobRecord.of(news, at, deleted=deleted)
            self._waiting.put_nowait(record)
            for row in self._rows.of_job(record.uid, news, at, deleted=deleted):
                self._waiting.put_nowait(row)
        except queue.Full:
            self._metrics.history_dropped.inc()
        except (LookupError, TypeError, ValueError, AttributeError):  # a status that nobody here has written
            self._metrics.history_dropped.inc()

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

    def replay_daily(self, command: Sequence[str] = (sys.executable, "-m", "ballast_operator.cli")) -> None:
        """Have another process replay the last day once a day, and take in what it finds."""
        replaying = self._replaying
        if (replaying is not None and replaying.poll() is None) or not self._path.exists():
            return
        try:
            if replaying is not None and replaying.returncode:
                logger.warning("the replay of the last day has ended with %d", replaying.returncode)
            if replaying is not None or not self._twin_read:
                self._replaying, self._twin_read = None, True
                self._take_in_twin()
            if self._clock() >= self._replay_at and self._leads():
                self._replay_at = self._clock() + REPLAY_SECONDS
                line = [*command, "twin", "--file", str(self._path), "--keep", "--output", "json"]
                self._replaying = subprocess.Popen(line, stdout=subprocess.DEVNULL)
                _put_last(self._replaying.pid)
        except (HistoryError, ContractError, OSError) as error:
            logger.warning("the last day is not replayed: %s", error)

    def _take_in_twin(self) -> None:
        rows = read_kept(self._path, TWIN, until=math.inf)
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
        self._close()

    def write(self) -> None:
        """Write what waits; what cannot be written now is kept for the next time."""
        try:
            if self._works_out:
                self._recent.work_out()
            self._keep_decision()
            while self._fill():
                self._write_batch()
            if self._clock() - self._trimmed_at > TRIM_SECONDS:
                self._trim()
                self._trimmed_at = self._clock()
        except (sqlite3.Error, OSError) as error:
            self._failed(error)
        except Exception:  # nothing of history may end its thread
            logger.exception("history was not written")
            self._batch = []

    def _fill(self) -> bool:
        with contextlib.suppress(queue.Empty):
            while len(self._batch) < MOST_BATCH:
                self._batch.append(self._waiting.get_nowait())
        return bool(self._batch)

    def _write_batch(self) -> None:
        newest = {row.uid: row for row in self._batch if isinstance(row, JobRecord)}
        events = [(row.uid, row.at, row.what, row.text) for row in self._batch if isinstance(row, Happened)]
        kept = [dataclasses.astuple(row) for row in self._batch if isinstance(row, Kept)]
        database = self._open()
        with database:
            database.executemany(_PUT_JOB, [_row(job) for job in newest.values()])
            database.executemany(_PUT_EVENT, events)
            database.executemany(_PUT_KEPT, kept)
        self._batch = []

    def _open(self) -> sqlite3.Connection:
        if self._database is None:
            database = sqlite3.connect(self._path, timeout=BUSY_SECONDS, check_same_thread=False)
            try:
                database.execute("PRAGMA journal_mode = WAL")
                database.execute("PRAGMA synchronous = NORMAL")
                database.executescript(_SCHEMA)
            except sqlite3.Error:
                database.close()
                raise
            self._database = database
        return self._database

    def _trim(self) -> None:
        """Forget what is too old, and the oldest where there is too much."""
        database, oldest = self._open(), self._clock() - 86_400 * self._keep.days
        with database:
            database.execute("DELETE FROM jobs WHERE updated < ?", (oldest,))
            newest = "SELECT uid FROM jobs ORDER BY updated DESC LIMIT ?"
            database.execute(f"DELETE FROM jobs WHERE uid NOT IN ({newest})", (self._keep.jobs,))
            database.execute("DELETE FROM events WHERE uid NOT IN (SELECT uid FROM jobs)")
            database.execute(
                "DELETE FROM events WHERE rowid IN (SELECT rowid FROM (SELECT rowid, row_number() OVER "
                "(PARTITION BY uid ORDER BY at DESC) AS number FROM events) WHERE number > ?)",
                (EVENTS_A_JOB,),
            )
            database.execute("DELETE FROM kept WHERE uid != '' AND uid NOT IN (SELECT uid FROM jobs)")
            database.execute("DELETE FROM kept WHERE uid = '' AND at < ?", (oldest,))
            database.execute(
                "DELETE FROM kept WHERE rowid IN (SELECT rowid FROM (SELECT rowid, row_number() OVER "
                "(PARTITION BY what, uid ORDER BY at DESC) AS number FROM kept) WHERE number > ?)",
                (ROWS_KEPT,),
            )

    def _failed(self, error: Exception) -> None:
        self._metrics.history_failures.inc()
        self._close()
        if type(error) is sqlite3.DatabaseError:  # it is no database, or broken: begin anew, beside it
            with contextlib.suppress(OSError):
                self._path.replace(self._path.with_suffix(".broken"))
                for more in ("-wal", "-shm"):
                    Path(f"{self._path}{more}").unlink(missing_ok=True)
        if time.monotonic() - self._told_at > TOLD_SECONDS:
            self._told_at = time.monotonic()
            logger.warning(
                "history is not written: %s: %s. To fix: see that %s can be written, on a disk with room",
                type(error).__name__,
                error,
                self._path,
            )

    def _close(self) -> None:
        if self._database is not None:
            with contextlib.suppress(sqlite3.Error):
                self._database.close()
            self._database = None


def _put_last(process: int) -> None:
    """Leave CPU to the operator beside it, end after an hour of CPU, be the first to go for memory."""
    os.setpriority(os.PRIO_PROCESS, process, 10)
    if sys.platform == "linux":
        resource.prlimit(process, resource.RLIMIT_CPU, (REPLAY_CPU_SECONDS, REPLAY_CPU_SECONDS))
        Path(f"/proc/{process}/oom_score_adj").write_text("1000")


def _row(job: JobRecord) -> list[Any]:
    values = dataclasses.asdict(job)
    return [json.dumps(values[name]) if name in _JSON else values[name] for name in _FIELDS]


class HistoryError(Exception):
    """History cannot be read: there is none, or its file is broken."""


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    try:
        with contextlib.closing(
            sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_SECONDS)
        ) as database:
            yield database
    except (sqlite3.Error, OSError, ValueError) as error:
        fix = "see that the operator runs with history.enabled, and has written something"
        raise HistoryError(f"history in {path} cannot be read: {error}. To fix: {fix}") from error


def read_namespaces(path: Path) -> frozenset[str]:
    """Namespaces that have or had jobs.

    Raises:
        HistoryError: it cannot be read.
    """
    with _reading(path) as database:
        return frozenset(name for (name,) in database.execute("SELECT DISTINCT namespace FROM jobs"))


def read_jobs(
    path: Path,
    *,
    namespaces: Iterable[str] | None = None,
    name: str = "",
    uid: str = "",
    most: int = 1000,
    skip: int = 0,
) -> list[JobRecord]:
    """Jobs that are or were there, the newest change first.

    Args:
        path: of the file.
        namespaces: of these alone; None: of all.
        name: of this name alone; empty: of any.
        uid: this one alone; empty: any.
        most: so many at most.
        skip: so many of the newest are left out.

    Raises:
        HistoryError: it cannot be read.
    """
    where, values = ["1"], list[Any]()
    if namespaces is not None:
        where.append("namespace IN (SELECT value FROM json_each(?))")
        values.append(json.dumps(sorted(namespaces)))
    for column, value in (("name", name), ("uid", uid)):
        if value:
            where.append(f"{column} = ?")
            values.append(value)
    query = f"SELECT {', '.join(_FIELDS)} FROM jobs WHERE {' AND '.join(where)} "
    query += "ORDER BY updated DESC, uid LIMIT ? OFFSET ?"
    with _reading(path) as database:
        return [_record(row) for row in database.execute(query, (*values, most, skip))]


def read_events(path: Path, uid: str) -> list[tuple[float, str, str]]:
    """(time, what, text) of what has happened to a job, oldest first.

    Raises:
        HistoryError: it cannot be read.
    """
    with _reading(path) as database:
        return list(database.execute("SELECT at, what, text FROM events WHERE uid = ? ORDER BY at", (uid,)))


def read_kept(path: Path, what: str, *, until: float) -> list[Kept]:
    """Rows of one kind up to a time, oldest first.

    Raises:
        HistoryError: it cannot be read.
    """
    query = "SELECT what, uid, at, content FROM kept WHERE what = ? AND at <= ? ORDER BY at"
    with _reading(path) as database:
        rows = database.execute(query, (what, until))
        return [Kept(what=kind, uid=uid, at=at, content=content) for kind, uid, at, content in rows]


def write_kept(path: Path, row: Kept) -> None:
    """Add one row to a file that is there.

    Raises:
        HistoryError: it cannot be written.
    """
    try:
        with (
            contextlib.closing(
                sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=BUSY_SECONDS)
            ) as database,
            database,
        ):
            database.execute(_PUT_KEPT, dataclasses.astuple(row))
    except (sqlite3.Error, OSError) as error:
        raise HistoryError(
            f"{path} cannot be written: {error}. To fix: run it where the operator runs"
        ) from error


def _record(row: Sequence[Any]) -> JobRecord:
    values = dict(zip(_FIELDS, row, strict=True))
    return JobRecord(**{**values, **{name: json.loads(values[name]) for name in _JSON}})
