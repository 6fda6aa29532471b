"""A pod on a process node is a process, and its status says what became of it."""

import json

import pytest

from tests.support.waiting import eventually

pytestmark = pytest.mark.api


def test_a_pod_that_ends_well_succeeds_and_leaves_its_log_and_message(pods):
    """Exit code 0 is Succeeded; kubectl logs shows both streams; the termination message is in the status.

    Its file is there before the process writes to it, as a kubelet's is.
    """
    ended = pods.run(
        "a", "echo out; echo err >&2; test -f /dev/termination-log && echo last words > /dev/termination-log"
    )
    assert (ended["exitCode"], ended["reason"], ended["message"]) == (0, "Completed", "last words\n")
    assert sorted(pods.kubectl("logs", "a").split()) == ["err", "out"]
    status = pods.status("a")
    assert status["phase"] == "Succeeded"
    conditions = {c["type"]: c["status"] for c in status["conditions"]}
    assert conditions == {
        "PodScheduled": "True",
        "Initialized": "True",
        "ContainersReady": "False",
        "Ready": "False",
    }


def test_a_pod_that_fails_shows_its_exit_code(pods):
    """A process's exit code is the container's."""
    assert pods.run("a", "exit 75")["exitCode"] == 75
    assert pods.status("a")["phase"] == "Failed"


def test_a_process_killed_by_a_signal_shows_128_plus_the_signal(pods):
    """As container engines report it."""
    ended = pods.run("a", "kill -9 $$$$")  # $$ is how a pod writes one $
    assert (ended["exitCode"], ended["reason"]) == (137, "Error")


def test_a_command_that_does_not_exist_is_a_start_error(pods):
    """The status names the command that cannot be run."""
    ended = pods.run("a", "", container={"command": ["no-such-program"]})
    assert (ended["exitCode"], ended["reason"]) == (128, "StartError")
    assert "no-such-program" in ended["message"]


def test_a_pod_without_a_command_waits_and_says_that_images_are_not_read(pods):
    """What an image would run is not known, and the status says what to change."""
    pods.apply(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "a"},
            "spec": {"containers": [{"name": "main", "image": "busybox"}]},
        }
    )

    def waiting():
        (container,) = pods.status("a").get("containerStatuses", [{"state": {}}])
        return container["state"].get("waiting", {}).get("message", "").endswith("To fix: set command.")

    eventually(waiting, "the reason")


def test_a_sidecar_is_refused_with_the_reason(pods):
    """Rather than waited for as if it were an init container."""
    sidecar = {"name": "side", "image": "none", "command": ["sleep", "1000"], "restartPolicy": "Always"}
    pods.create("a", "true", initContainers=[sidecar])

    def waiting():
        (container,) = pods.status("a").get("initContainerStatuses", [{"state": {}}])
        return "(a sidecar)" in container["state"].get("waiting", {}).get("message", "")

    eventually(waiting, "the reason")


def test_a_failed_process_without_a_message_falls_back_to_its_log(pods):
    """terminationMessagePolicy FallbackToLogsOnError takes the log's end."""
    ended = pods.run(
        "a", "echo the reason; exit 3", container={"terminationMessagePolicy": "FallbackToLogsOnError"}
    )
    assert ended["message"] == "the reason\n"


def test_a_long_termination_message_is_cut(pods):
    """At 4096 bytes, as kubelet does."""
    ended = pods.run("a", "head -c 9000 /dev/zero | tr '\\0' x > /dev/termination-log")
    assert ended["message"] == "x" * 4096


def test_a_running_pod_is_ready_and_has_its_own_loopback_address(pods):
    """Each pod has an address of 127.0.0.0/8 that it can listen on, and no two have the same."""
    for name in ("a", "b"):
        pods.create(name, "echo up; exec sleep 1000")
    found = {name: pods.wait_for_phase(name, "Running") for name in ("a", "b")}
    addresses = {status["podIP"] for status in found.values()}
    assert len(addresses) == 2
    assert all(address.startswith("127.") for address in addresses)
    assert all(
        {"type": "Ready", "status": "True"}.items() <= c.items()
        for s in found.values()
        for c in s["conditions"]
        if c["type"] == "Ready"
    )


def test_init_containers_run_in_order_before_the_containers(pods):
    """Each one ends before the next begins."""
    shared = [{"name": "shared", "mountPath": "/shared"}]
    step = {"image": "none", "volumeMounts": shared}
    pods.create(
        "a",
        "cat /shared/steps",
        container={"volumeMounts": shared},
        volumes=[{"name": "shared", "emptyDir": {}}],
        initContainers=[
            {**step, "name": "one", "command": ["sh", "-c", "echo one >> /shared/steps"]},
            {**step, "name": "two", "command": ["sh", "-c", "echo two >> /shared/steps"]},
        ],
    )
    pods.wait_for_phase("a", "Succeeded")
    assert pods.logs("a").split() == ["one", "two"]


def test_a_failed_init_container_fails_the_pod(pods):
    """With restartPolicy Never the containers never start, and wait with the reason that kubelet gives."""
    pods.create("a", "echo no", initContainers=[{"name": "i", "image": "none", "command": ["false"]}])
    history = pods.history("a", lambda statuses: statuses[-1]["phase"] == "Failed")
    states = [status["containerStatuses"][0]["state"] for status in history if "containerStatuses" in status]
    assert [state["waiting"]["reason"] for state in states] == ["PodInitializing"] * len(states)
    assert {c["type"]: c["status"] for c in history[-1]["conditions"]}["Initialized"] == "False"


def test_a_pod_past_its_deadline_fails(pods):
    """activeDeadlineSeconds ends it with the reason DeadlineExceeded."""
    pods.create("a", "exec sleep 1000", activeDeadlineSeconds=1)
    assert pods.wait_for_phase("a", "Failed")["reason"] == "DeadlineExceeded"


def test_logs_follow_tail_and_end(pods):
    """kubectl logs knows --follow, --tail and --limit-bytes; what cannot be had is refused and why."""
    pods.create("a", "for i in 1 2 3 4 5; do echo line $i; sleep 0.1; done")
    pods.wait_for_phase("a", "Running", "Succeeded")
    assert pods.kubectl("logs", "a", "--follow").splitlines() == [f"line {i}" for i in range(1, 6)]
    assert pods.kubectl("logs", "a", "--tail=2").splitlines() == ["line 4", "line 5"]
    assert pods.kubectl("logs", "a", "--limit-bytes=4") == "line"
    assert "do not keep the time of a line" in pods.kubectl("logs", "a", "--since=1m", check=False)


def test_events_tell_what_happened(pods):
    """kubectl describe shows where the pod went and what was started."""
    pods.run("a", "true")

    def reasons():
        events = json.loads(pods.kubectl("get", "events", "-o", "json"))["items"]
        return {event["reason"] for event in events}

    eventually(lambda: reasons() >= {"Scheduled", "Started"}, "both Events")
