"""TrainingJobs of real trainers whose checkpoints lie in a folder of this machine."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

WHERE = {"group": "ballast.dev", "version": "v1alpha1", "plural": "trainingjobs", "namespace": "default"}
"""The jobs' kind and namespace, as the API client wants them."""


def trainer_job(
    name: str,
    folder: Path,
    *,
    steps: int,
    model: Mapping[str, Any],
    pipeline: Mapping[str, Any],
    save_every: int,
    environment: Mapping[str, str] | None = None,
    **spec: Any,
) -> dict[str, Any]:
    """A TrainingJob.

    Args:
        name: its name.
        folder: gets a folder of this name with the checkpoints.
        steps: of the whole job.
        model: ``spec.model``.
        pipeline: ``spec.pipeline``.
        save_every: steps from checkpoint to checkpoint.
        environment: of the trainers.
        spec: further fields of the spec.
    """
    volume = {"name": "checkpoints", "hostPath": {"path": str(folder / name), "type": "DirectoryOrCreate"}}
    container = {
        "name": "trainer",
        "image": "ballast-dev/trainer:0.1.0",
        "env": [{"name": key, "value": value} for key, value in (environment or {}).items()],
        "volumeMounts": [{"name": "checkpoints", "mountPath": "/checkpoints"}],
    }
    return {
        "apiVersion": "ballast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": WHERE["namespace"]},
        "spec": {
            "totalSteps": steps,
            "model": dict(model),
            "pipeline": dict(pipeline),
            "checkpoint": {"path": "/checkpoints", "everySteps": save_every},
            "template": {"spec": {"containers": [container], "volumes": [volume]}},
            **spec,
        },
    }
