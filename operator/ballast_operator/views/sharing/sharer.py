"""The other job on a job's GPU, where two share it."""

import dataclasses
from collections.abc import Mapping

from ballast_operator.api.job_allocation import JobAllocation
from ballast_operator.kube.kinds import Key, job_id
from ballast_operator.views.clock import Time


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sharer:
    """A job that is on the GPU as well.

    Attributes:
        job: namespace/name.
        since: since when.
    """

    job: str
    since: Time


def sharer_of(key: Key, node: str, allocations: Mapping[Key, JobAllocation]) -> Sharer | None:
    """Who is on the GPU of ``node`` besides the job ``key``; None: it is alone.

    ``allocations``: of jobs with GPUs of the node.
    """
    for other, held in sorted(allocations.items()):
        if other != key and held.shared_gpu is not None and node in held.nodes and held.pays:
            return Sharer(job=job_id(other), since=held.since)
    return None
