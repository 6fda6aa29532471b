"""The cluster as decisions see it."""

import pytest
from ballast_policies.allocation.price_classes import PricedPool
from ballast_policies.scheduling.state import Capacity


@pytest.mark.parametrize(("gpus", "k80"), [((4, 1, 3, 100), 0.2), ((0, 0, 0, 0), 0.3)])
def test_a_types_price_is_the_mean_of_its_pools_by_their_gpus(gpus, k80):
    """A pool without a price does not count, and costs as much; without GPUs all pools count alike."""
    named = zip(("a", "b", "b-spot", "b-own"), ("v100", "k80", "k80", "k80"), strict=True)
    pools = tuple(
        PricedPool(pool=name, gpu_type=gpu_type, price=price, gpus=count)
        for (name, gpu_type), price, count in zip(named, (2.0, 0.5, 0.1, 0.0), gpus, strict=True)
    )
    capacity = Capacity(gpu_types=("k80", "v100"), pools=pools)
    assert capacity.prices == pytest.approx({"v100": 2.0, "k80": k80})
    assert capacity.pool_prices == pytest.approx({"a": 2.0, "b": 0.5, "b-spot": 0.1, "b-own": k80})
