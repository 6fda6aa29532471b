"""History: what deleted jobs did stays, within bounds, and no trouble with its file is anybody else's."""

import json
import sqlite3
import threading
from pathlib import Path

import pytest
from ballast_operator.cli.live.history import history
from ballast_operator.history.store import (
    MOST_WAITING,
    HistoryError,
    HistoryWriter,
    Keep,
    read_events,
    read_jobs,
)
from ballast_operator.kube.kinds import JOB
from ballast_operator.metrics import Metrics
from ballast_operator.page.server import Page
from click.testing import CliRunner

from tests.operator.page.test_page import looked_at, plain, text_of
from tests.operator.page.world import HOSTILE, NOW, Everybody, World, condition, runs, time_of


class Kept:
    """A world whose history is written when a test says so."""

    def __init__(self, path: Path, *, keep: Keep | None = None, leads: bool = True) -> None:
        self.world, self.metrics, self.path = World(), Metrics(), path
        self.leads = leads
        self.writer = HistoryWriter(
            path,
            self.world.recent,
            self.metrics,
            keep=keep if keep is not None else Keep(),
            leads=lambda: self.leads,
            work_out=True,
            clock=lambda: self.world.now,
        )

    def value(self, name: str) -> float:
        return self.metrics.registry.get_sample_value(f"ballast_history_{name}_total") or 0.0


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path / "history.db")


def ended(namespace: str, kept: Kept) -> None:
    """A job that was launched twice, moved its layers, failed, and was deleted."""
    world = kept.world
    world.job(namespace, "one", runs(), entity="vision")
    world.now += 10
    moved = {"time": time_of(5), "step": 50, "imbalanceBefore": 0.3, "imbalanceAfter": 0.04, "pauseMs": 12.0}
    more = {"rebalances": [moved], "restarts": {"NodeLost": 1}, "lostSteps": 7, "lostCost": 0.5}
    world.job(namespace, "one", runs(launch=2, step=60, **more), entity="vision")
    world.now += 10
    status = {**runs(launch=2, step=60, **more), "state": "Failed", "finishedAt": time_of(19)}
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
    assert (kept.world.recent.dropped, {job.name for job in read_jobs(kept.path)}) == (1, {"odd", "other"})
    kept.world.job("a", "odd", runs(step=70))
    kept.writer.write()
    assert read_jobs(kept.path, name="odd")[0].step == 70


def test_what_a_deleted_job_did_stays(kept: Kept) -> None:
    """Its end and why, launches, moves, restarts, cost; a job with the same name later is another."""
    ended("team", kept)
    kept.writer.write()
    (job,) = read_jobs(kept.path)
    assert (job.namespace, job.name, job.team, job.state) == ("team", "one", "vision", "Failed")
    assert (job.message, job.deleted, job.finished) == ("out of memory", NOW + 30, NOW + 19)
    assert (job.launches, job.restarts, job.step, job.lost_steps) == (2, {"NodeLost": 1}, 60, 7)
    assert (job.gpu_seconds, job.cost, job.startup_cost) == (3600.0, 12.5, 1.5)
    assert [what for _, what, _ in read_events(kept.path, job.uid)] == [
        "Launched",
        "LayersMoved",
        "Launched",
        "Restarted",
        "Failed",
        "Deleted",
    ]


def test_an_operator_that_starts_again_tells_nothing_twice(kept: Kept, tmp_path: Path) -> None:
    """What is seen again has the same time."""
    kept.world.job("team", "one", runs())
    kept.writer.write()
    again = Kept(kept.path)
    again.world.now += 1000
    again.world.job("team", "one", runs())
    again.writer.write()
    (job,) = read_jobs(kept.path)
    assert [what for _, what, _ in read_events(kept.path, job.uid)] == ["Launched"]


def test_a_replica_that_does_not_lead_writes_nothing(kept: Kept) -> None:
    """Another one does."""
    kept.leads = False
    ended("team", kept)
    kept.writer.write()
    assert not kept.path.exists() or read_jobs(kept.path) == []


def test_old_jobs_and_too_many_are_forgotten_with_what_happened_to_them(tmp_path: Path) -> None:
    """By the time of their last change."""
    kept = Kept(tmp_path / "history.db", keep=Keep(days=1, jobs=3))
    for number in range(5):
        kept.world.job("team", f"job-{number}", runs())
        kept.world.now += 60
    kept.writer.write()
    assert [job.name for job in read_jobs(kept.path)] == ["job-4", "job-3", "job-2"]
    kept.world.now += 86_400 - 100
    kept.writer.write()
    assert [job.name for job in read_jobs(kept.path)] == ["job-4"]
    with sqlite3.connect(kept.path) as database:
        assert database.execute("SELECT count(DISTINCT uid) FROM events").fetchone() == (1,)
    database.close()


def test_a_locked_file_costs_nothing_that_waits(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written once the file is free."""
    monkeypatch.setattr("ballast_operator.history.store.BUSY_SECONDS", 0.01)
    kept.world.job("team", "zero", runs())
    kept.writer.write()
    with sqlite3.connect(kept.path) as other:
        other.execute("BEGIN IMMEDIATE")
        kept.world.job("team", "one", runs())
        kept.writer.write()
        assert kept.value("failures") >= 1
        other.rollback()
    other.close()
    kept.writer.write()
    assert {job.name for job in read_jobs(kept.path)} == {"zero", "one"}
    assert kept.value("dropped") == 0


@pytest.mark.parametrize("content", [b"no database at all" * 500, b"SQLite format 3\x00" + b"\xff" * 8000])
def test_a_broken_file_is_put_aside_and_history_begins_anew(kept: Kept, content: bytes) -> None:
    """Beside it, so that somebody can look at it."""
    kept.path.write_bytes(content)
    kept.world.job("team", "one", runs())
    kept.writer.write()
    kept.writer.write()
    assert [job.name for job in read_jobs(kept.path)] == ["one"]
    assert kept.path.with_suffix(".broken").read_bytes() == content


def test_a_disk_that_takes_nothing_drops_rows_and_counts_them(kept: Kept, tmp_path: Path) -> None:
    """What waits is bounded; the caches do not notice."""
    kept.path.mkdir()  # nothing can be written there
    for number in range(20):
        kept.world.job("team", f"job-{number}", runs())
    kept.writer.write()
    assert kept.value("failures") == 1
    for number in range(MOST_WAITING + 1):
        kept.writer._told(float(number), kept.world.recent.events[0], False)
    assert kept.value("dropped") == 1
    assert len(kept.world.caches[JOB]) == 20


def test_the_thread_ends_when_it_is_told_and_writes_what_waits(kept: Kept) -> None:
    """Nothing is lost at an orderly end."""
    kept.writer.start()
    ended("team", kept)
    kept.writer.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "history"]
    assert [job.state for job in read_jobs(kept.path)] == ["Failed"]


def test_ballast_history_shows_jobs_and_what_happened_to_one(kept: Kept, tmp_path: Path) -> None:
    """As text and as JSON; where there is none, with what to do."""
    ended("team", kept)
    kept.world.job("other", "two", runs())
    kept.writer.write()

    def told(*words: str) -> str:
        answer = CliRunner().invoke(history, ["--file", str(kept.path), *words])
        assert answer.exit_code == 0, answer.output
        return answer.output

    assert "team/one: Failed" in told() and "other/two: Running" in told()
    assert "other/two" not in told("--namespace", "team")
    assert "LayersMoved: at step 50: imbalance 30% to 4%" in told("one")
    (job,) = json.loads(told("one", "--output", "json"))["jobs"]
    assert job["state"] == "Failed" and [event["what"] for event in job["events"]][-1] == "Deleted"
    missing = CliRunner().invoke(history, ["--file", str(tmp_path / "none.db")])
    assert missing.exit_code == 1 and "To fix" in missing.output
    with pytest.raises(HistoryError):
        read_jobs(tmp_path / "none.db")


async def test_the_page_shows_history_to_who_may_see_the_namespace(kept: Kept) -> None:
    """Deleted jobs with their ends; of other namespaces nothing, by address and as JSON neither."""
    ended("open", kept)
    ended("secret", kept)
    kept.world.job("open", "odd", runs(), entity=HOSTILE)
    kept.writer.write()
    world = kept.world
    world.page = Page(
        world.caches, world.recent, Everybody({"open"}), clock=lambda: world.now, history=kept.path
    )
    async with looked_at(world) as client:
        listed = await text_of(client, "/history")
        assert "open/one" in listed and "secret" not in listed and "<script>" not in listed
        words = plain(await text_of(client, "/history/uid-open-one"))
        assert "Failed . out of memory" in words and "LayersMoved at step 50" in words
        await text_of(client, "/history/uid-secret-one", 404)
        await text_of(client, "/history/uid-none", 404)
        found = await (await client.get("/history.json?namespace=open&text=one")).json()
        assert [job["name"] for job in found["jobs"]] == ["one"]
        kept.path.rename(kept.path.with_suffix(".elsewhere"))
        assert "cannot be read" in await text_of(client, "/history", 503)
        await text_of(client, "/jobs")
