"""What kubectl shows of a job, memory as Kubernetes writes it, and the examples, which are valid."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from ballast_operator.api.base import memory_bytes
from ballast_operator.api.job_allocation import AllocationPart, JobAllocation
from ballast_operator.api.read import InvalidObject, read_cluster_policy, read_training_job
from ballast_operator.api.schema.crd import RESOURCES

from tests.operator.loops.simulated.simulation import job, policy
from tests.operator.views.builders import NOW

PODS = ("a", "b", "c")


def shown_types(allocation):
    """The column of the GPU type, of a status as it is written."""
    (column,) = [column for column in RESOURCES[0].columns if column["name"] == "GPU type"]
    value = {"status": {"allocation": allocation.to_dict()}}
    for field in column["jsonPath"].strip(".").split("."):
        value = value[field]
    return value


def test_a_gang_in_several_pools_shows_the_types_of_all_of_them():
    """In the order of its ranks, each once; what an older operator has written shows them, too."""
    one = JobAllocation(gpu_type="v100", pool="fast", gpus=3, pods=PODS, since=NOW)
    assert shown_types(one) == "v100"
    parts = (
        AllocationPart(pool="fast", gpu_type="v100", pods=PODS[:1]),
        AllocationPart(pool="spot", gpu_type="v100", pods=PODS[1:2]),
        AllocationPart(pool="slow", gpu_type="k80", pods=PODS[2:]),
    )
    both = one.replace(parts=parts)
    assert shown_types(both) == "v100+k80"
    older = {field: value for field, value in both.to_dict().items() if field != "allGpuTypes"}
    assert shown_types(JobAllocation.model_validate(older)) == "v100+k80"


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


OBJECTS = [
    pytest.param(item, id=f"{path.name}-{item['metadata']['name']}")
    for path in sorted((Path(__file__).parents[3] / "examples").glob("**/*.yaml"))
    for item in yaml.load_all(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    if str(item.get("apiVersion", "")).startswith("ballast.dev/")  # not those of Karpenter
]


@pytest.mark.parametrize("item", OBJECTS)
def test_an_example_obeys_the_rules_of_the_api(item: dict[str, Any]) -> None:
    """Those that the API server checks, too."""
    read = {"ClusterPolicy": read_cluster_policy, "TrainingJob": read_training_job}[item["kind"]]
    assert read(item).metadata.name == item["metadata"]["name"]
