"""Clusters of one node to decide on."""

from ballast_policies.allocation.problem import Job
from ballast_policies.rounds.values import Node, Placement
from ballast_policies.scheduling.state import Capacity, ClusterJob, ClusterState


def at(*nodes):
    return Placement(gpu_type="v100", pool="a", nodes=nodes)


def gang(name, gpus=1, *, runs=None, launches=None, **fields):
    """A job of one GPU type, launched once where it runs."""
    job = Job(name=name, gpus=gpus, throughput={"v100": float(gpus)})
    launches = int(runs is not None) if launches is None else launches
    return ClusterJob(job=job, placement=runs, launches=launches, **fields)


def cluster(*jobs, gpus=3, **fields):
    nodes = (Node(name="n", pool="a", gpu_type="v100", gpus=gpus),)
    return ClusterState(capacity=Capacity(gpu_types=("v100",), nodes=nodes), jobs=jobs, **fields)
