"""Node objects that another program makes become machines of this one, until that program removes them."""

import os

import pytest
from ballast_localcluster.errors import NodesFileError
from ballast_localcluster.nodes.node import ProcessNode
from ballast_localcluster.rest import Rest, node_is_ready

from tests.support.waiting import eventually, is_alive

LABELS = {"example.dev/made-by": "an-autoscaler"}
NODE = {
    "apiVersion": "v1",
    "kind": "Node",
    "metadata": {"name": "made", "labels": {**LABELS, "kubernetes.io/hostname": "another-name"}},
    "status": {"allocatable": {"cpu": "7900m", "memory": "30Gi", "pods": "11", "nvidia.com/gpu": "3"}},
}


def test_a_node_is_read_from_its_object():
    """Its resources and labels; of what it does not state, the usual."""
    node = ProcessNode.from_object(NODE)
    assert node.capacity() == {**NODE["status"]["allocatable"], "ephemeral-storage": "100Gi"}
    assert node.manifest()["metadata"]["labels"]["kubernetes.io/hostname"] == "another-name"
    bare = ProcessNode.from_object({"metadata": {"name": "bare"}})
    assert (bare.gpus, bare.capacity()) == (0, ProcessNode(name="bare").capacity())


@pytest.mark.parametrize("gpus", ["500m", "-1", "1Ki", "", "²"])
def test_a_number_of_gpus_that_is_none_is_refused(gpus):
    """So that the agent passes over the node, and serves the others."""
    status = {"allocatable": {"nvidia.com/gpu": gpus}}
    with pytest.raises(NodesFileError, match=r"node odd: nvidia\.com/gpu is '.*', which is no number"):
        ProcessNode.from_object({"metadata": {"name": "odd"}, "status": status})


@pytest.mark.api
def test_a_node_that_another_program_makes_runs_pods_until_it_is_deleted(cluster, pods):
    """Ready by itself, with the resources and labels of its object; with the object goes what ran there."""
    rest = Rest(cluster.kubeconfig)
    cluster.adopt_nodes(LABELS)
    odd = {**NODE, "metadata": {"name": "odd", "labels": LABELS}, "status": {}}
    odd["status"] = {"allocatable": {"nvidia.com/gpu": "1"}, "capacity": {"nvidia.com/gpu": "1"}}
    for manifest in (NODE, odd):
        rest.call("POST", "/api/v1/nodes", manifest)
    for name in ("made", "odd"):
        eventually(lambda name=name: node_is_ready(rest, name), f"node {name} to be Ready")
    made = rest.call("GET", "/api/v1/nodes/made")
    assert made["metadata"]["labels"]["kubernetes.io/hostname"] == "another-name"
    assert made["status"]["allocatable"]["nvidia.com/gpu"] == "3"

    gpus = {"resources": {"limits": {"nvidia.com/gpu": "3"}}}
    script = "echo pid $$$$ of $NVIDIA_VISIBLE_DEVICES; sleep 100000"
    pods.create("there", script, container=gpus, nodeSelector=LABELS)
    eventually(lambda: "of 0,1,2" in pods.logs("there"), "its log")
    assert pods.get("there")["spec"]["nodeName"] == "made"
    process = int(pods.logs("there").split()[1])
    assert is_alive(process) and process != os.getpid()

    rest.call("DELETE", "/api/v1/nodes/made")
    eventually(lambda: not is_alive(process), "the pod's process to end with the machine")
    pods.kubectl("delete", "pod", "there", "--grace-period=0", "--force")
    rest.call("POST", "/api/v1/nodes", NODE)
    eventually(lambda: node_is_ready(rest, "made"), "another machine of the same name to be Ready")
    assert pods.run("again", "true", container=gpus, nodeSelector=LABELS)["exitCode"] == 0
    for name in ("made", "odd"):
        rest.call("DELETE", f"/api/v1/nodes/{name}")
