"""Whose fault a pod's end was."""

import pytest
from ballast_operator.kube.kept_fields import prune_fields
from ballast_operator.kube.kinds import POD
from ballast_operator.views.pod import LONGEST_DETAIL, read_pod
from ballast_policies.contract.messages import ExitReason, TerminationMessage


def ended(code: int, *, reason: str = "Error", message: str = "", **status) -> dict:
    state = {"terminated": {"exitCode": code, "reason": reason, "message": message}}
    return {
        "metadata": {"name": "p", "uid": "u", "labels": {"ballast.dev/launch": "2", "ballast.dev/rank": "1"}},
        "spec": {"nodeName": "n", "containers": [{"name": "trainer"}, {"name": "sidecar"}]},
        "status": {
            "phase": "Failed" if code else "Succeeded",
            "containerStatuses": [{"name": "sidecar", "state": {}}, {"name": "trainer", "state": state}],
            **status,
        },
    }


def said(reason: ExitReason) -> str:
    return TerminationMessage(reason=reason, message="words").to_json()


CASES = {
    "the model raised": (ended(1, message=said(ExitReason.FAILED)), True),
    "it says nothing": (ended(1), True),
    "a wrong configuration": (ended(2, message=said(ExitReason.CONFIGURATION)), True),
    "out of memory": (ended(137, reason="OOMKilled"), True),
    "a segmentation fault": (ended(139), True),
    "it exits with 255 itself": (ended(255), True),
    "it says why, and then its node restarts": (
        ended(255, reason="Unknown", message=said(ExitReason.FAILED)),
        True,
    ),
    "its node restarted, as containerd says": (ended(255, reason="Unknown"), False),
    "its node restarted, and CRI-O knows no code": (ended(-1), False),
    "its node restarted, as the kubelet says": (ended(137, reason="ContainerStatusUnknown"), False),
    "killed from outside": (ended(137), False),
    "terminated from outside": (ended(143), False),
    "stopped as asked": (ended(75, message=said(ExitReason.STOPPED)), False),
    "lost a peer": (ended(76, message=said(ExitReason.PEER_LOST)), False),
    "evicted, as the pod says": (
        {**ended(1), "status": {**ended(1)["status"], "reason": "Evicted"}},
        False,
    ),
    "its node shuts down, as the pod says": (
        {**ended(1), "status": {**ended(1)["status"], "reason": "Terminated"}},
        False,
    ),
    "preempted, as a condition says": (
        ended(1, conditions=[{"type": "DisruptionTarget", "status": "True"}]),
        False,
    ),
    "finished": (ended(0), False),
}


@pytest.mark.parametrize(("item", "want_at_fault"), CASES.values(), ids=CASES.keys())
def test_the_end_of_a_pod_is_blamed_on_the_right_one(item, want_at_fault):
    """User errors count toward the limit; what the cluster did to the pod does not."""
    assert read_pod(item, node_ready=True).at_fault is want_at_fault


def test_a_pod_is_read_by_its_labels_and_its_own_container():
    """Launch and rank from labels; the exit code of the first container, whatever the order of statuses."""
    pod = read_pod(ended(76), node_ready=False)
    assert (pod.launch, pod.rank, pod.exit_code, pod.lost_peer) == (2, 1, 76, True)
    assert not pod.alive
    assert not pod.node_ready


def test_a_pod_that_waits_says_for_what():
    """The kubelet's and the scheduler's words reach the message."""
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    item = ended(0)
    item["status"] = {"phase": "Pending", "containerStatuses": [{"name": "trainer", "state": waiting}]}
    assert read_pod(item, node_ready=True).reason == "ImagePullBackOff"
    item["status"] = {
        "phase": "Pending",
        "conditions": [
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
        ],
    }
    assert read_pod(item, node_ready=True).detail == "0/3 nodes"


@pytest.mark.parametrize(
    ("prepared", "reason", "pulls"),
    [
        ("True", "ContainerCreating", True),
        ("False", "ContainerCreating", False),
        ("True", "ErrImagePull", False),
        ("True", "CreateContainerConfigError", False),
    ],
)
def test_a_pod_whose_volumes_and_network_are_there_pulls_its_image(prepared, reason, pulls):
    """Before, it waits for a volume or a network; after a failed pull, it waits for the registry."""
    item = ended(0)
    item["status"] = {
        "phase": "Pending",
        "conditions": [{"type": "PodReadyToStartContainers", "status": prepared}],
        "containerStatuses": [{"name": "trainer", "state": {"waiting": {"reason": reason}}}],
    }
    pod = read_pod(item, node_ready=True)
    assert (pod.pulling, pod.reason) == (pulls, "PullingImage" if pulls else reason)


def waits(reason: str, message: str = "") -> dict:
    return {"waiting": {"reason": reason, "message": message}}


@pytest.mark.parametrize(
    ("state", "phase", "reason", "detail"),
    [
        (
            {"terminated": {"exitCode": 3, "reason": "Error", "message": "a\nno bucket\n"}},
            "Failed",
            "Error",
            "no bucket",
        ),
        ({"terminated": {"exitCode": 137, "reason": "OOMKilled"}}, "Failed", "OOMKilled", ""),
        (waits("ImagePullBackOff", "manifest unknown"), "Pending", "ImagePullBackOff", "manifest unknown"),
    ],
)
def test_an_init_container_that_fails_or_cannot_start_is_named(state, phase, reason, detail):
    """Its end is the user's, as the trainer's is; of that the kubelet says that the pod initializes."""
    item = initializing(phase, done={"terminated": {"exitCode": 0}}, data=state)
    pod = read_pod(prune_fields(POD, item), node_ready=True)
    assert (pod.reason, pod.detail) == (reason, f"init container data: {detail}".removesuffix(": "))
    assert (pod.at_fault, pod.broken) == (phase == "Failed", phase == "Pending")


@pytest.mark.parametrize(
    ("states", "reason", "detail"),
    [
        ({}, "PullingImage", ""),
        ({"data": waits("PodInitializing")}, "PullingImage", ""),
        ({"data": {"running": {}}}, "PodInitializing", "init container data runs"),
        ({"data": {"terminated": {"exitCode": 0}}, "proxy": {"running": {}}}, "PullingImage", ""),
    ],
)
def test_a_pod_whose_image_is_pulled_or_whose_init_container_runs_has_time(states, reason, detail):
    """The kubelet has one word for both; a sidecar runs beside the pull of the trainer's image."""
    pod = read_pod(prune_fields(POD, initializing("Pending", **states)), node_ready=True)
    assert (pod.reason, pod.detail, pod.pulling) == (reason, detail, True)


def initializing(phase: str, **states: dict) -> dict:
    item = ended(0)
    item["spec"]["initContainers"] = [
        {"name": "done"},
        {"name": "data"},
        {"name": "proxy", "restartPolicy": "Always"},
    ]
    item["status"] = {
        "phase": phase,
        "conditions": [{"type": "PodReadyToStartContainers", "status": "True"}],
        "initContainerStatuses": [{"name": name, "state": state} for name, state in states.items()],
        "containerStatuses": [{"name": "trainer", "state": waits("PodInitializing")}],
    }
    return item


@pytest.mark.parametrize("node_ready", [True, False])
def test_a_pod_that_is_evicted_from_a_dead_node_has_no_time_to_save(node_ready):
    """The taint manager deletes pods of nodes that went without a word: nobody there hears of it."""
    item = ended(0, conditions=[{"type": "DisruptionTarget", "status": "True", "reason": "x"}])
    item["status"] |= {"phase": "Running", "containerStatuses": []}
    item["metadata"]["deletionTimestamp"] = "2026-11-24T10:00:30Z"
    pod = read_pod(item, node_ready=node_ready)
    assert ((pod.leaves is not None), (pod.deletion is not None)) == (node_ready, node_ready)


def test_a_process_without_a_message_of_its_own_is_explained_by_the_end_of_its_log():
    """The kubelet hands over the log's last lines; of a traceback the last one has the error."""
    log = "Traceback (most recent call last):\n  File 'train.py', line 3\nValueError: no such column\n\n"
    pod = read_pod(ended(1, message=log), node_ready=True)
    assert (pod.message, pod.detail) == (None, "ValueError: no such column")
    assert len(read_pod(ended(1, message="x" * 5000), node_ready=True).detail) == LONGEST_DETAIL
    assert read_pod(ended(1, message=said(ExitReason.FAILED)), node_ready=True).detail == ""
    restarted = read_pod(ended(255, reason="Unknown", message=log), node_ready=True)
    assert restarted.detail == "its node or the container runtime there restarted"


@pytest.mark.parametrize(("code", "want_at_fault"), [(255, False), (1, True)])
def test_of_a_pod_whose_node_restarted_only_an_end_that_nobody_saw_is_the_nodes(code, want_at_fault):
    """CRI-O and Docker give it exit code 255; a user's own error may be told after the restart."""
    assert read_pod(ended(code), node_ready=True, restarted=True).at_fault is want_at_fault


@pytest.mark.parametrize("text", ["9" * 5000, "\u00b2", "\u0663", "-1", "1.5", ""])
def test_a_label_that_is_no_number_of_ours_is_no_launch(text):
    """Neither digits of other scripts, nor more of them than Python converts."""
    pod = ended(0)
    pod["metadata"]["labels"] = {"ballast.dev/launch": text, "ballast.dev/rank": text}
    view = read_pod(pod, node_ready=True)
    assert (view.launch, view.rank) == (0, -1)


@pytest.mark.parametrize(
    ("sidecar", "message", "phase", "lingers"),
    [
        ({"running": {}}, "", "Failed", True),
        ({"terminated": {}}, said(ExitReason.FAILED), "Failed", False),
        ({"terminated": {}}, "", "Running", False),
        ({"terminated": {}}, said(ExitReason.STOPPED), "Running", False),
    ],
)
def test_the_kubelet_has_the_last_word_unless_a_sidecar_runs_on(sidecar, message, phase, lingers):
    """What it evicts ends with the code of a crash, and its reason comes with the phase, a moment later."""
    item = ended(1, message=message)
    item["status"]["phase"] = "Running"
    item["status"]["containerStatuses"][0]["state"] = sidecar
    pod = read_pod(item, node_ready=True)
    assert (pod.phase, pod.lingers) == (phase, lingers)
    evicted = ended(75, message=said(ExitReason.STOPPED))
    evicted["status"] |= {"reason": "Evicted", "message": "The node was low on resource: ephemeral-storage. "}
    pod = read_pod(evicted, node_ready=True)
    assert (pod.at_fault, pod.reason) == (False, "Evicted")
    assert pod.detail == "The node was low on resource: ephemeral-storage."
