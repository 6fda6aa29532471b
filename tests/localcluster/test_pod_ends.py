"""How pods end: signals and grace, restarts, deletion, and nothing of them is left."""

import os
import signal
from pathlib import Path

import pytest

from tests.support.waiting import eventually, is_alive

pytestmark = pytest.mark.api


def pid_of(pods, name):
    """Process id of a container's first process, once its status is reported."""

    def look():
        (container,) = pods.status(name).get("containerStatuses") or [{}]
        return container.get("containerID")

    return int(eventually(look, f"pod {name} has a process").removeprefix("process://"))


def test_deletion_sends_sigterm_and_waits_for_the_process(pods, tmp_path):
    """A process that ends itself within the grace does its last work."""
    left = tmp_path / "left"
    pods.create("a", f"trap 'echo saved > {left}; exit 75' TERM; echo up; while :; do sleep 0.05; done")
    pods.wait_for_log("a", "up")
    pods.kubectl("delete", "pod", "a", "--wait=false")
    pods.wait_until_gone("a")
    assert left.read_text() == "saved\n"


def test_the_status_before_the_end_shows_the_exit_code(pods):
    """A watch of a deleted pod shows how its process ended before the object goes."""
    pods.create(
        "a",
        "trap 'exit 75' TERM; echo up; while :; do sleep 0.05; done",
        metadata={"finalizers": ["ballast.dev/test"]},
    )
    pods.wait_for_log("a", "up")
    pods.kubectl("delete", "pod", "a", "--wait=false")
    status = pods.wait_for_phase("a", "Failed")
    assert status["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 75
    pods.kubectl("patch", "pod", "a", "--type=merge", "-p", '{"metadata":{"finalizers":null}}')
    pods.wait_until_gone("a")


def test_a_process_that_ignores_sigterm_is_killed_with_all_its_children(pods):
    """After the grace, the whole process group goes, and what left the group, too."""
    pods.create("a", "trap '' TERM; (setsid sleep 1000 &) ; sleep 1000 & echo up; wait; sleep 1000")
    pods.wait_for_log("a", "up")
    mark = f"BALLAST_POD_UID={pods.get('a')['metadata']['uid']}".encode()

    def processes():
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:  # another user's, or gone
                continue
        return found

    eventually(lambda: len(processes()) >= 3, "shell and two sleepers")
    pods.kubectl("delete", "pod", "a", "--grace-period=1", "--wait=false")
    pods.wait_until_gone("a")
    eventually(lambda: processes() == [], "the processes to be gone")


def test_a_forced_deletion_kills_at_once(pods):
    """With --force the object goes first, and the process follows without a grace."""
    pods.create("a", "trap '' TERM; echo up; while :; do sleep 0.05; done")
    pods.wait_for_log("a", "up")
    pid = pid_of(pods, "a")
    pods.kubectl("delete", "pod", "a", "--force", "--grace-period=0")
    eventually(lambda: not is_alive(pid), "the process to be gone")


def test_a_pod_that_has_ended_is_deleted_without_waiting(pods):
    pods.run("a", "true", terminationGracePeriodSeconds=3600)
    pods.kubectl("delete", "pod", "a")
    assert pods.get("a") is None


def test_a_pod_that_cannot_start_is_deleted_without_waiting(pods):
    """A missing volume does not hold the deletion up."""
    volumes = [{"name": "v", "configMap": {"name": "missing"}}]
    pods.create("a", "true", volumes=volumes, terminationGracePeriodSeconds=3600)
    pods.wait_for_phase("a", "Pending")
    eventually(lambda: "FailedMount" in pods.kubectl("get", "events"), "the event")
    pods.kubectl("delete", "pod", "a")
    assert pods.get("a") is None


def test_a_new_pod_of_the_same_name_is_another_pod(pods):
    """A pod made right after a deletion has its own process, folder and log."""
    pods.run("a", "echo first")
    pods.kubectl("delete", "pod", "a")
    pods.run("a", "echo second")
    assert pods.logs("a") == "second\n"


def restart_count(status):
    """Of the only container; 0 before it has a status."""
    return sum(container["restartCount"] for container in status.get("containerStatuses", []))


@pytest.mark.parametrize(("policy", "code"), [("Always", 0), ("OnFailure", 3)])
def test_restart_policies_that_start_it_again(pods, policy, code):
    """The count rises, the last end is kept, later restarts wait; the log of the run before is there."""
    pods.create("a", f"echo run; exit {code}", restartPolicy=policy)
    history = pods.history("a", lambda statuses: restart_count(statuses[-1]) == 2)
    counts = [restart_count(status) for status in history]
    assert counts == sorted(counts)
    restarted = [status["containerStatuses"][0] for status in history if restart_count(status) > 0]
    assert {container["lastState"]["terminated"]["exitCode"] for container in restarted} == {code}
    reasons = [container["state"].get("waiting", {}).get("reason") for container in restarted]
    assert reasons.count("CrashLoopBackOff") == 1, "the first restart is at once, the second waits"
    assert {status["phase"] for status in history} == {"Pending", "Running"}
    assert pods.kubectl("logs", "a", "--previous") == "run\n"


def test_a_process_killed_from_outside_is_seen_at_once(pods):
    """Say, by the machine's memory killer."""
    pods.create("a", "exec sleep 1000")
    pods.wait_for_phase("a", "Running")
    os.kill(pid_of(pods, "a"), signal.SIGKILL)
    status = pods.wait_for_phase("a", "Failed")
    assert status["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 137


@pytest.mark.parametrize(("group", "kind"), [("v1", "ConfigMap"), ("example.dev/v1", "Thing")])
def test_pods_of_a_deleted_owner_are_collected(pods, group, kind):
    """Quickly enough to wait for; of a kind that was installed before the controllers without a wait."""
    pods.apply({"apiVersion": group, "kind": kind, "metadata": {"name": "owner"}})
    uid = pods.kubectl("get", kind, "owner", "-o", "jsonpath={.metadata.uid}")
    owner = {"apiVersion": group, "kind": kind, "name": "owner", "uid": uid}
    pods.create("a", "exec sleep 1000", metadata={"ownerReferences": [owner]})
    pods.wait_for_phase("a", "Running")
    pods.kubectl("delete", kind, "owner")
    pods.wait_until_gone("a")
