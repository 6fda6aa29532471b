"""Elastic workloads for tests: speeds by formula, not measured."""

import json
import random

COUNTS = {"fast": (1, 2, 4, 8), "slow": (1, 2, 4, 8, 12)}
CLUSTER = {
    "fast": {"nodes": 1, "gpus_per_node": 8, "gpu_counts": [1, 2, 4, 8]},
    "slow": {"nodes": 3, "gpus_per_node": 4, "gpu_counts": [1, 2, 4, 8, 12]},
}


def model(single: float, *, serial: float, ratio: float, restart_s: float) -> dict:
    """Amdahl's law: ``serial`` of the work does not scale; ``ratio`` fast to slow."""
    return {
        "restart_s": restart_s,
        "types": {
            gpu_type: {
                "options": [
                    [gpus, single * factor / (serial + (1 - serial) / gpus)] for gpus in COUNTS[gpu_type]
                ]
            }
            for gpu_type, factor in (("fast", ratio), ("slow", 1.0))
        },
    }


def file(jobs: int, seed: int, *, every: float = 100.0) -> str:
    """A file with one workload of random arrivals, mostly short jobs, some fifty times as long."""
    draw = random.Random(seed)
    models = {
        "vision@64": model(10.0, serial=0.05, ratio=4.0, restart_s=40.0),
        "text@32": model(5.0, serial=0.2, ratio=2.0, restart_s=90.0),
    }
    rows, now = [], 0.0
    for i in range(jobs):
        now += draw.expovariate(1 / every)
        application, batch = draw.choice([("vision", 64), ("text", 32)])
        work = draw.uniform(2_000, 20_000) * (50 if draw.random() < 0.05 else 1)
        rows.append([f"{application}-{i}", now, application, batch, draw.choice([1, 2, 4, 8]), work])
    return json.dumps(
        {
            "cluster": CLUSTER,
            "option_columns": ["gpus", "samples_per_s"],
            "job_columns": [
                "name",
                "arrival_s",
                "application",
                "batch_size",
                "requested_gpus",
                "work_samples",
            ],
            "models": models,
            "workloads": {"random": rows},
        }
    )
