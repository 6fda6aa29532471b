"""The policies that a ClusterPolicy may name are those that the operator can feed."""

import pytest
from ballast_operator.allocator.snapshot import price_by_type
from ballast_operator.api.cluster_policy import NEEDS_MORE, USABLE_POLICIES, NodePool
from ballast_policies.allocation.problem import Job, Problem
from ballast_policies.allocation.registry import POLICY_NAMES, allocate

POOLS = tuple(
    NodePool.model_validate(
        {
            "name": name,
            "nodeSelector": {"pool": name},
            "gpuType": gpu_type,
            "pricePerGpuHour": price,
        }
    )
    for name, gpu_type, price in (("a", "v100", 2.0), ("b", "k80", 0.5), ("b-spot", "k80", 0.1))
)


@pytest.mark.parametrize("policy", USABLE_POLICIES)
def test_a_usable_policy_solves_what_the_operator_passes(policy):
    """Throughput, gang, weight, steps left and prices are enough; nothing falls back."""
    jobs = tuple(
        Job(
            name=f"team/job-{i}",
            throughput={"v100": 4.0 + i, "k80": 1.0},
            gpus=1 + i % 2,
            weight=1.0 + i,
            steps_remaining=100.0 * (i + 1),
        )
        for i in range(4)
    )
    problem = Problem(
        gpu_types=("v100", "k80"), capacity={"v100": 2, "k80": 2}, jobs=jobs, prices=price_by_type(POOLS)
    )
    answer = allocate(policy, problem)
    assert set(answer.allocation) == {job.name for job in jobs}
    assert sum(answer.throughput.values()) > 0


def test_the_refused_policies_exist():
    """A renamed policy does not become usable by accident."""
    assert set(POLICY_NAMES) >= NEEDS_MORE
    assert set(POLICY_NAMES) == NEEDS_MORE | set(USABLE_POLICIES)


def test_a_types_price_is_the_mean_of_its_pools():
    """Two pools of one type, on demand and spot."""
    assert price_by_type(POOLS) == pytest.approx({"v100": 2.0, "k80": 0.3})
