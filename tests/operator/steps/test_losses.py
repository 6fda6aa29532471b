"""How often machines of a gang are lost, as its trainer is told."""

import dataclasses

import pytest
from ballast_operator.api.job_allocation import AllocationPart
from ballast_operator.steps.decide import failures_per_hour
from ballast_operator.views.assignment import GangPools, PoolInfo

from tests.operator.steps.contexts import PODS, a_context, a_running_view
from tests.operator.views.builders import a_plan

SPOT, ON_DEMAND = PoolInfo(losses_per_hour=0.25), PoolInfo()


def rate(first: PoolInfo, second: PoolInfo | None = None) -> float | None:
    """Of a gang on four nodes, two of them in the second pool."""
    view = a_running_view()
    allocation = view.status.allocation.with_pods(dict(zip(PODS, "abcd", strict=True)))
    pools = {}
    if second is not None:
        parts = (
            AllocationPart(pool=allocation.pool, gpu_type=allocation.gpu_type, pods=PODS[:2]),
            AllocationPart(pool="second", gpu_type="k80", pods=PODS[2:]),
        )
        allocation, pools = allocation.replace(parts=parts), {allocation.pool: first, "second": second}
    view = dataclasses.replace(view, status=view.status.replace(allocation=allocation))
    return failures_per_hour(a_context(view, pools=GangPools(first=first, others=pools)), a_plan(PODS))


@pytest.mark.parametrize(
    ("pools", "want"),
    [
        ((SPOT,), 1.0),
        ((ON_DEMAND,), None),
        ((SPOT, ON_DEMAND), 0.5),
        ((ON_DEMAND, SPOT), 0.5),
        ((SPOT, PoolInfo(losses_per_hour=1.0)), 2.5),
        ((ON_DEMAND, ON_DEMAND), None),
    ],
)
def test_each_node_counts_at_the_rate_of_its_own_pool(pools, want):
    """A gang in several pools loses only machines of those that may be taken away."""
    assert rate(*pools) == want
