"""Which jobs hold GPUs of a node is known without reading every job."""

import datetime

from ballast_operator.api.job_allocation import JobAllocation
from ballast_operator.api.training_job_status import TrainingJobStatus
from ballast_operator.observation.observer import GpuHolders

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
    """Its pods are counted from the pods."""
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
