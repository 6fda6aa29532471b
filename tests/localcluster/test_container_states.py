"""Restarts, phases and conditions of a pod, from the states of its containers."""

import pytest
from ballast_localcluster.nodes.containers.runner import (
    CALM_SECONDS,
    LAST_BACKOFF_SECONDS,
    Backoff,
    restarts,
)
from ballast_localcluster.nodes.containers.states import (
    ContainerView,
    pod_phase,
    pod_status,
    terminated,
    waiting,
)


@pytest.mark.parametrize(
    ("policy", "code", "want"),
    [
        ("Always", 0, True),
        ("Always", 1, True),
        ("OnFailure", 0, False),
        ("OnFailure", 1, True),
        ("Never", 0, False),
        ("Never", 1, False),
    ],
)
def test_a_container_restarts_as_its_policy_says(policy, code, want):
    """As Kubernetes defines the three."""
    assert restarts(policy, code) is want


def test_back_off_doubles_up_to_its_limit_and_forgets_after_a_calm_run():
    """The first restart does not wait."""
    backoff = Backoff()
    assert [backoff.seconds(0) for _ in range(8)] == [0, 1, 2, 4, 8, 16, 30, LAST_BACKOFF_SECONDS]
    assert backoff.seconds(CALM_SECONDS) == 0


def view(state, **more):
    return ContainerView(name="c", image="i", state=state, **more)


def ended(code):
    return terminated(code, "", since="")


UP = {"running": {"startedAt": ""}}

WAIT = waiting("ContainerCreating")


@pytest.mark.parametrize(
    ("init", "containers", "want"),
    [
        ([], [view(WAIT)], "Pending"),
        ([], [view(UP)], "Running"),
        ([], [view(UP), view(WAIT)], "Running"),
        ([], [view(ended(0))], "Succeeded"),
        ([], [view(ended(0)), view(ended(1))], "Failed"),
        ([], [view(ended(0)), view(UP)], "Running"),
        ([], [view(ended(1), will_restart=True)], "Running"),
        ([], [view(waiting("CrashLoopBackOff"), last_state=ended(1))], "Running"),
        ([view(UP)], [view(WAIT)], "Pending"),
        ([view(ended(0))], [view(UP)], "Running"),
        ([view(ended(1))], [view(WAIT)], "Failed"),
        ([view(ended(1), will_restart=True)], [view(WAIT)], "Pending"),
    ],
)
def test_phases_follow_from_the_containers(init, containers, want):
    assert pod_phase(init, containers) == want


def status(*, init=(), containers, previous=None):
    """A pod's status, as its conditions by type."""
    found = pod_status(
        init=list(init),
        containers=list(containers),
        address="",
        host_address="127.0.0.1",
        start_time="",
        previous=previous or {},
    )
    return found, {condition["type"]: condition for condition in found["conditions"]}


@pytest.mark.parametrize(
    ("containers", "ready", "reason", "message"),
    [
        ([UP], "True", None, None),
        ([WAIT], "False", "ContainersNotReady", "containers with unready status: [c]"),
        ([ended(1)], "False", "ContainersNotReady", "containers with unready status: [c]"),
        ([ended(0)], "False", "PodCompleted", None),
    ],
)
def test_a_pod_is_ready_while_its_containers_run(containers, ready, reason, message):
    """Ready and ContainersReady say the same, and why not."""
    _, conditions = status(containers=map(view, containers))
    for kind in ("Ready", "ContainersReady"):
        found = conditions[kind]
        assert (found["status"], found["reason"], found["message"]) == (ready, reason, message)
    assert conditions["Initialized"]["status"] == "True"


def test_a_pod_is_initialized_when_its_init_containers_have_succeeded():
    """Until then the condition names those that have not."""
    _, conditions = status(init=[view(ended(0)), view(UP)], containers=[view(WAIT)])
    assert conditions["Initialized"]["status"] == "False"
    assert conditions["Initialized"]["message"] == "containers with incomplete status: [c]"


def test_a_condition_keeps_its_time_until_its_status_changes():
    """The transition time is that of the status built before, as long as the status is the same."""
    long_ago = "2020-01-01T00:00:00Z"
    before, _ = status(containers=[view(UP)])
    for condition in before["conditions"]:
        condition["lastTransitionTime"] = long_ago
    _, same = status(containers=[view(UP)], previous=before)
    _, other = status(containers=[view(ended(1))], previous=before)
    assert same["Ready"]["lastTransitionTime"] == other["Initialized"]["lastTransitionTime"] == long_ago
    assert other["Ready"]["lastTransitionTime"] > long_ago
