"""Which nodes of a pool with sharing two jobs may share."""

import pytest
from ballast_operator.views.nodes import read_node
from ballast_operator.views.shared_gpus import as_shared

GPU, COUNT = "nvidia.com/gpu", "nvidia.com/gpu.replicas"
STRATEGY = "nvidia.com/gpu.sharing-strategy"


def closed(labels: dict[str, str], offers: int, resource: str = GPU, **spec: object) -> str:
    item = {
        "metadata": {"name": "n", "labels": labels},
        "spec": spec,
        "status": {
            "allocatable": {resource: str(offers)},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }
    return as_shared(read_node(item), resource).closed


@pytest.mark.parametrize("labels", [{COUNT: "2"}, {COUNT: "2", STRATEGY: "time-slicing"}])
def test_a_node_with_one_gpu_in_two_replicas_is_used(labels: dict[str, str]):
    """Under the usual name and under the plugin's other one."""
    assert closed(labels, 2) == closed(labels, 2, "nvidia.com/gpu.shared") == ""


@pytest.mark.parametrize(
    ("labels", "offers", "why"),
    [
        ({COUNT: "2"}, 4, "it offers 4 of nvidia.com/gpu in place of 2"),
        ({COUNT: "2"}, 1, "it offers 1 of"),
        ({COUNT: "4"}, 4, f"{COUNT} is 4 in place of 2"),
        ({}, 2, f"{COUNT} is missing in place of 2"),
        ({COUNT: "2", STRATEGY: "mps"}, 2, f"{STRATEGY} is mps"),
    ],
)
def test_other_nodes_take_no_gang_and_say_why(labels: dict[str, str], offers: int, why: str):
    """Two whole GPUs, several GPUs, other replicas, another strategy."""
    assert why in closed(labels, offers)


def test_what_closes_any_node_closes_this_one():
    """A cordon, with its own reason."""
    assert closed({COUNT: "2"}, 2, unschedulable=True) == "cordoned"
