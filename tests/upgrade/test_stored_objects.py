"""What operators of earlier versions have stored is read, and the jobs in it continue."""

import base64
import copy
import json
from pathlib import Path
from typing import Any

import pytest
from ballast_operator.allocator.saved_state import STATE_KEY, STATE_NAME
from ballast_operator.allocator.saved_state import decode as read_saved_state
from ballast_operator.api.read import read_cluster_policy, read_training_job
from ballast_operator.api.training_job_status import JobState
from ballast_operator.kube.kinds import CONFIG_MAP, JOB, LEASE, POLICY
from ballast_policies.contract.messages import PLAN_KEY

from tests.operator.loops.simulated.simulation import NAMESPACE
from tests.upgrade.stored import GOLDEN, MOMENTS, restored

VERSIONS = sorted(folder for folder in GOLDEN.iterdir() if folder.is_dir())
RECORDINGS = [path for version in VERSIONS for path in sorted(version.glob("*.json"))]

same_launch = ("starting", "running", "repacking", "repacked")
at_its_end = ("succeeded", "failed")


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


@pytest.fixture(params=RECORDINGS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def path(request) -> Path:
    return request.param


def test_the_recordings_have_every_moment_and_every_state():
    """Of each version; a state that this version has added is not asked of older ones."""
    for version in VERSIONS:
        assert {path.stem for path in version.glob("*.json")} >= set(MOMENTS) or version != VERSIONS[-1]
    newest = {job["status"]["state"] for path in VERSIONS[-1].glob("*.json") for job in jobs(load(path))}
    assert newest == {state.value for state in JobState}


def jobs(recording: dict[str, Any]) -> list[dict[str, Any]]:
    return [item for item in recording["objects"] if item["kind"] == JOB.kind]


def test_every_stored_object_is_read(path):
    """Jobs, policy, saved state; nothing of it has become invalid."""
    for item in load(path)["objects"]:
        if item["kind"] == JOB.kind:
            read_training_job(item)
        if item["kind"] == POLICY.kind:
            read_cluster_policy(item)
        if item["kind"] == CONFIG_MAP.kind and item["metadata"]["name"] == STATE_NAME:
            state = read_saved_state(base64.b64decode(item["binaryData"][STATE_KEY]))
            assert state.memory is not None


async def test_a_stored_job_continues_under_this_version(path):
    """In its launch where it had one; a job that had ended stays as it was; a suspended one resumes."""
    recording, moment = load(path), path.stem
    before = copy.deepcopy(next(job for job in jobs(recording) if job["metadata"]["name"] == "one"))
    simulation = restored(recording)
    if moment in at_its_end:
        await simulation.ticks(10)
        assert simulation.world.get(JOB, NAMESPACE, "one")["status"] == before["status"]
        return
    if moment in ("stopping", "suspended"):
        await simulation.until(lambda: simulation.state("one") == "Suspended")
        simulation.world.patch(JOB, NAMESPACE, "one", {"spec": {"suspend": False}})
    await simulation.until(lambda: simulation.state("one") == "Succeeded")
    status = simulation.status("one")
    launches = before["status"].get("launches", 0)
    assert status.launches == (launches if moment in same_launch else launches + 1)
    assert status.restarts == before["status"].get("restarts", {})
    assert all(step > 0 for step in simulation.trainers["one"].resumed_from[1:]), "a checkpoint was not used"


@pytest.mark.slow
async def test_what_a_newer_operator_has_added_is_ignored_and_kept(path):
    """After a rollback: fields of a status at its top, annotations, labels; no pass fails on any of them."""
    recording = load(path)
    for item in recording["objects"]:
        if item["kind"] in (JOB.kind, POLICY.kind):
            item.setdefault("status", {})["fromTheFuture"] = {"deep": [1, {"x": None}]}
        if item["kind"] == JOB.kind and item["status"].get("allocation"):
            item["status"]["allocation"]["fromTheFuture"] = True
        if item["kind"] in (JOB.kind, LEASE.kind, CONFIG_MAP.kind):
            item["metadata"].setdefault("annotations", {})["ballast.dev/from-the-future"] = "yes"
        if item["kind"] == CONFIG_MAP.kind and PLAN_KEY in item.get("data", {}):
            plan = json.loads(item["data"][PLAN_KEY])
            item["data"][PLAN_KEY] = json.dumps({**plan, "fromTheFuture": 1})
    simulation = restored(recording)
    if path.stem in ("stopping", "suspended"):
        await simulation.until(lambda: simulation.state("one") == "Suspended")
    elif path.stem != "failed":
        await simulation.until(lambda: simulation.state("one") == "Succeeded")
    await simulation.ticks(3)
    for kind, key in ((JOB, (NAMESPACE, "one")), (POLICY, ("", "default"))):
        item = simulation.world.get(kind, *key)
        assert item["status"]["fromTheFuture"] == {"deep": [1, {"x": None}]}, kind.kind
    annotations = simulation.world.get(JOB, NAMESPACE, "one")["metadata"]["annotations"]
    assert annotations["ballast.dev/from-the-future"] == "yes"
