"""A job of a few ranks, and what rank 0 has seen of it."""

import dataclasses
from typing import Any

import numpy as np
from ballast_policies.contract.job.job import JobConfig
from ballast_trainer.profiling.profile import LayerCosts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """Job to run.

    Attributes:
        loads: seconds of one microbatch, shape (steps, layers, 2): forward, backward. Of a model that
            computes, only the shape counts.
        model: as in a configuration; default: layers that sleep.
        ranks: processes at the start.
        bounds: first partition, over the schedule's stages.
        settings: fields of the trainer's configuration besides, e.g. ``rebalance``.
        chunks: stages a rank where the schedule has several; the trainer's own jobs have two.
        speeds: of each rank: a layer takes its seconds over the speed of the rank that has it; empty: all 1.
        tracks_memory: whether ranks count the bytes of all tensors that they hold.
        replans: (after step, ranks kept, bounds): plans that follow one another.
    """

    loads: np.ndarray
    ranks: int
    bounds: tuple[int, ...]
    microbatches: int
    schedule: str = "1F1B"
    model: dict[str, Any] | None = None
    chunks: int = 2
    speeds: tuple[float, ...] = ()
    tracks_memory: bool = False
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    replans: tuple[tuple[int, int, tuple[int, ...]], ...] = ()

    @property
    def config(self) -> JobConfig:
        """Configuration as the trainer reads it."""
        return JobConfig.from_mapping(
            {
                "totalSteps": len(self.loads),
                "model": self.model or {"name": "sleeping"},
                "pipeline": {
                    "schedule": self.schedule,
                    "microbatches": self.microbatches,
                    "globalBatchSize": self.microbatches,  # one sequence each
                },
                "rebalance": {"enabled": False},
                **self.settings,
            }
        )


@dataclasses.dataclass(frozen=True)
class Overhead:
    """Seconds of rank 0 in which it decided on rebalances, and carried them out, instead of training."""

    deciding: float
    moving: float


@dataclasses.dataclass(frozen=True)
class Ran:
    """Result of a run, as rank 0 saw it.

    Attributes:
        lines: of steps and of events.
        costs: of the layers, as measured last.
        overhead: seconds spent on deciding and moving.
        most_bytes: of the tensors of each rank, at the fullest moment; 0 where they were not tracked.
    """

    lines: list[dict[str, Any]]
    costs: LayerCosts
    overhead: Overhead
    most_bytes: tuple[int, ...] = ()

    def step_seconds(self) -> dict[int, float]:
        """Seconds by step, 1-based."""
        return {line["step"]: line["step_seconds"] for line in self.lines if "event" not in line}

    def events(self, name: str) -> list[dict[str, Any]]:
        """The events of a name."""
        return [line for line in self.lines if line.get("event") == name]
