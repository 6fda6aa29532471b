"""How fast jobs would be on isolated equal shares: what finish-time fairness compares with."""

from collections.abc import Mapping

from ballast_policies.allocation.instance import instance
from ballast_policies.allocation.policies.isolated import isolated_shares
from ballast_policies.allocation.problem import Problem
from ballast_policies.rounds import Placement


def isolated_speeds(problem: Problem, running: Mapping[str, Placement]) -> dict[str, float]:
    """Running job -> steps/s on 1/n of every GPU type / steps/s on the GPUs that it has; 0: not known.

    A ratio, because a job's measured speed is worth more than any estimate of it.
    """
    if not running:
        return {}
    posed = instance(problem)
    alone = (posed.T * isolated_shares(posed)).sum(axis=1)
    found = {}
    for job, rate in zip(problem.jobs, alone.tolist(), strict=True):
        placement = running.get(job.name)
        if placement is not None:
            here = job.throughput.get(placement.gpu_type, 0.0)
            found[job.name] = rate / here if here > 0 else 0.0
    return found
