"""Valid files, from which hostile ones are made."""

import functools
import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

from tests.fuzz import seeds

PROFILE = seeds.PROFILE

ELASTIC_PROBLEM: dict[str, Any] = {
    "gpu_types": ["v100", "k80"],
    "capacity": {"v100": 4, "k80": 8},
    "jobs": [
        {
            "name": "a",
            "configurations": [
                {"name": "one", "gpus": {"v100": 1}, "throughput": 4.0},
                {"name": "mixed", "gpus": {"v100": 1, "k80": 2}, "throughput": 5.5},
            ],
        },
        {"name": "b", "throughput": {"v100": 1.0}, "gpus": 2},
    ],
}

ELASTIC_FILE: dict[str, Any] = {
    "cluster": {"fast": {"nodes": 1, "gpus_per_node": 8, "gpu_counts": [1, 2, 4]}},
    "option_columns": ["gpus", "samples_per_s"],
    "job_columns": ["name", "arrival_s", "application", "batch_size", "requested_gpus", "work_samples"],
    "models": {"vision@64": {"restart_s": 40.0, "types": {"fast": {"options": [[1, 40.0], [2, 76.19]]}}}},
    "workloads": {"small": [["a", 0.0, "vision", 64, 1, 1000.0], ["b", 5.5, "vision", 64, 2, 10.0]]},
}

PRICE: dict[str, Any] = {"pricePerGpuHour": 0.75, "time": "2025-10-09T08:53:20Z"}

FEED_POLICY: dict[str, Any] = {
    **seeds.POLICY,
    "spec": {
        "nodePools": [
            {
                "name": "spot",
                "nodeSelector": {"ballast.dev/pool": "spot"},
                "gpuType": "v100",
                "capacityType": "spot",
                "pricePerGpuHour": 0.9,
                "priceFeed": {"configMap": "prices", "key": "spot", "staleAfterSeconds": 900},
            }
        ],
    },
}

AZURE_SIZES = [["Instance", "GPU", "count"], ["NC6", "K80", "1"], ["NC24s v3", "V100", "4"]]

GPU_ROW: dict[str, Any] = {
    "name": "v100-32gb",
    "vendor": "nvidia",
    "source": "data sheet",
    "products": ["Tesla-V100-SXM2-32GB"],
    "device_ids": ["1db5"],
    "memory_gb": 32,
    "memory_gb_per_second": 900,
    "link_gb_per_second": 300.5,
    "year": 2018,
}

GPU_LABELS: dict[str, Any] = {
    "nvidia.com/gpu.product": "Tesla-V100-SXM2-32GB",
    "beta.amd.com/gpu.product-name.AMD_Instinct_MI300X_OAM": "8",
    "amd.com/gpu.device-id": "74a1",
    "amd.com/compute-memory-partition": "spx_nps1",
}

LOADS = [
    [json.dumps({"event": "loads", "step": step, "seconds": [0.1, 0.2, 0.05 * step]})] for step in (1, 5)
]

TRAINER_FILE: dict[str, Any] = {
    "totalSteps": 30,
    "model": {"name": "gpt", "layers": 8, "args": {"dim": 32, "started": "2030-11-30"}},
    "pipeline": {"microbatches": 4, "globalBatchSize": 8},
}

NODES: dict[str, Any] = {
    "nodes": [
        {
            "name": "a",
            "gpus": 2,
            "pool": "fast",
            "capacity_type": "spot",
            "labels": {"zone": "z"},
            "taints": [{"key": "k", "value": "v", "effect": "NoSchedule"}],
            "slowdown": {"default": 1.5},
        }
    ]
}

MANIFEST: dict[str, Any] = {
    "step": 10,
    "layer_count": 4,
    "seed": 7,
    "files": {"__0_0.distcp": 123},
    "loss_scale": [1.0, 0],
    "optimizer": "adamw",
}

OWNER: dict[str, Any] = {
    "token": "t",
    "run": "team/a",
    "launch": 3,
    "host": "h",
    "machine": "m",
    "pid": 7,
    "started": "12",
}


@functools.cache
def index() -> bytes:
    """The index of a checkpoint with two tensors."""
    import torch
    from torch.distributed import checkpoint

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {"weight": torch.ones(2, 3), "mask": torch.tensor([True])}
        checkpoint.save(state, checkpoint_id=folder, no_dist=True)
        return (Path(folder) / ".metadata").read_bytes()
