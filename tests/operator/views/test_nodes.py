"""What nodes leave to the pods of jobs, by what other pods ask for."""

import pytest
from ballast_operator.views.nodes import pod_requests, read_node

INIT = {"resources": {"requests": {"cpu": "3"}}}
SIDECAR = {"restartPolicy": "Always", "resources": {"requests": {"cpu": "1"}}}
MAIN = {"resources": {"requests": {"cpu": "500m"}, "limits": {"cpu": "2", "memory": "1Gi"}}}


@pytest.mark.parametrize(
    ("spec", "cpus"),
    [
        ({"containers": [MAIN, MAIN]}, 1.0),
        ({"containers": [MAIN], "initContainers": [INIT]}, 3.0),
        ({"containers": [MAIN], "initContainers": [SIDECAR, INIT]}, 4.0),
        ({"containers": [MAIN], "initContainers": [SIDECAR]}, 1.5),
        ({"containers": [MAIN], "resources": {"requests": {"cpu": "6"}}}, 6.0),
        ({"containers": [MAIN], "overhead": {"cpu": "250m"}}, 0.75),
        ({"containers": [{"resources": {"requests": {"cpu": "NaN"}}}]}, 0.0),
        ({"containers": [{}]}, None),
    ],
)
def test_a_pods_requests_are_those_that_kube_scheduler_counts(spec, cpus):
    """Init containers one by one, sidecars all along, the pod's own before its containers', with overhead."""
    found = pod_requests(spec)
    assert found.get("cpu") == cpus
    assert found["pods"] == 1.0


def test_a_node_has_room_for_what_pods_of_others_leave():
    """Limits count without requests; pods that have ended or are not bound do not, nor a node's lies."""
    offered = {"cpu": "8", "memory": "2Gi", "pods": "3", "nvidia.com/gpu": "-1", "x/y": "many"}
    item = {"metadata": {"name": "n"}, "status": {"allocatable": offered}}
    pods = [
        {
            "metadata": {"name": str(number)},
            "spec": {"nodeName": node, "containers": [MAIN]},
            "status": {"phase": phase},
        }
        for number, (node, phase) in enumerate(
            [("n", "Running"), ("n", "Pending"), ("n", "Failed"), ("", "Pending")]
        )
    ]
    assert read_node(item, pods).room == {"cpu": 7.0, "memory": 0.0, "pods": 1.0}
