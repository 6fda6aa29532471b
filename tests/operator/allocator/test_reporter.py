"""Reports on ClusterPolicies: the newest is written, whatever the API server answers."""

import asyncio
import contextlib

import pytest
from ballast_operator.allocator import policy_status as reporting
from ballast_operator.allocator.policy_status import PolicyReport, PolicyReporter, least_status
from ballast_operator.errors import Fenced, Forbidden, Rejected, Unavailable
from ballast_operator.kube.caches import Caches
from ballast_operator.kube.client import DroppedFields
from ballast_operator.kube.kinds import POLICY
from ballast_operator.observation.events import Recorder
from ballast_operator.views.clock import now


class Answers:
    """A cluster that answers each write with what comes next."""

    def __init__(self, *answers):
        self.dropped = DroppedFields()
        self.answers, self.written, self.done = list(answers), [], asyncio.Event()
        self.versions = []

    async def write_status(self, kind, body):
        answer = self.answers.pop(0)
        self.versions.append(body["metadata"].get("resourceVersion"))
        if not self.answers:
            self.done.set()
        if isinstance(answer, Exception):
            raise answer
        self.written.append(body["status"]["conditions"][0]["message"])
        return {**body, "metadata": {**body["metadata"], "uid": "u", "resourceVersion": "9"}}

    async def create(self, kind, body):
        return body


def wrong(message):
    return PolicyReport(misconfigured=message)


async def write_all(answers, reports, monkeypatch):
    """All reports come before the first write begins; each is written on the version that is known."""
    monkeypatch.setattr(reporting, "PAUSE_SECONDS", 0.0)
    caches = Caches()
    item = {"metadata": {"name": "one", "uid": "u", "resourceVersion": "1"}, "spec": {}}
    caches.watched(POLICY, "ADDED", item)
    cluster = Answers(*answers)
    reporter = PolicyReporter(cluster, caches, Recorder(cluster), clock=now)
    for report in reports:
        reporter.report(item, report if isinstance(report, PolicyReport) else wrong(report))
    running = asyncio.create_task(reporter.run())
    await cluster.done.wait()
    await asyncio.sleep(0)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    asked = len(answers)
    before = next((number + 1 for number, answer in enumerate(answers) if answer == "ok"), asked)
    assert cluster.versions == ["1"] * before + ["9"] * (asked - before)
    return cluster.written


async def test_of_several_reports_the_newest_is_written(monkeypatch):
    assert await write_all(["ok"], ["first", "second", "third"], monkeypatch=monkeypatch) == ["third"]


@pytest.mark.parametrize(
    ("answers", "later"),
    [(["ok"] * 2, []), (["ok"] * 2, ["third"]), ([Unavailable("away"), *["ok"] * 2], [])],
)
async def test_a_failure_that_has_passed_before_it_was_written_is_told(answers, later, monkeypatch):
    """The newest of several, before the report that follows it; also where the API server was away."""
    failures = [PolicyReport(failed=message) for message in ("before", "it")]
    written = await write_all(answers, ["first", *failures, "second", *later], monkeypatch=monkeypatch)
    assert written == ["it", (later or ["second"])[0]]


@pytest.mark.parametrize("error", [Unavailable("away"), Rejected("no")])
async def test_a_report_that_is_not_taken_does_not_end_the_reporting(error, monkeypatch):
    """One that the API server could not answer is written again; of what it refuses, plain texts are."""
    written = await write_all([error, "ok"], ["only \U0001f917"], monkeypatch=monkeypatch)
    assert written == ["only \U0001f917" if isinstance(error, Unavailable) else "only ?"]


async def test_a_lapse_of_the_lease_is_not_told_again_with_each_report(monkeypatch, caplog):
    """Reports are tried once a second for as long as the API server is away."""
    caplog.set_level("INFO")
    lapses = [Fenced("lease a/b is not renewed for now")] * 3
    assert await write_all([*lapses, "ok"], ["only"], monkeypatch=monkeypatch) == ["only"]
    assert "not renewed" not in caplog.text


async def test_a_right_that_is_missing_is_not_answered_with_another_status(monkeypatch):
    """The same status is right once the right is granted."""
    assert await write_all([Forbidden("cannot patch resource")], ["only"], monkeypatch=monkeypatch) == []


def test_one_teams_name_does_not_keep_the_rest_of_a_refused_status_out():
    """The bill and other teams go on; that team stays as it is stored, and Ready says what was refused."""
    old = {"teams": [{"team": "a", "cost": 1.0}, {"team": "\u2603", "cost": 1.0}]}
    new = {
        "conditions": [{"type": "Ready", "status": "True", "message": "rounds of 60 s"}],
        "billAt": "later",
        "teams": [{"team": "a", "cost": 2.0}, {"team": "\u2603", "cost": 2.0}],
        "proposed": [{"job": "n/\u2603"}],
    }
    least = least_status(old, new, "HTTP 422 teams[1]: \u2603")
    assert least["teams"] == [{"team": "a", "cost": 2.0}, {"team": "\u2603", "cost": 1.0}]
    assert (least["billAt"], "proposed" in least) == ("later", False)
    assert least["conditions"][0]["message"] == (
        "rounds of 60 s; the API server refused the policy's full status: HTTP 422 teams[1]: ?"
    )
