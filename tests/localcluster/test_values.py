"""The node agent's decisions that need no cluster: paths, expansion, restarts, phases, node descriptions."""

import asyncio
from pathlib import Path

import pytest
from ballast_localcluster import ProcessNode
from ballast_localcluster.default_nodes import default_nodes, read_nodes
from ballast_localcluster.errors import LocalClusterError, NodesFileError
from ballast_localcluster.nodes.configuration import AgentConfiguration
from ballast_localcluster.nodes.containers.restart import (
    CALM_SECONDS,
    LAST_BACKOFF_SECONDS,
    Backoff,
    restarts,
)
from ballast_localcluster.nodes.containers.states import (
    ContainerView,
    Running,
    Terminated,
    Waiting,
    pod_phase,
    pod_status,
)
from ballast_localcluster.nodes.node import Taint
from ballast_localcluster.nodes.pod_resources.addresses import PodAddresses
from ballast_localcluster.nodes.pod_resources.devices import Devices, NotEnoughDevicesError
from ballast_localcluster.nodes.pod_resources.environment import expand
from ballast_localcluster.nodes.pod_resources.paths import mount_variable, translate
from hypothesis import given
from hypothesis import strategies as st

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


@given(st.text())
def test_without_mounts_a_text_stays_as_it_is(text):
    """Whatever it is."""
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
def test_restart_policies(policy, code, want):
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
    return Terminated(exit_code=code, reason="")


UP = Running(started_at="")
WAIT = Waiting(reason="ContainerCreating")


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
        ([], [view(Waiting(reason="CrashLoopBackOff"), last_state=ended(1))], "Running"),
        ([view(UP)], [view(WAIT)], "Pending"),
        ([view(ended(0))], [view(UP)], "Running"),
        ([view(ended(1))], [view(WAIT)], "Failed"),
        ([view(ended(1), will_restart=True)], [view(WAIT)], "Pending"),
    ],
)
def test_phases_follow_from_the_containers(init, containers, want):
    """As kubelet derives them."""
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


def test_two_agents_never_share_addresses():
    """Each claims a block that the kernel gives to one only, and gives it back."""
    first, second = PodAddresses(), PodAddresses()
    try:
        assert first.block != second.block
        taken = [first.take() for _ in range(600)]
        assert len(set(taken)) == 600
        assert all(0 < int(address.split(".")[3]) < 255 for address in taken)
    finally:
        first.close()
        second.close()


def test_addresses_in_use_are_not_given_again():
    """After a whole round of the block, too."""
    addresses = PodAddresses()
    try:
        kept = addresses.take()
        for _ in range(256 * 256):
            address = addresses.take()
            assert address != kept
            addresses.give_back(address)
    finally:
        addresses.close()


GAVEL_STEPS_PER_SECOND = {
    "transformer": {"v100": 8.618, "p100": 5.092, "k80": 1.752},
    "recurrent": {"v100": 64.742, "p100": 58.173, "k80": 17.142},
}
"""Measured by Gavel's authors on one GPU: "Transformer (batch size 64)" and "LM (batch size 20)"."""


def test_the_default_nodes_have_three_gpu_types_and_a_spot_pool():
    """Of emulated speeds whose ratios are those that were measured on such GPUs."""
    nodes = default_nodes()
    pools = {node.pool: node for node in nodes}
    assert {"k80", "p100", "v100"} <= set(pools)
    assert [node.capacity_type for node in pools.values()].count("spot") == 1
    for family, measured in GAVEL_STEPS_PER_SECOND.items():
        for gpu_type in ("p100", "k80"):
            emulated = pools[gpu_type].slowdown[family] / pools["v100"].slowdown[family]
            assert emulated == pytest.approx(measured["v100"] / measured[gpu_type], rel=0.03), (
                family,
                gpu_type,
            )


def test_a_node_object_says_pool_speed_and_that_it_is_emulated():
    """Labels and annotations carry it; nodes without a slow-down have no such annotation."""
    node = ProcessNode(name="n", gpus=2, pool="p", capacity_type="spot", slowdown={"default": 2.0})
    metadata = node.manifest()["metadata"]
    assert metadata["labels"]["ballast.dev/pool"] == "p"
    assert metadata["labels"]["ballast.dev/capacity-type"] == "spot"
    assert metadata["annotations"]["ballast.dev/emulated-slowdown"] == '{"default": 2.0}'
    assert "emulated" in metadata["annotations"]["ballast.dev/process-node"]
    assert node.capacity()["nvidia.com/gpu"] == "2"
    assert "ballast.dev/emulated-slowdown" not in ProcessNode(name="m").manifest()["metadata"]["annotations"]


def test_an_agents_configuration_survives_its_file(tmp_path):
    """What is written is what is read."""
    node = ProcessNode(name="n", gpus=1, taints=(Taint(key="k", value="v"),), slowdown={"default": 2.0})
    before = AgentConfiguration(
        kubeconfig=tmp_path / "k", certificates=tmp_path, folder=tmp_path, logs=tmp_path, nodes=(node,)
    )
    before.write(tmp_path / "agent.json")
    assert AgentConfiguration.read(tmp_path / "agent.json") == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes: [{name: a, gpu: 2}]", r"unknown keys \['gpu'\]"),
        ("nodes: [{gpus: 2}]", "no name"),
        ("nodes: [{name: a, slowdown: {default: 0.5}}]", "slowdown of default is 0.5.*at least 1"),
        ("nodes: [{name: a, gpus: -1}]", "cannot be negative"),
        ("nodes: [{name: a, capacity_type: cheap}]", "onDemand or spot"),
        ("nodes: [{name: a}, {name: a}]", "several nodes are named a"),
        ("nodes: [{name: a, gpus: two}]", "'gpus': 'two'"),
        ("nodes: [a]", "'a'"),
        ("- a", "expected one key, nodes"),
        ("nodes: [", "is not YAML"),
    ],
)
def test_a_wrong_description_of_nodes_is_refused_with_its_reason(tmp_path, text, message):
    """The message names the file and what to change."""
    path = tmp_path / "nodes.yaml"
    path.write_text(text)
    with pytest.raises(NodesFileError, match=message):
        read_nodes(path)


def test_a_cluster_that_is_not_started_says_so():
    """Instead of failing somewhere inside."""
    from ballast_localcluster import LocalCluster

    with pytest.raises(LocalClusterError, match=r"not running. To fix: call start\(\) first"):
        _ = LocalCluster().kubeconfig


def asking(uid, gpus):
    limits = {"limits": {"nvidia.com/gpu": str(gpus)}}
    return {"metadata": {"uid": uid}, "spec": {"containers": [{"name": "c", "resources": limits}]}}


async def test_a_pod_waits_for_gpus_that_are_being_given_back():
    """Its node knows that others have ended before their last process is gone; it does not refuse then."""
    devices = Devices(2)
    devices.take(asking("first", 1))
    devices.take(asking("second", 1))
    devices.ends("first")
    devices.ends("second")
    waiting = asyncio.create_task(devices.take_when_free(asking("third", 2)))
    devices.give_back("first")
    await asyncio.sleep(0)
    assert not waiting.done()
    devices.give_back("second")
    assert await waiting == {"c": (0, 1)}
    assert devices.held == {"third": {"c": (0, 1)}}


async def test_a_pod_does_not_wait_for_gpus_that_no_pod_is_giving_back():
    """Who runs is not waited for, nor is a pod that ended without holding any."""
    devices = Devices(1)
    devices.take(asking("runs", 1))
    devices.ends("held none")
    with pytest.raises(NotEnoughDevicesError, match="0 of 1 free"):
        await devices.take_when_free(asking("late", 1))
