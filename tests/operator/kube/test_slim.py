"""The caches keep what is read, and no more."""

from ballast_operator.kube.kinds import JOB, NODE, POD
from ballast_operator.kube.slim import pinned_node, slim
from ballast_operator.views.nodes import pod_gpus, read_node
from ballast_operator.views.pod import read_pod

POD_ITEM = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {
        "name": "j-1-0",
        "namespace": "n",
        "uid": "u",
        "resourceVersion": "5",
        "labels": {"ballast.dev/job": "j", "ballast.dev/launch": "1", "ballast.dev/rank": "0"},
        "annotations": {"some": "thing"},
        "managedFields": [{"manager": "x"}],
        "ownerReferences": [{"uid": "o"}],
    },
    "spec": {
        "nodeName": "node",
        "volumes": [{"name": "v"}],
        "containers": [
            {"name": "trainer", "image": "i", "env": [], "resources": {"limits": {"nvidia.com/gpu": "2"}}}
        ],
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [
                        {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["node"]}]}
                    ]
                }
            }
        },
    },
    "status": {
        "phase": "Failed",
        "podIP": "10.0.0.1",
        "reason": "Evicted",
        "conditions": [{"type": "DisruptionTarget", "status": "True", "lastProbeTime": None}],
        "containerStatuses": [
            {"name": "trainer", "image": "i", "state": {"terminated": {"exitCode": 3, "message": "m"}}}
        ],
    },
}


def test_a_slim_pod_reads_as_the_whole_one():
    """Whatever a pass looks at is kept."""
    kept = slim(POD, POD_ITEM)
    assert read_pod(kept, node_ready=True) == read_pod(POD_ITEM, node_ready=True)
    assert pod_gpus(kept, "nvidia.com/gpu") == 2
    assert pinned_node(kept) == pinned_node(POD_ITEM) == "node"
    assert kept["metadata"]["ownerReferences"] == [{"uid": "o"}]
    assert "managedFields" not in kept["metadata"] and "volumes" not in kept["spec"]


def test_a_slim_node_reads_as_the_whole_one():
    """Labels, taints, readiness and what it offers; not its images."""
    item = {
        "metadata": {"name": "a", "labels": {"pool": "x"}, "annotations": {"y": "z"}},
        "spec": {"unschedulable": True, "taints": [{"key": "k", "effect": "NoSchedule"}], "podCIDR": "c"},
        "status": {
            "images": [{"names": ["large"]}],
            "allocatable": {"nvidia.com/gpu": "8"},
            "conditions": [{"type": "Ready", "status": "True", "lastHeartbeatTime": "t"}],
        },
    }
    kept = slim(NODE, item)
    assert read_node(kept) == read_node(item)
    assert "images" not in kept["status"]


def test_equal_strings_are_stored_once():
    """Twenty thousand pods name the same resource."""
    one, other = (
        slim(JOB, {"metadata": {"name": "a", "labels": {"k": "".join(["nvi", "dia"])}}, "spec": {"x": 1}})
        for _ in range(2)
    )
    assert one["metadata"]["labels"]["k"] is other["metadata"]["labels"]["k"]


def test_an_object_nested_beyond_reason_is_kept_as_it_is():
    """A template may hold anything; its job answers for it, and the watch continues."""
    nested: dict = {}
    for _ in range(5000):
        nested = {"a": nested}
    item = {"metadata": {"name": "a"}, "spec": nested}
    assert slim(JOB, item) is item
