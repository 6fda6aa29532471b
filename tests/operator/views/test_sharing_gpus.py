"""A GPU that two jobs share counts once, with the job that pays for it."""

import datetime

from ballast_operator.api.job_allocation import JobAllocation, SharedGpu
from ballast_operator.views.shared_gpus import once_a_gpu

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def holds(pod: str, node: str, *, shared: bool = True, ended: tuple[str, ...] = ()) -> JobAllocation:
    return JobAllocation(
        pool="p",
        gpu_type="v100",
        gpus=1,
        pods=(pod,),
        nodes=(node,),
        since=START,
        shared_gpu=SharedGpu() if shared else None,
        ended=ended,
    )


def test_of_two_jobs_on_one_gpu_the_first_stands_for_both():
    """Jobs whose GPUs are their own all count, on one node as well."""
    first, second, elsewhere = holds("a-1-0", "n"), holds("b-1-0", "n"), holds("c-1-0", "m")
    own = [holds("d-1-0", "k", shared=False), holds("e-1-0", "k", shared=False)]
    assert once_a_gpu([first, second, elsewhere, *own]) == [first, elsewhere, *own]


def test_a_job_whose_pod_has_ended_does_not_stand_for_the_one_that_pays():
    """Its GPU is held, by the pod of the other."""
    ended, pays = holds("a-1-0", "n", ended=("a-1-0",)), holds("b-1-0", "n")
    assert once_a_gpu([ended, pays]) == [pays]
