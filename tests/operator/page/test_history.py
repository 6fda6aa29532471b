"""History: what deleted jobs did stays, within bounds, and no trouble with its file is anybody else's."""

import gc
import itertools
import json
import math
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from ballast_operator.app import Options
from ballast_operator.cli.live.history import history
from ballast_operator.errors import HistoryError
from ballast_operator.history.recording import CLUSTER, COURSE, TWIN, TwinResult
from ballast_operator.history.recording import Kept as Row
from ballast_operator.history.store import History
from ballast_operator.history.writer import MOST_WAITING, HistoryWriter, Keep
from ballast_operator.kube.kinds import JOB
from ballast_operator.metrics import Metrics
from ballast_operator.page.server import Page
from click.testing import CliRunner

from tests.operator.page.test_page import looked_at, plain, text_of
from tests.operator.page.world import HOSTILE, NOW, Everybody, World, condition, runs, time_of, waits
from tests.support.examples import first_daily
from tests.support.postgresql import PostgreSQL, a_postgresql
from tests.support.waiting import eventually

# One server; its driver leaves the socket of a connection that was refused to the collector.
pytestmark = [pytest.mark.xdist_group("postgresql"), pytest.mark.filterwarnings("ignore::ResourceWarning")]

_numbers = itertools.count()


class Kept:
    """A world whose history is written when a test says so."""

    def __init__(
        self, where: str | Path, *, keep: Keep | None = None, leads: bool = True, work_out: bool = True
    ) -> None:
        self.world, self.metrics, self.where = World(), Metrics(), str(where)
        self.leads, self.history, self.written = leads, History(where), History(where)
        self.writer = HistoryWriter(
            self.written,
            self.world.recent,
            self.metrics,
            keep=keep if keep is not None else Keep(),
            leads=lambda: self.leads,
            work_out=work_out,
        )

    @property
    def path(self) -> Path:
        return Path(self.where)

    def value(self, name: str) -> float:
        return self.metrics.registry.get_sample_value(f"ballast_history_{name}_total") or 0.0

    def names(self) -> list[str]:
        return [job.name for job in self.history.jobs()]

    def train(self, name: str, **status: Any) -> None:
        """A job trains, and what waits is written."""
        self.world.job("team", name, runs(**status))
        self.writer.write()

    def close(self) -> None:
        self.history.close()
        self.written.close()


@pytest.fixture(scope="module")
def server() -> Iterator[PostgreSQL]:
    with a_postgresql() as running:
        yield running


@pytest.fixture
def database(server: PostgreSQL) -> str:
    """One that is empty."""
    name = f"history{next(_numbers)}"
    server.run(f"CREATE DATABASE {name}")
    return name


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.processes)])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database of each kind."""
    if request.param == "sqlite":
        return str(tmp_path / "history.db")
    return request.getfixturevalue("server").address(request.getfixturevalue("database"))


@pytest.fixture
def kept(where: str) -> Iterator[Kept]:
    made = Kept(where)
    yield made
    made.close()


@pytest.fixture
def in_file(tmp_path: Path) -> Kept:
    return Kept(tmp_path / "history.db")


def ended(namespace: str, kept: Kept) -> None:
    """A job that was launched twice, moved its layers, failed, and was deleted."""
    world = kept.world
    world.job(namespace, "one", runs(), entity="vision")
    world.now += 10
    moved = {"time": time_of(5), "step": 50, "imbalanceBefore": 0.3, "imbalanceAfter": 0.04, "pauseMs": 12.0}
    more = {"rebalances": [moved], "restarts": {"NodeLost": 1}, "lostSteps": 7, "lostCost": 0.5}
    world.job(namespace, "one", runs(launch=2, since=9, step=60, **more), entity="vision")
    world.now += 10
    status = {**runs(launch=2, since=9, step=60, **more), "state": "Failed", "finishedAt": time_of(19)}
    conditions = [*status["conditions"], condition("Failed", "True", "UserError", "out of memory")]
    del status["allocation"]
    world.job(namespace, "one", {**status, "conditions": conditions}, entity="vision")
    world.now += 10
    world.delete(namespace, "one")


def test_a_status_that_cannot_be_read_costs_that_change_alone(kept: Kept):
    """Others' history goes on, and the job's own with its next change."""
    for restarts in ({"NodeLost": 1}, {"NodeLost": "many"}):
        kept.world.job("a", "odd", runs(restarts=restarts))
        kept.world.now += 10
    kept.world.job("a", "other", runs(step=5))
    kept.writer.write()
    assert (kept.world.recent.dropped, set(kept.names())) == (1, {"odd", "other"})
    kept.world.job("a", "odd", runs(step=70))
    kept.writer.write()
    assert kept.history.jobs(name="odd")[0].step == 70


def test_what_a_deleted_job_did_stays(kept: Kept) -> None:
    """Its end and why, launches, moves, restarts, cost; a job with the same name later is another."""
    ended("team", kept)
    kept.writer.write()
    (job,) = kept.history.jobs()
    assert (job.namespace, job.name, job.team, job.state) == ("team", "one", "vision", "Failed")
    assert (job.message, job.deleted, job.finished) == ("out of memory", NOW + 30, NOW + 19)
    assert (job.launches, job.restarts, job.step, job.lost_steps) == (2, {"NodeLost": 1}, 60, 7)
    assert (job.gpu_seconds, job.cost, job.startup_cost) == (3600.0, 12.5, 1.5)
    told = [what for _, what, _ in kept.history.events(job.uid)]
    assert told == ["Launched", "LayersMoved", "Launched", "Restarted", "Failed", "Deleted"]


@pytest.mark.parametrize("waited", [False, True])
def test_an_operator_that_starts_again_tells_nothing_twice(kept: Kept, waited: bool) -> None:
    """What is seen again has the same time, whether the job was seen before its launch or not."""
    if waited:
        kept.world.job("team", "one", waits())
        kept.world.now += 10
    kept.train("one")
    kept.world.now += 10
    ends = runs()
    ends["allocation"]["ending"] = {"cause": "Preempted", "message": "for others", "since": time_of(15)}
    kept.world.job("team", "one", ends)
    kept.writer.write()
    again = Kept(kept.where)
    again.world.now += 1000
    again.world.job("team", "one", ends)
    again.writer.write()
    again.close()
    (job,) = kept.history.jobs()
    assert [what for _, what, _ in kept.history.events(job.uid)] == ["Launched", "Preempted"]


@pytest.mark.parametrize("namespace", ["", "team", "other"])
def test_a_job_that_went_while_nobody_led_is_known_to_be_gone(kept: Kept, namespace: str) -> None:
    """By a new leader, of the namespaces that it watches; later jobs, and those already gone, stay."""
    ended("old", kept)
    for name in ("stays", "gone"):
        kept.train(name)
    again = Kept(kept.where)
    again.world.now += 1000
    again.train("stays")
    again.writer.compare(list(again.world.caches[JOB]), namespace)
    again.world.now += 1
    again.train("young")
    again.close()
    gone = {job.name: job.deleted for job in kept.history.jobs(deleted=True)}
    assert gone == {"one": NOW + 30} | ({"gone": NOW + 1000} if namespace != "other" else {})
    told = [text for _, what, text in kept.history.events("uid-team-gone") if what == "Deleted"]
    assert [text.partition(" when")[0] for text in told] == ["it was gone"] * (namespace != "other")
    assert len(kept.history.events("uid-old-one")) == 6


def test_a_replica_that_does_not_lead_writes_nothing(kept: Kept) -> None:
    kept.leads = False
    ended("team", kept)
    kept.writer.write()
    assert kept.names() == []


@pytest.mark.parametrize("work_out", [True, False], ids=["alone", "beside the page"])
@pytest.mark.parametrize("clean", [True, False], ids=["stopped", "lease lost"])
def test_what_happened_until_a_leader_stopped_is_kept(tmp_path: Path, work_out: bool, clean: bool) -> None:
    """Although it was not worked out before the lease was given back; what comes after is the next one's."""
    kept = Kept(tmp_path / "history.db", work_out=work_out)
    kept.world.job("team", "last", runs())
    kept.leads = clean
    kept.writer.hand_over()
    kept.leads, kept.world.now = False, kept.world.now + 1
    kept.world.job("team", "after", runs())
    kept.writer.start()
    kept.writer.stop()
    assert kept.names() == ["last"] * clean
    kept.history.close()


def test_old_jobs_and_too_many_are_forgotten_with_what_happened_to_them(where: str) -> None:
    """By the time of their last change."""
    kept = Kept(where, keep=Keep(days=1, jobs=3))
    for number in range(5):
        kept.world.job("team", f"job-{number}", runs())
        kept.world.now += 60
    kept.writer.write()
    assert kept.names() == ["job-4", "job-3", "job-2"]
    kept.world.now += 86_400 - 100
    kept.writer.write()
    assert kept.names() == ["job-4"]
    told = [bool(kept.history.events(f"uid-team-job-{number}")) for number in range(5)]
    assert told == [False] * 4 + [True]
    kept.close()


def test_of_a_job_and_of_the_cluster_the_newest_rows_are_kept(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What happened to another job stays; rows of a kind are read up to a time."""
    monkeypatch.setattr("ballast_operator.history.store.EVENTS_A_JOB", 2)
    monkeypatch.setattr("ballast_operator.history.store.ROWS_KEPT", 2)
    for launch in range(1, 5):
        kept.world.job("team", "one", runs(launch=launch, since=10 * launch))
        kept.world.now += 10
    kept.world.job("team", "two", runs())
    kept.written.put([TwinResult(since=0.0, until=kept.world.now - at, jobs=at).as_row() for at in range(4)])
    kept.writer.write()
    assert [text[:8] for _, _, text in kept.history.events("uid-team-one")] == ["launch 3", "launch 4"]
    assert len(kept.history.events("uid-team-two")) == 1
    assert [row.at for row in kept.history.kept(TWIN, until=math.inf)] == [kept.world.now - 1, kept.world.now]
    assert [row.at for row in kept.history.kept(TWIN, until=kept.world.now - 1)] == [kept.world.now - 1]


def test_the_pools_that_have_not_changed_for_longer_than_jobs_are_kept_are_known_still(where: str) -> None:
    """And of older states the one that held at the time up to which jobs are kept."""
    kept = Kept(where, keep=Keep(days=1))
    days = [(what, NOW + 86_400 * day) for what in (CLUSTER, TWIN) for day in (-3.0, -2.0, -0.5)]
    kept.written.put([Row(what=what, uid="", at=at, content="{}") for what, at in days])
    kept.train("one")
    assert [row.at for row in kept.history.kept(CLUSTER, until=math.inf)] == [days[1][1], days[2][1]]
    kept.world.now += 7 * 86_400
    kept.train("one", step=11)
    assert [row.at for row in kept.history.kept(CLUSTER, until=math.inf)] == [days[2][1]]
    kept.close()


def test_what_had_no_room_comes_with_the_next_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a job holds, without which it cannot be replayed."""
    monkeypatch.setattr("ballast_operator.history.writer.MOST_WAITING", 1)
    kept = Kept(tmp_path / "history.db")
    kept.train("one")
    kept.writer._waiting.maxsize = 9
    assert not kept.history.kept(COURSE, until=math.inf)
    kept.train("one", step=11)
    assert [row.uid for row in kept.history.kept(COURSE, until=math.inf)] == ["uid-team-one"]
    kept.close()


def test_text_and_numbers_that_a_database_does_not_take_are_kept_as_near_as_can_be(kept: Kept) -> None:
    """NUL, half of a surrogate pair, more than 64 bits."""
    conditions = [condition("Running", "True", "AllRanksTrain", "a\0b\ud800c\N{SKULL}")]
    kept.world.job("team", "one", runs(step=2**70, conditions=conditions), entity="x\0")
    kept.writer.write()
    (job,) = kept.history.jobs()
    assert (job.message, job.team, job.step) == ("a\ufffdb?c\N{SKULL}", "x\ufffd", 2**63 - 1)
    assert kept.history.jobs(uid="no\0ne") == [] and kept.value("failures") == 0


@pytest.mark.slow
def test_the_replica_that_leads_no_more_writes_over_nothing_newer(kept: Kept) -> None:
    """What waited in it comes late; and both may write at once."""
    late = Kept(kept.where)
    late.world.job("team", "one", runs(step=1))
    kept.world.now += 10
    kept.train("one", step=2)
    late.writer.write()
    assert [job.step for job in kept.history.jobs()] == [2]
    for world in (kept.world, late.world):
        for number in range(40):
            world.job("team", f"job-{number}", runs())
    kept.writer.start()
    late.writer.start()
    eventually(lambda: len(kept.names()) == 41, "jobs of both")
    kept.writer.stop()
    late.writer.stop()
    assert kept.value("dropped") == late.value("dropped") == 0
    late.close()


def test_a_locked_file_costs_nothing_that_waits(in_file: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written once the file is free."""
    monkeypatch.setattr("ballast_operator.history.store.BUSY_SECONDS", 0.01)
    in_file.train("zero")
    with sqlite3.connect(in_file.path) as other:
        other.execute("BEGIN IMMEDIATE")
        in_file.train("one")
        assert in_file.value("failures") >= 1
        other.rollback()
    other.close()
    in_file.writer.write()
    assert set(in_file.names()) == {"zero", "one"}
    assert in_file.value("dropped") == 0


@pytest.mark.parametrize("content", [b"no database at all" * 500, b"SQLite format 3\x00" + b"\xff" * 8000])
def test_a_broken_file_is_put_aside_and_history_begins_anew(in_file: Kept, content: bytes) -> None:
    """Beside it, so that somebody can look at it."""
    in_file.path.write_bytes(content)
    in_file.train("one")
    in_file.writer.write()
    assert in_file.names() == ["one"]
    assert in_file.path.with_suffix(".broken").read_bytes() == content


def test_a_file_that_somebody_moves_or_deletes_is_made_anew(in_file: Kept) -> None:
    """What happens afterwards is found at the path, not in a file that has no name any more."""
    in_file.train("one")
    in_file.path.rename(in_file.path.with_suffix(".old"))
    in_file.train("two")
    assert in_file.names() == ["two"]
    in_file.path.unlink()
    in_file.train("three")
    assert in_file.names() == ["three"]
    assert in_file.value("failures") == 0


def test_a_disk_that_takes_nothing_drops_rows_and_counts_them(in_file: Kept) -> None:
    """What waits is bounded; the caches do not notice."""
    in_file.path.mkdir()  # nothing can be written there
    for number in range(20):
        in_file.world.job("team", f"job-{number}", runs())
    in_file.writer.write()
    assert in_file.value("failures") == 1
    for number in range(MOST_WAITING + 1):
        in_file.writer._told(float(number), in_file.world.recent.events[0], False)
    assert in_file.value("dropped") == 1
    assert len(in_file.world.caches[JOB]) == 20


def test_a_copy_on_a_disk_for_reading_is_read(in_file: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without files beside it, which SQLite would make."""
    in_file.train("one")
    in_file.close()
    monkeypatch.setattr("os.access", lambda *_: False)
    assert in_file.names() == ["one"]
    assert list(in_file.path.parent.iterdir()) == [in_file.path]


def test_the_thread_ends_when_it_is_told_and_writes_what_waits(kept: Kept) -> None:
    """Nothing is lost at an orderly end."""
    kept.writer.start()
    ended("team", kept)
    kept.writer.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "history"]
    assert [job.state for job in kept.history.jobs()] == ["Failed"]


def test_ballast_history_shows_jobs_and_what_happened_to_one(kept: Kept, tmp_path: Path) -> None:
    """As text and as JSON; where there is none, with what to do."""
    ended("team", kept)
    kept.world.job("other", "two", runs())
    kept.writer.write()

    def told(*words: str) -> str:
        answer = CliRunner().invoke(history, [*words], env={"BALLAST_HISTORY": kept.where})
        assert answer.exit_code == 0, answer.output
        return answer.output

    assert "team/one: Failed" in told() and "other/two: Running" in told()
    assert "other/two" not in told("--namespace", "team")
    assert "LayersMoved: at step 50: imbalance 30% to 4%" in told("one")
    (job,) = json.loads(told("one", "--output", "json"))["jobs"]
    assert job["state"] == "Failed" and [event["what"] for event in job["events"]][-1] == "Deleted"
    missing = CliRunner().invoke(history, ["--file", str(tmp_path / "none.db")])
    assert missing.exit_code == 1 and "To fix" in missing.output


@pytest.mark.slow
async def test_the_page_shows_history_to_who_may_see_the_namespace(kept: Kept) -> None:
    """Deleted jobs with their ends; of other namespaces nothing, by address and as JSON neither."""
    ended("open", kept)
    ended("secret", kept)
    kept.world.job("open", "odd", runs(), entity=HOSTILE)
    kept.writer.write()
    world = kept.world
    world.page = Page(world.recent, Everybody({"open"}), history=kept.history)
    async with looked_at(world) as client:
        await text_of(client, "/jobs")
        world.now += 7200  # since somebody looked at what is there now
        listed = await text_of(client, "/history")
        assert "open/one" in listed and "secret" not in listed and "<script>" not in listed
        assert f"As of {time_of(world.now - NOW)}" in plain(listed)
        words = plain(await text_of(client, "/history/uid-open-one"))
        assert "Failed . out of memory" in words and "LayersMoved at step 50" in words
        await text_of(client, "/history/uid-secret-one", 404)
        await text_of(client, "/history/uid-none", 404)
        found = await (await client.get("/history.json?namespace=open&text=one")).json()
        assert [job["name"] for job in found["jobs"]] == ["one"]


async def test_the_page_says_why_it_has_no_history(in_file: Kept) -> None:
    """All else goes on."""
    world = in_file.world
    world.page = Page(world.recent, Everybody(), history=in_file.history)
    async with looked_at(world) as client:
        assert "cannot be read" in await text_of(client, "/history", 503)
        await text_of(client, "/jobs")


TROUBLES = {  # name: words that tell of it, a statement that makes it, one that ends it
    "no-database": (
        "does not exist",
        "ALTER DATABASE {0} RENAME TO x{0}",
        "ALTER DATABASE x{0} RENAME TO {0}",
    ),
    "wrong-password": (
        "password authentication failed",
        "ALTER USER {0} PASSWORD 'other'",
        "ALTER USER {0} PASSWORD '{1}'",
    ),
    "no-right-to-make-tables": (
        "permission denied for schema public",
        "ALTER DATABASE {0} OWNER TO admin",
        "ALTER DATABASE {0} OWNER TO {0}",
    ),
    # As a server that is managed does once its disk is full.
    "takes-nothing": (
        "read-only transaction",
        "ALTER USER {0} SET default_transaction_read_only = on",
        "ALTER USER {0} RESET default_transaction_read_only",
    ),
    "busy": (
        "too many connections",
        "ALTER USER {0} CONNECTION LIMIT 0",
        "ALTER USER {0} CONNECTION LIMIT 9",
    ),
}


def told_and_kept(kept: Kept, words: str, caplog: pytest.LogCaptureFixture, end: Callable[[], None]) -> None:
    """What is wrong is told in the log and by the command, without the password; nothing is lost by it."""
    kept.train("one")
    shown = CliRunner().invoke(history, env={"BALLAST_HISTORY": kept.where})
    assert kept.value("failures") == 1 and shown.exit_code == 1
    for text in (caplog.text, shown.output):
        assert "To fix" in text and "s3cret" not in text
    assert words in caplog.text
    gc.collect()
    end()
    kept.writer.write()
    assert kept.names() == ["one"] and kept.value("dropped") == 0


@pytest.mark.processes
@pytest.mark.parametrize("trouble", first_daily(TROUBLES, 3))
def test_trouble_with_postgresql_is_told_and_costs_nothing_that_waits(
    trouble: str, server: PostgreSQL, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The operator lives on, and writes once somebody has ended it."""
    server.run(
        f"CREATE USER {database} PASSWORD '{server.PASSWORD}'",
        f"ALTER DATABASE {database} OWNER TO {database}",
    )
    words, made, end = TROUBLES[trouble]
    server.run(made.format(database, server.PASSWORD))
    kept = Kept(server.address(database, user=database))
    told_and_kept(kept, words, caplog, lambda: server.run(end.format(database, server.PASSWORD)))
    kept.close()


@pytest.mark.processes
def test_a_server_that_is_away_at_first_and_later_costs_nothing(
    server: PostgreSQL, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What happens meanwhile waits for it."""
    server.stop()
    kept = Kept(server.address(database))
    told_and_kept(kept, "Connection refused", caplog, server.start)
    server.stop()
    kept.train("two")
    server.start()
    kept.writer.write()
    assert set(kept.names()) == {"one", "two"} and (kept.value("failures"), kept.value("dropped")) == (2, 0)
    kept.close()


@pytest.mark.processes
def test_the_servers_certificate_is_verified_where_the_address_asks_for_it(
    server: PostgreSQL, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    """By an authority of its own, or those of the system, which do not know this one; rows wait meanwhile."""
    kept = Kept(f"{server.address(database)}?sslmode=verify-full")
    kept.train("one")
    assert "certificate verify failed" in caplog.text and kept.value("dropped") == 0
    kept.written.where += f"&sslrootcert={server.authority}"
    kept.writer.write()
    for mode in ("disable", "prefer", "require", f"verify-ca&sslrootcert={server.authority}"):
        reader = History(f"{server.address(database)}?sslmode={mode}")
        assert [job.name for job in reader.jobs()] == ["one"]
        reader.close()
    kept.close()


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("postgresql://ann:s3cret@host:port/history", "this is neither"),
        ("mysql://ann:s3cret@host/history", "this is neither"),
        ("", "this is neither"),
        ("postgresql://ann:s3cret@host/history?sslmode=s3cret", "has sslmode"),
        ("postgresql://ann:s3cret@host/history?password=s3cret", "has password"),
        (
            "postgresql://ann:s3cret@host/history?sslmode=verify-full&sslrootcert=/none.pem",
            "sslrootcert=/none.pem cannot be read: No such file",
        ),
        ("postgresql://ann:s3cret@127.0.0.1:1/history?sslmode=require", "Connection refused"),
        ("postgresql://ann:s3cret@127.0.0.1:1", "PostgreSQL's ann on 127.0.0.1"),
    ],
)
def test_a_wrong_address_is_told_without_its_password(
    where: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In the log, and where somebody reads; nothing raises beside it."""
    kept = Kept(where)
    kept.train("one")
    assert kept.value("failures") == 1 and words in caplog.text
    assert "s3cret" not in caplog.text + str(kept.history)
    with pytest.raises(HistoryError, match="To fix") as failed:
        kept.history.jobs()
    assert "s3cret" not in str(failed.value) and "s3cret" not in repr(Options(history=where))


@pytest.mark.processes
def test_rows_that_a_database_refuses_are_dropped_and_counted(server: PostgreSQL, database: str) -> None:
    """They would be refused for ever, and those behind them would wait."""
    server.run(f"CREATE DATABASE {database}_latin ENCODING LATIN1 TEMPLATE template0")
    kept = Kept(server.address(f"{database}_latin"))
    kept.world.job("team", "one", runs(), entity="\N{SKULL}")
    kept.writer.write()
    assert kept.value("dropped") > 0
    kept.train("two")
    assert kept.names() == ["two"]
    kept.close()


def test_tables_of_another_version_are_told(kept: Kept, caplog: pytest.LogCaptureFixture) -> None:
    kept.writer.write()
    engine = kept.written._engines["rwc"]
    with engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE jobs DROP COLUMN goodput"))
    kept.train("one")
    assert "goodput" in caplog.text and "no other program or version" in caplog.text
    assert kept.value("failures") == 1
