"""Settings of a simulation: the cluster, the policy, and what moves cost."""

import dataclasses
import math
from collections.abc import Mapping

from ballast_policies.contract.limits import MOST_SECONDS
from ballast_policies.simulator.workloads import Workload

LIST_PRICES = {"v100": 2.48, "p100": 1.46, "k80": 0.45}
"""USD per GPU hour on demand at Google Cloud, us-central1, in 2020: the default prices."""


MOST_GPUS = 10_000_000
"""GPUs of a type."""


class SettingsError(ValueError):
    """A setting is impossible; the text begins with its name."""


def check_seconds(setting: str, seconds: float, *, least: float = 0.0) -> None:
    """Refuse seconds that no simulation would come to the end of.

    Raises:
        SettingsError: they are not between ``least`` and ``MOST_SECONDS``.
    """
    if not least <= seconds <= MOST_SECONDS:
        raise SettingsError(f"{setting}: {seconds:g} s is not between {least:g} and {MOST_SECONDS:g} s")


def check_window(measure: tuple[int, int]) -> None:
    """Refuse a window of measured jobs that holds none. Raises SettingsError."""
    first, end = measure
    if not 0 <= first < end:
        raise SettingsError(f"measure: {first}:{end} holds no job. To fix: first:end, as 4000:5000")


def refuse_window(measure: tuple[int, int], workload: Workload, jobs: int) -> SettingsError:
    """Error that the measured jobs are not all among the ``jobs`` of the workload."""
    first, end = measure
    return SettingsError(f"measure: {first}:{end} goes beyond the {jobs} jobs of {workload.name}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedCluster:
    """GPUs and prices.

    Attributes:
        gpus: GPU type -> how many.
        prices: GPU type -> USD per GPU hour; missing: 0.
        gpus_per_node: GPU type -> GPUs of a node. Empty: placement has no influence on speed, as in Gavel's
            simulator; a type that is missing beside others: one node has them all.
    """

    gpus: Mapping[str, int]
    prices: Mapping[str, float] = dataclasses.field(default_factory=lambda: dict(LIST_PRICES))
    gpus_per_node: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for gpu_type, count in self.gpus.items():
            if not 0 <= count <= MOST_GPUS:
                raise SettingsError(f"gpus: {gpu_type}={count} must be 0 to {MOST_GPUS}")
        if not sum(self.gpus.values()):
            raise SettingsError("gpus: there is none. To fix: name GPU types and numbers, as v100=36,p100=36")
        for gpu_type, price in self.prices.items():
            if not (price >= 0 and math.isfinite(price)):
                raise SettingsError(f"prices: {gpu_type}={price} must be at least 0")
        for gpu_type, count in self.gpus_per_node.items():
            if gpu_type not in self.gpus:
                raise SettingsError(f"gpus_per_node: {gpu_type} is not one of the cluster's GPU types")
            if count < 1:
                raise SettingsError(f"gpus_per_node: {gpu_type}={count} must be at least 1")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSettings:
    """Settings of a simulation.

    Attributes:
        policy: name of the policy, as in ``ClusterPolicy.spec.objective``.
        agnostic: the heterogeneity-agnostic baseline: all GPU types count as equally fast.
        round_seconds: length of a round.
        measure: first and one past the last job (in order of arrival) of the averages; the
            simulation ends when these are done. None: all jobs.
        record_timeline: keep which job ran where and when, for plots.
        record_jobs: keep a row for each job.
        launch_seconds: from a gang's grant to its first step; its GPUs are held and idle.
        stop_seconds: added to it where another gang has to save and leave first.
        notice_seconds: how long a gang that a round stops trains until it has read that it is to stop.
        min_run_seconds, max_moves_per_hour: hysteresis, as in ``ClusterPolicy.spec.moves``; 0 and None: none.
    """

    policy: str
    agnostic: bool = False
    round_seconds: float = 360.0
    measure: tuple[int, int] | None = None
    record_timeline: bool = False
    record_jobs: bool = True
    launch_seconds: float = 0.0
    stop_seconds: float = 0.0
    notice_seconds: float = 0.0
    min_run_seconds: float = 0.0
    max_moves_per_hour: int | None = None

    def __post_init__(self) -> None:
        if self.measure is not None:
            check_window(self.measure)
        check_seconds("round_seconds", self.round_seconds, least=1.0)
        for field in ("launch_seconds", "stop_seconds", "notice_seconds", "min_run_seconds"):
            check_seconds(field, getattr(self, field))
        if self.max_moves_per_hour is not None and self.max_moves_per_hour < 0:
            raise SettingsError(f"max_moves_per_hour: {self.max_moves_per_hour} must be at least 0")

    def check_workload(self, workload: Workload) -> None:
        """Refuse an endless workload of which all jobs are to be measured.

        Raises:
            SettingsError: it is one.
        """
        if workload.endless and self.measure is None:
            raise SettingsError(
                "measure: the workload is endless. To fix: choose which jobs to measure, as 4000:5000"
            )
