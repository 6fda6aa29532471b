"""GPUs that jobs hold, where two may share one."""

from collections.abc import Iterable

from ballast_policies.gpus.shared import one_for_each_gpu

from ballast_operator.api.job_allocation import JobAllocation


def once_a_gpu(allocations: Iterable[JobAllocation]) -> list[JobAllocation]:
    """The allocations without the second of two on one GPU.

    The first is one that pays, if there is one: the other's pod has ended, or its node is still to come.
    """
    paying_first = sorted(allocations, key=lambda held: not held.pays)
    return one_for_each_gpu(
        paying_first, lambda held: held.nodes[0] if held.shared_gpu is not None and held.nodes else ""
    )
