"""Restarts, phases and conditions of a pod, from the states of its containers."""

from pathlib import Path

import pytest
from ballast_localcluster.nodes.containers.commands import mount_variable, translate
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
from ballast_localcluster.nodes.pod_resources.environment import expand
from hypothesis import given
from hypothesis import strategies as st


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


MOUNTS = {"/data": Path("/real/data"), "/data/inner": Path("/real/inner"), "/etc/config": Path("/c")}


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("/data", "/real/data"),
        ("/data/file", "/real/data/file"),
        ("/data/inner/file", "/real/inner/file"),
        ("--path=/data", "--path=/real/data"),
        ("cat '/etc/config/a'; ls /data", "cat '/c/a'; ls /real/data"),
        ("file:///data/x", "file:///data/x"),
        ("/database", "/database"),
        ("/my/data", "/my/data"),
        ("/data-old", "/data-old"),
        ("/data/innermost", "/real/data/innermost"),
        ("nothing", "nothing"),
    ],
)
def test_container_paths_become_real_ones_where_they_stand_whole(text, want):
    """At a word's beginning and up to a slash or the end; the longest mount wins."""
    assert translate(text, MOUNTS) == want


@pytest.mark.slow
@given(st.text())
def test_without_mounts_a_text_stays_as_it_is(text):
    assert translate(text, {}) == text


def test_a_mounts_variable_is_a_legal_name():
    """Dashes and dots of a volume's name become underscores."""
    assert mount_variable("my-data.2") == "BALLAST_MOUNT_MY_DATA_2"


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("$(A)", "1"),
        ("x$(A)y$(B)", "x1y2"),
        ("$(NONE)", "$(NONE)"),
        ("$$(A)", "$(A)"),
        ("$$$$", "$$"),
        ("$A ${A}", "$A ${A}"),
        ("$(A", "$(A"),
    ],
)
def test_variables_expand_as_kubernetes_has_it(text, want):
    """$(NAME) by its value, unknown names and shell syntax left alone, $$ for a dollar."""
    assert expand(text, {"A": "1", "B": "2"}) == want
