"""What ``kubectl get`` shows of a job."""

from ballast_operator.api.job_allocation import AllocationPart, JobAllocation
from ballast_operator.api.schema.crd import RESOURCES

from tests.operator.views.builders import NOW

PODS = ("a", "b", "c")


def shown_types(allocation):
    """The column of the GPU type, of a status as it is written."""
    (column,) = [column for column in RESOURCES[0].columns if column.name == "GPU type"]
    value = {"status": {"allocation": allocation.to_dict()}}
    for field in column.path.strip(".").split("."):
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
