"""GPUs that two jobs share: how nodes offer them, which of them are used, and who stands for both jobs."""

import datetime

import pytest
from ballast_operator.api.job_allocation import JobAllocation, SharedGpu
from ballast_operator.views.nodes import as_shared, dedupe_shared_allocations, read_node, shared_gpus

REPLICAS, STRATEGY = "nvidia.com/gpu.replicas", "nvidia.com/gpu.sharing-strategy"
PRODUCT = "nvidia.com/gpu.product"


@pytest.mark.parametrize(
    "labels",
    [
        {},
        {PRODUCT: "Tesla-T4"},
        {PRODUCT: "Tesla-T4", REPLICAS: "1", STRATEGY: "none"},
        {REPLICAS: "0"},
        {REPLICAS: ""},
        {REPLICAS: "many"},
        {REPLICAS: "²"},
    ],
)
def test_whole_gpus_and_labels_that_say_nothing_close_no_node(labels):
    """As on nodes without the feature discovery."""
    assert shared_gpus(labels) == ""


@pytest.mark.parametrize(
    ("labels", "text"),
    [
        ({REPLICAS: "4", STRATEGY: "time-slicing"}, "by time-slicing, 4 replicas of each"),
        ({REPLICAS: "2", STRATEGY: "mps", PRODUCT: "Tesla-T4"}, "by mps, 2 replicas of each"),
        ({REPLICAS: "4"}, "by other pods, 4 replicas of each"),
        ({STRATEGY: "mps"}, "by mps, and"),
        ({PRODUCT: "Tesla-T4-SHARED"}, "by other pods, and"),
    ],
)
def test_each_of_the_labels_says_that_gpus_are_shared(labels, text):
    """Older versions of the feature discovery have no strategy; the product is renamed only by default."""
    assert text in shared_gpus(labels)


START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def holds(pod: str, node: str, *, shared: bool = True, ended: tuple[str, ...] = ()) -> JobAllocation:
    return JobAllocation(
        pool="p",
        gpu_type="v100",
        gpus=1,
        pods=(pod,),
        nodes=(node,),
        since=START,
        shared_gpu=SharedGpu() if shared else None,
        ended=ended,
    )


def test_of_two_jobs_on_one_gpu_the_first_stands_for_both():
    """Jobs whose GPUs are their own all count, on one node as well."""
    first, second, elsewhere = holds("a-1-0", "n"), holds("b-1-0", "n"), holds("c-1-0", "m")
    own = [holds("d-1-0", "k", shared=False), holds("e-1-0", "k", shared=False)]
    assert dedupe_shared_allocations([first, second, elsewhere, *own]) == [first, elsewhere, *own]


def test_a_job_whose_pod_has_ended_does_not_stand_for_the_one_that_pays():
    """Its GPU is held, by the pod of the other."""
    ended, pays = holds("a-1-0", "n", ended=("a-1-0",)), holds("b-1-0", "n")
    assert dedupe_shared_allocations([ended, pays]) == [pays]


GPU = "nvidia.com/gpu"


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


@pytest.mark.parametrize("labels", [{REPLICAS: "2"}, {REPLICAS: "2", STRATEGY: "time-slicing"}])
def test_a_node_with_one_gpu_in_two_replicas_is_used(labels: dict[str, str]):
    """Under the usual name and under the plugin's other one."""
    assert closed(labels, 2) == closed(labels, 2, "nvidia.com/gpu.shared") == ""


@pytest.mark.parametrize(
    ("labels", "offers", "why"),
    [
        ({REPLICAS: "2"}, 4, "it offers 4 of nvidia.com/gpu in place of 2"),
        ({REPLICAS: "2"}, 1, "it offers 1 of"),
        ({REPLICAS: "4"}, 4, f"{REPLICAS} is 4 in place of 2"),
        ({}, 2, f"{REPLICAS} is missing in place of 2"),
        ({REPLICAS: "2", STRATEGY: "mps"}, 2, f"{STRATEGY} is mps"),
    ],
)
def test_other_nodes_take_no_gang_and_say_why(labels: dict[str, str], offers: int, why: str):
    """Two whole GPUs, several GPUs, other replicas, another strategy."""
    assert why in closed(labels, offers)


def test_what_closes_any_node_closes_this_one():
    assert closed({REPLICAS: "2"}, 2, unschedulable=True) == "cordoned"
