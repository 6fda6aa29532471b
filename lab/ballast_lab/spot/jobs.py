"""Jobs of a workload, with their speeds on what can be rented."""

from collections.abc import Iterable

from ballast_policies.simulator.settings import SettingsError
from ballast_policies.simulator.workloads import TraceJob
from ballast_policies.throughput.table import ThroughputTable

from ballast_lab.spot.settings import SpotJob

REFERENCE_TYPE = "v100"
"""GPU type in whose time deadlines are stated, where the job runs on it; else its fastest."""


def spot_job(job: TraceJob, name: str, table: ThroughputTable, gpu_types: Iterable[str]) -> SpotJob:
    """The job as a replay takes it.

    Raises:
        SettingsError: it runs on none of the GPU types.
        ThroughputError: the table does not know the job's type.
    """
    known = [gpu_type for gpu_type in sorted(gpu_types) if gpu_type in table.gpu_types]
    rates = {gpu_type: table.alone(job.type, gpu_type) for gpu_type in known}
    speeds = {gpu_type: rate for gpu_type, rate in rates.items() if rate > 0}
    if not speeds:
        raise SettingsError(
            f"jobs: {name} ({job.type.name} on {job.type.gpus} GPUs) runs on no GPU type with prices: "
            f"{', '.join(sorted(gpu_types))}. To fix: add prices, or a throughput table that has them"
        )
    deadline = None
    if job.deadline_factor is not None:
        reference = speeds.get(REFERENCE_TYPE, max(speeds.values()))
        deadline = job.deadline_factor * job.steps / reference
    return SpotJob(
        name=name,
        arrival=job.arrival,
        steps=job.steps,
        gpus=job.type.gpus,
        speeds=speeds,
        deadline_seconds=deadline,
    )
