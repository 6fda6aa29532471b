"""What the pools of a ClusterPolicy have to give."""

import pytest
from ballast_operator.allocator.problem.capacity import price_by_type
from ballast_operator.api.node_pool import NodePool

POOLS = tuple(
    NodePool.model_validate(
        {"name": name, "nodeSelector": {"pool": name}, "gpuType": gpu_type, "pricePerGpuHour": price}
    )
    for name, gpu_type, price in (
        ("a", "v100", 2.0),
        ("b", "k80", 0.5),
        ("b-spot", "k80", 0.1),
        ("b-own", "k80", 0.0),
    )
)


def test_a_types_price_is_the_mean_of_its_pools_by_their_gpus():
    """A pool without a price does not count; without GPUs all pools count alike."""
    gpus = {"a": 4, "b": 1, "b-spot": 3, "b-own": 100}
    assert price_by_type(POOLS, gpus) == pytest.approx({"v100": 2.0, "k80": 0.2})
    assert price_by_type(POOLS, {}) == pytest.approx({"v100": 2.0, "k80": 0.3})
