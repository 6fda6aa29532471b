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


FALLS_BACK = {"terminationMessagePolicy": "FallbackToLogsOnError"}


@pytest.mark.parametrize(
    ("script", "container", "want"),
    [
        ("exit 75", {}, (75, "Error", "")),
        ("kill -9 $$$$", {}, (137, "Error", "")),  # $$ is how a pod writes one $
        ("", {"command": ["no-such-program"]}, (128, "StartError", "no-such-program")),
        ("echo the reason; exit 3", FALLS_BACK, (3, "Error", "the reason\n")),
        ("head -c 9000 /dev/zero | tr '\\0' x > /dev/termination-log; exit 1", {}, (1, "Error", "x" * 4096)),
    ],
    ids=["exit code", "signal", "no program", "end of its log", "long message"],
)
def test_a_pod_that_fails_says_how(pods, script, container, want):
    """By exit code, 128 and its signal, or that it could not start, and 4096 bytes of words at most."""
    ended = pods.run("a", script, container=container)
    code, reason, message = want
    assert (ended["exitCode"], ended["reason"]) == (code, reason)
    assert message in ended.get("message", "") and len(ended.get("message", "")) <= 4096
    assert pods.status("a")["phase"] == "Failed"


SIDECAR = {"name": "side", "image": "none", "command": ["sleep", "1000"], "restartPolicy": "Always"}


@pytest.mark.parametrize(
    ("kind", "spec", "words"),
    [
        ("containerStatuses", {"container": {"command": None}}, "To fix: set command."),
        ("initContainerStatuses", {"initContainers": [SIDECAR]}, "(a sidecar)"),
    ],
    ids=["no command", "sidecar"],
)
def test_what_process_nodes_do_not_run_waits_and_says_why(pods, kind, spec, words):
    """What an image would run is not known; a sidecar is not waited for as if it were an init container."""
    pods.create("a", "true", **spec)
    pods.wait_for_waiting("a", words, kind)


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
