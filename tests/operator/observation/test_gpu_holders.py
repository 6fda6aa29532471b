"""Which jobs hold GPUs of a node is known without reading every job; only changes of a status are written."""

import asyncio
import datetime

import pytest
from ballast_operator.api.job_allocation import JobAllocation
from ballast_operator.api.training_job_status import Decision, TrainingJobStatus, status_content
from ballast_operator.kube.client import connect
from ballast_operator.kube.kinds import JOB
from ballast_operator.observation.events import MOST_WAITING, EventToPost, Recorder
from ballast_operator.observation.observer import GpuHolders

from tests.operator.api.objects import JOB as TRANSLATOR
from tests.operator.api.objects import changed

NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def holding(*nodes: str) -> TrainingJobStatus:
    pods = tuple(f"p-{index}" for index in range(len(nodes)))
    allocation = JobAllocation(
        launch=1, gpu_type="v100", pool="a", gpus=len(nodes), pods=pods, nodes=nodes, plan_id="x", since=NOW
    )
    return TrainingJobStatus(allocation=allocation)


def test_only_changed_jobs_are_read():
    """A launch among thousands of jobs looks at its own nodes."""
    statuses = {("n", f"job-{index}"): holding(f"node-{index}") for index in range(100)}
    read = []

    def status(key):
        read.append(key)
        return statuses.get(key)

    holders = GpuHolders(status)
    for key in statuses:
        holders.changed(key)
    assert len(holders) == 100
    read.clear()
    assert holders.on_nodes(["node-7"]).keys() == {("n", "job-7")}
    assert not read
    statuses["n", "job-7"] = holding("node-8", "node-8")
    holders.changed(("n", "job-7"))
    assert not holders.on_nodes(["node-7"])
    assert holders.on_nodes(["node-8"]).keys() == {("n", "job-7"), ("n", "job-8")}
    assert read == [("n", "job-7")]


def test_a_job_that_is_gone_or_unreadable_holds_nothing_by_its_status():
    statuses = {("n", "a"): holding("x")}
    holders = GpuHolders(statuses.get)
    holders.changed(("n", "a"))
    assert len(holders) == 1
    statuses.clear()
    holders.changed(("n", "a"))
    assert len(holders) == 0 and not holders.on_nodes(["x"])


def test_a_launch_that_is_being_written_counts():
    """Two passes at the same time do not count on one GPU."""
    reservations = {}
    holders = GpuHolders(lambda key: None, reservations)
    held = holding("x").allocation
    reservations["n", "a"] = held
    assert holders.on_nodes(["x", "y"]) == {("n", "a"): held}
    assert not holders.on_nodes(["y"])


def test_what_is_empty_is_not_written():
    """Of a job that waits, most is; whoever reads it finds the same status."""
    status = TrainingJobStatus(observed_generation=1, last_decision=Decision(why="no GPUs are free"))
    content = status_content(status)
    assert content.keys() == {"observedGeneration", "lastDecision"}
    assert TrainingJobStatus.model_validate(content) == status


def test_a_job_that_was_launched_has_all_counts():
    """What scripts read of it is there, 0 or not."""
    content = status_content(TrainingJobStatus(launches=1))
    assert (content["launches"], content["restarts"], content["lostSteps"]) == (1, {}, 0)


@pytest.mark.api
async def test_what_has_become_empty_is_removed(control_plane, namespace):
    """By the API server, since the operator has written it before."""
    async with await connect(str(control_plane.kubeconfig)) as cluster:
        await cluster.create(JOB, changed(TRANSLATOR, "metadata.namespace", namespace))
        name = {"namespace": namespace, "name": TRANSLATOR["metadata"]["name"]}
        for seconds in (3.0, 0.0):
            status = status_content(TrainingJobStatus(observed_generation=2, suspended_seconds=seconds))
            body = {"apiVersion": JOB.api_version, "kind": JOB.kind, "metadata": name, "status": status}
            answer = await cluster.write_status(JOB, body)
            assert TrainingJobStatus.model_validate(answer["status"]).suspended_seconds == seconds
        assert answer["status"] == {"observedGeneration": 2}


async def test_a_flood_of_events_is_told_of_once(caplog):
    """While a slow API server takes them: thousands of jobs that change are no thousands of lines."""
    posted, all_posted = [], asyncio.Event()

    class Slow:
        async def create(self, kind, body):
            await asyncio.sleep(0)
            posted.append(body["message"])
            if len(posted) % MOST_WAITING == 0:
                all_posted.set()

    recorder = Recorder(Slow())
    for flood in ("one", "two"):
        for number in range(MOST_WAITING + 100):
            notice = EventToPost(type="Normal", reason="Assigned", message=flood)
            recorder.post(JOB, "n", f"job-{number}", f"uid-{number}", (notice,))
        running = asyncio.create_task(recorder.run())
        await all_posted.wait()
        all_posted.clear()
        running.cancel()
    assert posted == ["one"] * MOST_WAITING + ["two"] * MOST_WAITING
    assert sum("the oldest are dropped" in record.message for record in caplog.records) == 2
