"""Nodes as a file describes them, as the cluster sees them, and as their agent reads them."""

import json
from pathlib import Path

import pytest
import yaml
from ballast_localcluster import ProcessNode
from ballast_localcluster.errors import LocalClusterError, NodesFileError
from ballast_localcluster.nodes.api import Api, ApiError
from ballast_localcluster.nodes.configuration import AgentConfiguration
from ballast_localcluster.nodes.node import Taint, default_nodes, nodes_of

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
    ],
)
def test_a_wrong_description_of_nodes_is_refused_with_its_reason(text, message):
    """The message names the file and what to change."""
    with pytest.raises(NodesFileError, match=message):
        nodes_of(yaml.safe_load(text), Path("nodes.yaml"))


def test_a_cluster_that_is_not_started_says_so():
    """Instead of failing somewhere inside."""
    from ballast_localcluster import LocalCluster

    with pytest.raises(LocalClusterError, match=r"not running. To fix: call start\(\) first"):
        _ = LocalCluster().kubeconfig


AGENT = 'User "system:ballast:node-agent"'


@pytest.mark.parametrize(
    ("status", "message", "passing"),
    [
        (403, f'pods is forbidden: {AGENT} cannot list resource "pods" in API group ""', True),
        (403, 'pods "a" is forbidden: exceeded quota: q, requested: pods=1', False),
        (404, "not found", False),
        (409, "changed", False),
        (429, "too many requests", True),
        (504, "timed out", True),
    ],
)
def test_an_agent_tries_again_what_an_api_server_may_soon_allow(status, message, passing):
    """One that has just started answers 403 until it has read the roles: no reason to give a node up."""
    assert ApiError(status, message).is_passing is passing


async def test_objects_that_go_in_a_gap_of_the_watch_are_told_as_gone(tmp_path):
    """A version that is too old is the gap: the list after it lacks what was deleted meanwhile."""

    def item(name):
        return {"metadata": {"uid": f"uid-{name}", "name": name, "resourceVersion": "1"}}

    class Gapped(Api):
        lists = iter([["a", "b"], ["c"]])

        async def call_until_reached(self, method, path, body=None, **_):
            return {"metadata": {"resourceVersion": "1"}, "items": [item(name) for name in next(self.lists)]}

        async def _watch(self, path, query, version):
            yield {"type": "ADDED", "object": item("d")}
            yield {"type": "DELETED", "object": item("a")}
            yield {"type": "ERROR", "object": {}}

    kubeconfig = tmp_path / "kubeconfig"
    cluster = {"server": "", "certificate-authority-data": ""}
    users = [{"user": {"token": ""}}]
    kubeconfig.write_text(json.dumps({"clusters": [{"cluster": cluster}], "users": users}))
    told = []
    async for there, found in Gapped(kubeconfig).follow("/", {}):
        told.append((there, found["metadata"]["name"]))
        if len(told) == 7:
            break
    assert told[:4] == [(True, "a"), (True, "b"), (True, "d"), (False, "a")]
    assert sorted(told[4:6]) == [(False, "b"), (False, "d")] and told[6] == (True, "c")
