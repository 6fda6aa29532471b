"""``memoryPerGpu`` of a pool and of a job: amounts of memory, and nothing else."""

import pytest
from ballast_operator.api.base import memory_bytes
from ballast_operator.api.read import InvalidObject, read_cluster_policy, read_training_job

from tests.operator.loops.simulated.simulation import job, policy


def a_policy(memory):
    item = policy("a100")
    item["spec"]["nodePools"][0]["memoryPerGpu"] = memory
    return item


@pytest.mark.parametrize(
    ("text", "expected"),
    [("80G", 80e9), ("15.5Gi", 15.5 * 2**30), ("64M", 64e6), ("85899345920", 80 * 2**30), ("1Ti", 2**40)],
)
def test_amounts_as_kubernetes_writes_them(text, expected):
    """In a pool and in a job alike."""
    assert memory_bytes(text) == expected
    assert read_cluster_policy(a_policy(text)).spec.node_pools[0].memory_per_gpu == text
    assert read_training_job(job("one", memoryPerGpu=text)).spec.memory_per_gpu == text


@pytest.mark.parametrize(
    "nonsense",
    ["0", "0Gi", "-16Gi", "16", "16 GB", "16GB", "500m", "1e9", "NaN", "infGi", "9" * 40, "", 16, None],
)
def test_what_is_no_memory_of_a_gpu_is_refused(nonsense):
    """With the field's path; null is as good as leaving it out."""
    if nonsense is None:
        assert read_cluster_policy(a_policy(None)).spec.node_pools[0].memory_per_gpu is None
        return
    with pytest.raises(InvalidObject, match="memoryPerGpu"):
        read_cluster_policy(a_policy(nonsense))
    with pytest.raises(InvalidObject, match="memoryPerGpu"):
        read_training_job(job("one", memoryPerGpu=nonsense))
