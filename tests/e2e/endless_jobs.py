"""Fields of the demo's jobs, smaller and without an end: a test says when its job ends."""

CHECKPOINT = {"path": "/checkpoints", "everySteps": 5}

ENDLESS = 50_000
"""Steps: a test says when its job ends."""

SMALL = {"name": "recurrent", "layers": 8, "args": {"dim": 48}}
"""The demo's recurrent model with a quarter of its work; its GPUs are still slower than this machine."""

SHRINKS = {
    "totalSteps": ENDLESS,
    "model": {"name": "gpt", "layers": 10, "args": {"dim": 64}},
    "dynamics": [{"kind": "freezing", "startStep": 5, "endStep": 15, "everySteps": 5, "target": 0.8}],
    "rebalance": {"everySteps": 5, "minGain": 0.05},
    "repack": {"enabled": True, "minStages": 2, "everySteps": 10, "maxSlowdown": 1.0},
}
"""The demo's transformer, smaller, and ready to shrink after 20 steps."""

ELASTIC = {
    "totalSteps": ENDLESS,
    "grow": True,
    "gpuTypes": ["v100"],
    "parallelism": {"gpusPerPod": 2},
    "pipeline": {"minStages": 2, "maxStages": 4, "microbatches": 8, "globalBatchSize": 16},
    "dynamics": [],
    "model": SHRINKS["model"],
    "checkpoint": CHECKPOINT,
    "throughput": [
        {"gpuType": "v100", "stages": 2, "stepsPerSecond": 1.0},
        {"gpuType": "v100", "stages": 4, "stepsPerSecond": 2.0},
    ],
}
"""The same with one pod on each node, of two ranks; that four ranks are faster is stated, not measured."""
