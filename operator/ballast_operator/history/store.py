"""The database of history: a SQLite file, or PostgreSQL."""

import contextlib
import dataclasses
import os
import sqlite3
import ssl
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from ballast_operator.errors import HistoryError, RowsRefused
from ballast_operator.history.recent import Happened
from ballast_operator.history.recording import JobRecord, Kept

BUSY_SECONDS, ANSWER_SECONDS, WRITTEN_SECONDS = 2.0, 10.0, 60.0
"""Seconds to wait for a locked file, an answer of PostgreSQL's, and one to the thread that writes."""

EVENTS_A_JOB, ROWS_KEPT = 500, 2_000


def _columns(kind: Any, *names: str, nullable: bool = False, key: bool = False) -> list[Any]:
    return [sa.Column(name, kind, nullable=nullable, primary_key=key) for name in names]


_TABLES = sa.MetaData()
_JOBS = sa.Table(
    "jobs",
    _TABLES,
    *_columns(sa.Text, "uid", key=True),
    *_columns(sa.Text, "namespace", "name", "team", "state", "message"),
    *_columns(sa.Float, "updated", "gpu_seconds", "cost", "startup_cost", "lost_cost"),
    *_columns(sa.Float, "created", "finished", "deleted", "goodput", nullable=True),
    *_columns(sa.BigInteger, "launches", "step", "total_steps", "lost_steps"),
    *_columns(sa.JSON, "restarts", "pools"),
    sa.Index("jobs_by_time", "updated"),
    sa.Index("jobs_by_name", "namespace", "name"),
)
_EVENTS = sa.Table(
    "events",
    _TABLES,
    *_columns(sa.Text, "uid", key=True),
    *_columns(sa.Float, "at", key=True),
    *_columns(sa.Text, "what", key=True),
    *_columns(sa.Text, "text"),
)
_KEPT = sa.Table(
    "kept",
    _TABLES,
    *_columns(sa.Text, "what", "uid", key=True),
    *_columns(sa.Float, "at", key=True),
    *_columns(sa.Text, "content"),
)


class History:
    """Record of jobs in one database. Its text is the database's name, without a password.

    Args:
        where: a file's path, or ``postgresql://USER:PASSWORD@HOST:PORT/DATABASE``, with ``?sslmode=`` and
            ``&sslrootcert=`` as libpq has them. What is wrong with it is told when it is used.
    """

    def __init__(self, where: str | Path) -> None:
        self.where = str(where).strip()
        self._engines: dict[str, sa.Engine] = {}
        self._written: tuple[int, int] | None = None

    def __str__(self) -> str:
        if "://" not in self.where:
            return self.where
        with contextlib.suppress(HistoryError):
            url = _address(self.where)
            return f"PostgreSQL's {url.database or url.username} on {url.host}"
        return "PostgreSQL"

    @property
    def is_open(self) -> bool:
        """True if its tables existed, or were made, when rows were put last."""
        return "rwc" in self._engines

    def namespaces(self) -> frozenset[str]:
        """Namespaces that have or had jobs. Raises HistoryError: it cannot be read."""
        with self._connected("ro") as connection:
            return frozenset(connection.scalars(sa.select(_JOBS.c.namespace).distinct()))

    def jobs(
        self,
        *,
        namespaces: Iterable[str] | None = None,
        name: str = "",
        uid: str = "",
        deleted: bool | None = None,
        within: tuple[float, float] | None = None,
        most: int = 1000,
        skip: int = 0,
    ) -> list[JobRecord]:
        """Records of at most so many jobs, also deleted ones, the newest change first; None, empty: any.

        ``within``: those that were there, and not done, at a time between these. ``skip``: so many of the
        newest are left out.

        Raises:
            HistoryError: it cannot be read.
        """
        query = sa.select(_JOBS).order_by(_JOBS.c.updated.desc(), _JOBS.c.uid).limit(most).offset(skip)
        if namespaces is not None:
            query = query.where(_JOBS.c.namespace.in_(sorted(namespaces)))
        for column, value in ((_JOBS.c.name, name), (_JOBS.c.uid, uid)):
            if value:
                query = query.where(column == _fit(value))
        if deleted is not None:
            query = query.where(_JOBS.c.deleted.is_not(None) == deleted)
        if within is not None:
            query = query.where(_there(*within))
        with self._connected("ro") as connection:
            return [JobRecord(**row) for row in connection.execute(query).mappings()]

    def events(self, uid: str) -> list[tuple[float, str, str]]:
        """(time, what, text) of what has happened to a job, oldest first. Raises HistoryError."""
        found, order = _EVENTS.c, (_EVENTS.c.at, _EVENTS.c.what)
        query = sa.select(found.at, found.what, found.text).where(found.uid == _fit(uid)).order_by(*order)
        with self._connected("ro") as connection:
            return [(at, what, text) for at, what, text in connection.execute(query)]

    def kept(self, what: str, *, until: float, since: float | None = None) -> list[Kept]:
        """Rows of one kind up to a time, oldest first. Raises HistoryError: it cannot be read.

        ``since``: of jobs, those of :meth:`jobs` ``within`` the two times alone.
        """
        query = sa.select(_KEPT).where(_KEPT.c.what == what, _KEPT.c.at <= until).order_by(_KEPT.c.at)
        if since is not None:
            there = sa.select(_JOBS.c.uid).where(_there(since, until))
            query = query.where((_KEPT.c.uid == "") | _KEPT.c.uid.in_(there))
        with self._connected("ro") as connection:
            return [Kept(**row) for row in connection.execute(query).mappings()]

    def put(self, rows: Sequence[JobRecord | Happened | Kept], *, create: bool = True) -> None:
        """Add rows, or write them over; of a job, the newest. ``create``: the tables, where there are none.

        Raises:
            RowsRefused: what is in them cannot be kept.
            HistoryError: it cannot be written.
        """
        newest = {row.uid: dataclasses.asdict(row) for row in rows if isinstance(row, JobRecord)}
        events = [dataclasses.asdict(row) for row in rows if isinstance(row, Happened)]
        kept = [dataclasses.asdict(row) for row in rows if isinstance(row, Kept)]
        with self._connected("rwc" if create else "rw") as connection:
            for table, content in ((_JOBS, list(newest.values())), (_EVENTS, events), (_KEPT, kept)):
                if content:
                    fit = [{name: _fit(value) for name, value in row.items()} for row in content]
                    connection.execute(_upsert(table, connection.dialect.name), fit)

    def trim(self, *, oldest: float, jobs: int) -> None:
        """Forget what did not change since ``oldest``, and all but the newest jobs. Raises HistoryError."""
        age = sa.tuple_(_JOBS.c.updated, _JOBS.c.uid)
        first = sa.select(_JOBS.c.updated, _JOBS.c.uid).order_by(_JOBS.c.updated.desc(), _JOBS.c.uid.desc())
        with self._connected("rwc") as connection:
            connection.execute(sa.delete(_JOBS).where(_JOBS.c.updated < oldest))
            too_many = connection.execute(first.offset(jobs).limit(1)).first()
            if too_many is not None:
                connection.execute(sa.delete(_JOBS).where(age <= sa.tuple_(*too_many)))
            late = (_KEPT.c.uid == "") & (_KEPT.c.at < oldest)  # the newest of these holds after ``oldest``
            for table, most, *of in (
                (_EVENTS, EVENTS_A_JOB, _EVENTS.c.uid),
                (_KEPT, sa.case((late, 1), else_=ROWS_KEPT), _KEPT.c.what, _KEPT.c.uid, late),
            ):
                gone = ~sa.exists().where(_JOBS.c.uid == table.c.uid) & (table.c.uid != "")
                connection.execute(sa.delete(table).where(gone))
                number = sa.func.row_number().over(partition_by=of, order_by=table.c.at.desc())
                keys = list(table.primary_key)
                ranked = sa.select(*keys, (number > most).label("over")).subquery()
                old = sa.select(*(ranked.c[key.name] for key in keys)).where(ranked.c.over)
                connection.execute(sa.delete(table).where(sa.tuple_(*keys).in_(old)))

    def close(self) -> None:
        """End its connections; the next use begins new ones."""
        for mode in list(self._engines):
            self._engines.pop(mode).dispose()

    @contextlib.contextmanager
    def _connected(self, mode: str) -> Iterator[sa.Connection]:
        """A transaction; ``mode``, of SQLite: ro, rw, rwc. Raises HistoryError for whatever fails in it."""
        try:
            with self._engine(mode).begin() as connection:
                yield connection
        except HistoryError:
            raise
        except Exception as error:  # of SQLAlchemy, of the drivers, of a socket
            if (engine := self._engines.pop(mode, None)) is not None:
                engine.dispose()
            cause = getattr(error, "orig", None) or error
            if mode == "rwc" and type(cause) is sqlite3.DatabaseError:  # it is no database, or broken
                self._put_aside()
            kind = RowsRefused if mode != "ro" and _refuses_rows(error, cause) else HistoryError
            verb, fix = ("read", _TO_READ) if mode == "ro" else ("written", _TO_WRITE)
            raise kind(f"history in {self} cannot be {verb}: {_said(cause)}. To fix: {fix}") from error

    def _engine(self, mode: str) -> sa.Engine:
        if mode == "rwc" and mode in self._engines and self._file() != self._written:
            self._engines.pop(mode).dispose()  # it was deleted or moved: nobody would find what is written
        if mode not in self._engines:
            self._engines[mode] = _engine(self.where, mode)
            if mode == "rwc":
                _TABLES.create_all(self._engines[mode])
                self._written = self._file()
        return self._engines[mode]

    def _file(self) -> tuple[int, int] | None:
        """Device and inode of the file at the path; None: there is none, or history is in no file."""
        with contextlib.suppress(OSError, ValueError):
            found = Path(self.where).stat()
            return found.st_dev, found.st_ino
        return None

    def _put_aside(self) -> None:
        """Let history begin anew, beside the file, so that somebody can look at it."""
        path = Path(self.where)
        with contextlib.suppress(OSError):
            path.replace(path.with_suffix(".broken"))
            for more in ("-wal", "-shm"):
                Path(f"{path}{more}").unlink(missing_ok=True)


def _there(since: float, until: float) -> sa.ColumnElement[bool]:
    """Condition on a job: it came by ``until``, and was neither done nor deleted before ``since``."""
    came = sa.func.coalesce(_JOBS.c.created, _JOBS.c.updated) <= until
    return came & sa.and_(*(end.is_(None) | (end >= since) for end in (_JOBS.c.finished, _JOBS.c.deleted)))


_TO_READ = "see that the operator runs with history.enabled and has written something, and the server is up"
_TO_WRITE = (
    "see that the file can be written, on a disk with room, or that the server is up, has room, and lets the "
    "user make and write tables, which no other program or version has made"
)


def _engine(where: str, mode: str) -> sa.Engine:
    """Engine of a database; of a file only what writes all the time keeps its connection: it may be replaced.

    Raises:
        HistoryError: ``where`` is no database.
    """
    if "://" in where or not where:
        url = _address(where)
        limits = {"timeout": WRITTEN_SECONDS if mode == "rwc" else ANSWER_SECONDS}
        given = {"connect_args": limits | _tls(url.query), "pool_size": 1, "pool_pre_ping": True}
        return sa.create_engine(url.set(query={}), hide_parameters=True, **given)
    path, query = Path(where).absolute(), {"mode": mode, "uri": "true"}
    if mode == "ro" and not os.access(path.parent, os.W_OK) and not Path(f"{path}-wal").exists():
        query["immutable"] = "1"  # a copy on a disk for reading: else SQLite makes files beside it
    url = sa.URL.create("sqlite", database=path.as_uri(), query=query)
    pool = sa.NullPool if mode != "rwc" else sa.QueuePool
    engine = sa.create_engine(
        url, hide_parameters=True, connect_args={"timeout": BUSY_SECONDS}, poolclass=pool
    )
    if mode == "rwc":
        sa.event.listen(engine, "connect", _keep_a_log)
    return engine


def _keep_a_log(connection: sqlite3.Connection, _record: object) -> None:
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")


def _address(where: str) -> sa.URL:
    """Address of PostgreSQL; not repeated: it may have a password. Raises HistoryError: it is none."""
    with contextlib.suppress(sa.exc.ArgumentError, ValueError):
        url = sa.make_url(where)
        if url.drivername in ("postgres", "postgresql") and url.host and url.username:
            return url.set(drivername="postgresql+pg8000")
    raise HistoryError(
        "history is kept in a file or in postgresql://USER:PASSWORD@HOST:PORT/DATABASE; this is neither. "
        "To fix: correct the Secret, --history or BALLAST_HISTORY; in a password write %40 for @, %2F for /"
    )


def _tls(query: Mapping[str, Any]) -> dict[str, Any]:
    """TLS options of the driver for libpq's ``sslmode`` and ``sslrootcert``; without: TLS where there is.

    Raises:
        HistoryError: one of them has another value, or there are more.
    """
    mode, authorities = query.get("sslmode", "prefer"), query.get("sslrootcert", "system")
    simple = {"disable": False, "allow": None, "prefer": None, "require": True}
    if not query.keys() <= {"sslmode", "sslrootcert"} or mode not in {*simple, "verify-ca", "verify-full"}:
        raise HistoryError(
            f"PostgreSQL's address has {', '.join(sorted(query))}. To fix: leave out all but sslrootcert, a "
            f"file, and sslmode, one of {', '.join(simple)}, verify-ca, verify-full"
        )
    if mode in simple:
        return {"ssl_context": simple[mode]}
    try:
        context = ssl.create_default_context(cafile=None if authorities == "system" else authorities)
    except OSError as error:
        reason = f"PostgreSQL's sslrootcert={authorities} cannot be read: {error.strerror or error}"
        fix = "name a file of this pod with certificates as PEM, or leave it out for the system's"
        raise HistoryError(f"{reason}. To fix: {fix}") from error
    context.check_hostname = mode == "verify-full"
    return {"ssl_context": context}


def _upsert(table: sa.Table, database: str) -> Any:
    """An insert that writes over the row with the same key; over a job's only with a newer one."""
    insert = (postgresql if database == "postgresql" else sqlite).insert(table)
    given = {column.name: insert.excluded[column.name] for column in table.c if not column.primary_key}
    newer = table.c.updated <= insert.excluded.updated if table is _JOBS else None
    return insert.on_conflict_do_update(index_elements=list(table.primary_key), set_=given, where=newer)


def _fit(value: Any) -> Any:
    """Value as both databases take it: no NUL, no halves of surrogate pairs, integers of 64 bits."""
    if isinstance(value, str):
        return value.replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()
    if isinstance(value, int):
        return max(-(2**63), min(value, 2**63 - 1))
    return value


def _refuses_rows(error: Exception, cause: Any) -> bool:
    """True if the next attempt fails, too: driver or database (SQLSTATE 22, 23) take no such content."""
    if not isinstance(error, sa.exc.DBAPIError):
        return isinstance(error, TypeError | ValueError | ArithmeticError) and not isinstance(error, OSError)
    first = cause.args[0] if cause.args else ""
    state = first.get("C", "") if isinstance(first, dict) else ""
    refused = isinstance(cause, sqlite3.IntegrityError) or state[:2] in ("22", "23")
    return refused and (error.statement or "").startswith("INSERT")


def _said(cause: Any) -> str:
    """Text of an error; of PostgreSQL's fields, its message; of its driver's, that of what it came from."""
    cause = cause.__cause__ or cause
    first = cause.args[0] if cause.args else ""
    return str(first.get("M", first) if isinstance(first, dict) else cause).rstrip(".")
