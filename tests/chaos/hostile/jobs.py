"""Jobs that keep the contract without training: ordinary ones, and what hostile ones start from."""

import json
import sys
from pathlib import Path
from typing import Any

NAMESPACE = "trust"
JOBS_PATH = f"/apis/ballast.dev/v1alpha1/namespaces/{NAMESPACE}/trainingjobs"
POOL_LABEL = "ballast.dev/pool"
TRAINER = Path(__file__).parents[2] / "operator" / "live" / "scripted_trainer.py"


def training_job(name: str, folder: Path, *, total: int, stages: int = 1) -> dict[str, Any]:
    """A TrainingJob of ``total`` steps, a tenth of a second each; checkpoints are in ``folder``."""
    container = {
        "name": "trainer",
        "image": "not-read-by-process-nodes",
        "command": [sys.executable, str(TRAINER)],
        "env": [{"name": "SCRIPT", "value": json.dumps({"total": total})}],
    }
    return {
        "apiVersion": "ballast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "totalSteps": total,
            "model": {"name": "gpt"},
            "pipeline": {
                "minStages": stages,
                "maxStages": stages,
                "microbatches": 8,
                "globalBatchSize": 16,
            },
            "checkpoint": {"path": str(folder / name)},
            "template": {"spec": {"terminationGracePeriodSeconds": 1, "containers": [container]}},
        },
    }
