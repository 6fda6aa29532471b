"""The jobs of a snapshot: of those that wait, only the ones that have changed are made for each decision."""

import dataclasses
from collections.abc import Mapping, Sequence

from ballast_policies.planning.memory.measured_layers import MeasuredLayers
from ballast_policies.rounds import SharedGpus
from ballast_policies.throughput.track import Estimate

from ballast_operator.allocator.faults import JobFaults
from ballast_operator.allocator.problem.admission import Admitted
from ballast_operator.allocator.problem.capacity import ClusterCapacity
from ballast_operator.allocator.problem.jobs.snapshot_job import SnapshotJob, snapshot_job
from ballast_operator.allocator.problem.sharing.who_may import sharing_text
from ballast_operator.allocator.problem.speeds.requests import GangRequest
from ballast_operator.allocator.problem.throughput import Measurements
from ballast_operator.kube.kinds import Key
from ballast_operator.views.clock import Time

Speeds = Mapping[str, Estimate]
"""GPU type -> what is known of a gang's speed there."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Made:
    """A job, and what it was made of."""

    one: Admitted
    speeds: Speeds
    layers: MeasuredLayers | None
    job: SnapshotJob


class SnapshotJobs:
    """Makes the jobs of snapshots.

    Of thousands of jobs most wait for GPUs of one size. Such a job is a function of its admission, which is
    kept while neither the job nor the cluster changes, and of what was measured: both are values that are
    compared. Times that pass are none of it where the policy computes with none: ``Job.elapsed`` of a job
    that is kept is as old as the job's last change.
    """

    def __init__(self) -> None:
        self._made: dict[Key, _Made] = {}

    def of(
        self,
        admitted: Sequence[Admitted],
        requests: Sequence[GangRequest],
        speeds: Mapping[Key, Speeds],
        measurements: Measurements,
        capacity: ClusterCapacity,
        shared: SharedGpus,
        *,
        now: Time,
        reads_times: bool,
    ) -> tuple[SnapshotJob, ...]:
        """A job for each that is admitted.

        Args:
            admitted: the jobs.
            requests: of each the gang, whose speed was asked.
            speeds: job -> the answers.
            measurements: what was reported.
            capacity: of the pools.
            shared: who may share which GPUs.
            now: the time.
            reads_times: whether the policy computes with times.

        Raises:
            JobFaults: jobs that cannot be made.
        """
        known, self._made = {} if reads_times else self._made, {}
        # Thousands of jobs have the same speeds; guesses of types that they may not use are none of them.
        alike: dict[tuple[int, int, tuple[str, ...]], bool] = {}
        found = []
        faults: dict[Key, Exception] = {}
        for one, request in zip(admitted, requests, strict=True):
            key, there = one.view.key, speeds[one.view.key]
            layers = measurements.profiles.layers(key, one.spec)
            before = known.get(key)
            if before is not None and before.one is one and before.layers is layers:
                pair = id(before.speeds), id(there), one.gpu_types
                if pair not in alike:
                    alike[pair] = all(before.speeds[name] == there[name] for name in one.gpu_types)
                if alike[pair]:
                    self._made[key] = before
                    found.append(before.job)
                    continue
            try:
                alone = sharing_text(one, shared)
                job = snapshot_job(one, request, there, measurements, capacity, now, alone)
            except Exception as error:
                faults[key] = error
                continue
            found.append(job)
            if _waits(one) and not reads_times:
                self._made[key] = _Made(one, there, layers, job)
        if faults:
            raise JobFaults(faults)
        return tuple(found)


def _waits(one: Admitted) -> bool:
    """Whether it holds nothing, and is a function of its admission, its speeds and its layers."""
    spec = one.spec
    simple = len(one.sizes) == 1 and one.mixed is None and not spec.shares_gpu
    return simple and spec.data is None and spec.deadline is None and one.view.status.allocation is None
