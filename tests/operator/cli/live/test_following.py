"""Commands that go on looking at a cluster read it once, and then what changes."""

import asyncio
import json

import pytest
from ballast_operator.cli.live import top
from ballast_operator.errors import Forbidden, Unreachable
from ballast_operator.kube.kinds import JOB, POLICY

from tests.operator.loops.simulated.simulation import job as training_job


class Served:
    """An API server with three jobs, one of which changes once it is watched."""

    def __init__(self, looks=float("inf"), *, refuses=()):
        self.asked, self.looks, self.refuses = [], looks, refuses

    async def list(self, kind, *, namespace="", label_selector=""):
        self.asked.append(("list", kind.plural, namespace))
        if kind in self.refuses:
            raise Forbidden("cannot list")
        return [job(number) for number in range(3)] if kind is JOB else [], 7

    async def serves(self, kind):
        self.looks -= 1
        if self.looks < 0:
            raise Unreachable("connection refused")
        return True

    async def watch(self, kind, version, *, namespace="", label_selector=""):
        self.asked.append(("watch", kind.plural, namespace))
        assert version == "7"
        if kind is JOB:
            yield json.dumps({"type": "MODIFIED", "object": job(1, "Running", version="8")}).encode()
        await asyncio.Event().wait()


def job(number, state="Waiting", version="1"):
    item = training_job(f"job-{number}")
    item["metadata"] |= {"uid": f"uid-{number}", "resourceVersion": version}
    return {**item, "status": {"state": state}}


@pytest.mark.parametrize(("namespace", "refuses"), [("", ()), ("team", ()), ("team", (POLICY,))])
async def test_top_lists_once_and_watches_then(monkeypatch, namespace, refuses):
    """However often it looks: a list of thousands of jobs each second is felt by everybody else."""
    served, looks = Served(refuses=refuses), []

    class EnoughError(Exception):
        pass

    def seen(line):
        told = json.loads(line)
        assert told["policies"] == ["not shown: cannot list" for _ in refuses]
        looks.append({row["job"]: row["state"] for row in told["jobs"]})
        if looks[-1]["job-1"] == "Running" and len(looks) > 5:
            raise EnoughError

    monkeypatch.setattr(top.click, "echo", seen)
    with pytest.raises(EnoughError):
        await top._show(served, namespace, 0.001, "json")
    assert looks[0] == {"job-0": "Waiting", "job-1": "Waiting", "job-2": "Waiting"}
    assert sorted(served.asked) == [
        ("list", POLICY.plural, ""),
        ("list", JOB.plural, namespace),
        *(("watch", kind.plural, "") for kind in {POLICY} - set(refuses)),
        ("watch", JOB.plural, namespace),
    ]


async def test_top_ends_with_the_error_of_an_api_server_that_is_gone(monkeypatch):
    """Its watches wait for it: what was seen last would stay on the screen."""
    looks = []

    monkeypatch.setattr(top.click, "echo", looks.append)
    with pytest.raises(Unreachable, match="connection refused"):
        await top._show(Served(looks=3), "", 0.001, "json")
    assert len(looks) == 4
