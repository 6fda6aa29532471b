"""The jobs of an episode: tiny, real trainers that take as long as they are told."""

import dataclasses
from pathlib import Path
from typing import Any

from tests.chaos.processes.cluster import NAMESPACE, command_of_script

PATH = f"/apis/ballast.dev/v1alpha1/namespaces/{NAMESPACE}/trainingjobs"
CONTEXT = 8
EVERY_STEPS = 10
STEP_SECONDS = 0.1
HANG_SECONDS = 8
"""After this long without a step the trainer itself says that it hangs."""

SHAPES: dict[str, dict[str, Any]] = {
    "single": {"pipeline": {"minStages": 1, "maxStages": 1}},
    "script": {"pipeline": {"minStages": 1, "maxStages": 1}},
    "pair": {"pipeline": {"minStages": 2, "maxStages": 2}},
    "elastic": {"pipeline": {"minStages": 1, "maxStages": 2}, "repack": {"enabled": True, "minStages": 1}},
    "packed": {"pipeline": {"minStages": 2, "maxStages": 2}, "parallelism": {"gpusPerPod": 2}},
}
"""Name -> what its spec has of its own: a pod, a script, two pods, one or two, one pod of two GPUs."""


def trainer() -> dict[str, Any]:
    """The container of a trainer's pod."""
    return {
        "name": "trainer",
        "image": "not-read-by-process-nodes",
        "env": [{"name": "BALLAST_HANG_SECONDS", "value": str(HANG_SECONDS)}],
    }


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One job.

    Attributes:
        shape: of ``SHAPES``.
        number: makes its name, with the shape.
        total: steps.
        folder: for checkpoints and diaries.
    """

    shape: str
    number: int
    total: int
    folder: Path

    @property
    def name(self) -> str:
        """Of the TrainingJob."""
        return f"{self.shape}-{self.number}"

    @property
    def checkpoints(self) -> Path:
        """``spec.checkpoint.path``."""
        return self.folder / "checkpoints" / self.name

    @property
    def diaries(self) -> Path:
        """Where its processes note their steps."""
        return self.folder / "diaries" / self.name

    def manifest(self) -> dict[str, Any]:
        """The TrainingJob."""
        self.diaries.mkdir(parents=True, exist_ok=True)
        self.checkpoints.parent.mkdir(parents=True, exist_ok=True)
        container = trainer()
        spec: dict[str, Any] = {
            "totalSteps": self.total,
            "backoffLimit": 1000,
            "checkpoint": {"path": str(self.checkpoints), "everySteps": EVERY_STEPS},
        }
        if self.shape == "script":
            container["command"] = command_of_script(self.diaries, STEP_SECONDS)
        else:
            data = {"folder": str(self.diaries), "seconds": STEP_SECONDS, "context": CONTEXT}
            spec |= {
                "model": {"name": "gpt", "layers": 4, "args": {"dim": 16, "heads": 2, "context": CONTEXT}},
                "data": {"name": "paced:batches", "args": data},
                "rebalance": {"enabled": False},
            }
        shape = SHAPES[self.shape]
        pipeline = dict(shape["pipeline"])
        if self.shape != "script":
            pipeline |= {"microbatches": 4, "globalBatchSize": 8}
        spec |= shape | {"pipeline": pipeline}
        spec["template"] = {"spec": {"terminationGracePeriodSeconds": 5, "containers": [container]}}
        return {
            "apiVersion": "ballast.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": self.name},
            "spec": spec,
        }


__all__ = ["NAMESPACE", "PATH", "SHAPES", "Job"]
