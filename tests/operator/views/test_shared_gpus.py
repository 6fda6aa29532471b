"""Nodes that offer each GPU several times, by their labels."""

import pytest
from ballast_operator.views.nodes import shared_gpus

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
