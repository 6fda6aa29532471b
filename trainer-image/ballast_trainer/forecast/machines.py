"""Ranks and links that a forecast assumes, and the ranks of each pipeline."""

import dataclasses
import math

from ballast_policies.contract.job.job import JobConfig
from ballast_policies.planning.schedules.schedule import Schedule

from ballast_trainer.distributed.mesh import Mesh
from ballast_trainer.errors import ConfigurationError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """The ranks and their links.

    Attributes:
        speeds: of each rank, relative to the device that was profiled; empty: all 1.
        bandwidth: bytes/s between two ranks; None: transfers are free.
        action_seconds: what each forward and each backward takes besides its layers; see
            :class:`ballast_policies.planning.schedules.costs.StageCosts`.
    """

    speeds: tuple[float, ...] = ()
    bandwidth: float | None = None
    action_seconds: float = 0.0

    def check(self, ranks: int) -> None:
        """Refuse speeds of another number of ranks.

        Raises:
            ConfigurationError: with what to change.
        """
        if self.speeds and len(self.speeds) != ranks:
            raise ConfigurationError(
                "--speeds", f"{len(self.speeds)} speeds for {ranks} ranks. To fix: give one for each rank"
            )

    def pipelines(self, ranks: int, data: int) -> tuple[tuple[float, ...], ...]:
        """Speeds by position of each replica of the pipeline."""
        lines = Mesh(data=data).lines("position", ranks)
        return tuple(tuple(self.speeds[rank] if self.speeds else 1.0 for rank in line) for line in lines)


ALIKE = Machines()
"""Ranks like the device that was profiled, and free transfers."""


def positions_of(config: JobConfig, ranks: int) -> int:
    """How many of the ranks are in one pipeline.

    Raises:
        ConfigurationError: the layers are to be shared by several ranks, or the ranks do not divide.
    """
    parallelism = config.parallelism
    if parallelism.tensor > 1:
        raise ConfigurationError(
            "parallelism.tensor",
            f"{parallelism.tensor}: a profile has the seconds of whole layers. "
            "To fix: --set parallelism.tensor=1",
        )
    if ranks % parallelism.data:
        raise ConfigurationError(
            "parallelism.data",
            f"{ranks} ranks are no multiple of {parallelism.data} replicas. "
            f"To fix: --ranks {math.lcm(ranks, parallelism.data)}, or another data",
        )
    return ranks // parallelism.data


def stage_speeds(schedule: Schedule, pipelines: tuple[tuple[float, ...], ...]) -> list[float]:
    """How fast each stage is done with its layers: its replicas together, the slowest pipeline's."""
    return [
        min(len(holders) * min(speeds[rank] for rank in holders) for speeds in pipelines)
        for holders in schedule.stage_ranks
    ]
