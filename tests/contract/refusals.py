"""For each rule of a job's configuration, one that breaks it: (change, field that is named, words).

One table for two readers: the contract (Python) and the API server (CEL).
"""

from typing import Any

PRUNING = {"kind": "pruning", "endStep": 3, "target": 0.5}

SCRIPT: list[tuple[dict[str, Any], str, str]] = [
    ({"model": None, **change}, next(iter(change)), f"where {next(iter(change))} has no effect")
    for change in (
        {"pipeline": {"maxStages": 2, "microbatches": 4}},
        {"parallelism": {"stragglers": {"policy": "resize"}}},
        {"plan": {"layers": [4]}},
        {"dynamics": [PRUNING]},
        {"rebalance": {"enabled": False}},
        {"repack": {"enabled": True}},
        {"training": {"learningRate": 0.5}},
        {"data": {"name": "my_model:Data"}},
        {"metrics": {"port": 9000}},
        {"evaluation": {"batches": 2}},
        {"callback": {"name": "my_callbacks:notify"}},
        {"profiling": {"path": "/traces"}},
        {"export": {"path": "/checkpoints/model.safetensors"}},
    )
]
"""A job without a model, with a field that only the trainer acts on."""

TWO = {"minStages": 2, "maxStages": 2}

RULES: list[tuple[dict[str, Any], str, str]] = [
    ({"pipeline": {"minStages": 3, "maxStages": 2}}, "pipeline.minStages", "minStages: 3, maxStages: 2"),
    ({"pipeline": {"maxStages": 9}}, "pipeline.maxStages", "pipeline.maxStages: 9, pipeline.microbatches: 8"),
    (
        {"pipeline": {"microbatches": 3}},
        "pipeline.globalBatchSize",
        "globalBatchSize: 16, microbatches: 3",
    ),
    ({"pipeline": {"stagesPerRank": 3}}, "pipeline.stagesPerRank", "or use one of LoopedBFS"),
    (
        {"plan": {"layers": [4, 4]}, "pipeline": {"maxStages": 2}},
        "pipeline.minStages",
        "of one number of stages",
    ),
    (
        {"plan": {"layers": [4, 4]}, "pipeline": TWO, "repack": {"enabled": True}},
        "repack.enabled",
        "fixes the number of ranks",
    ),
    (
        {"plan": {"layers": [4, 3]}, "pipeline": TWO, "model": {"name": "gpt", "layers": 8}},
        "plan.layers",
        "model.layers",
    ),
    ({"plan": {"layers": [4, 2, 2]}, "pipeline": TWO}, "plan.layers", "stages"),
    (
        {"plan": {"layers": [4, 4], "gpus": [{"gpuType": "a100", "stages": 1}]}, "pipeline": TWO},
        "plan.gpus",
        "pipeline.maxStages",
    ),
    (
        {"pipeline": {"schedule": "ZeroBubbleV", "stagesPerRank": 1}},
        "pipeline.stagesPerRank",
        "schedule: ZeroBubbleV",
    ),
    ({"dynamics": [{**PRUNING, "startStep": 5}]}, "dynamics[0].endStep", "startStep: 5, endStep: 3"),
    (
        {"training": {"rateFactor": "my_rates:factor", "warmupSteps": 3}},
        "training.rateFactor",
        "takes the place of warmupSteps",
    ),
    ({"evaluation": {"everySteps": 5}}, "evaluation.batches", "the model's own data has no end"),
    (
        {"data": {"name": "my_model:Data", "packing": True}, "dynamics": [PRUNING]},
        "data.packing",
        "no ends of packed samples",
    ),
    (
        {
            "evaluation": {"everySteps": 5, "data": {"name": "my_model:Data", "packing": True}},
            "dynamics": [PRUNING],
        },
        "evaluation.data.packing",
        "no ends of packed samples",
    ),
    (
        {"data": {"name": "my_model:Data"}, "evaluation": {"batches": 2}},
        "evaluation.data",
        "the training data is not the model's own",
    ),
    (
        {"export": {"path": "/checkpoints"}, "checkpoint": {"path": "/checkpoints"}},
        "export.path",
        "the checkpoints are there",
    ),
    (
        {"export": {"path": "/model.safetensors"}, "checkpoint": {}},
        "export",
        "put together from the last checkpoint",
    ),
    (
        {"pipeline": {"schedule": "PipeDream"}, "checkpoint": {"inMemoryEverySteps": 1}},
        "checkpoint.inMemoryEverySteps",
        "without a flush",
    ),
    (
        {"pipeline": {"replicas": [1, 2]}, "checkpoint": {"inMemoryEverySteps": 1}},
        "checkpoint.inMemoryEverySteps",
        "fix the number of ranks",
    ),
    ({"rebalance": {"balancer": "network", "by": "parameters"}}, "rebalance.by", "seconds on links"),
    ({"rebalance": {"balancer": "deepspeed", "memoryBytes": 9}}, "rebalance.balancer", "no limit of memory"),
    (
        {"repack": {"enabled": True, "minStages": 3, "targetStages": 2}},
        "repack.targetStages",
        "below minStages",
    ),
    ({"repack": {"targetStages": 2}}, "repack.targetStages", "repack.enabled is false"),
    (
        {"training": {"warmupSteps": 5, "decaySteps": 5, "decay": "linear"}},
        "training.decaySteps",
        "no step is left",
    ),
    ({"training": {"decaySteps": 5}}, "training.decay", "decaySteps and decayTo have no effect"),
    ({"training": {"decayTo": 0.1}}, "training.decay", "decay: linear or cosine"),
    ({"training": {"recomputeEvery": 2}}, "training.recomputeEvery", "recompute: true"),
    ({"training": {"compileTimeoutSeconds": 60}}, "training.compileTimeoutSeconds", "compile: true"),
    (
        {"model": {"name": "gpt", "layers": 3}, "pipeline": {"maxStages": 4}},
        "pipeline.maxStages",
        "pipeline.maxStages: 4, model.layers: 3",
    ),
    (
        {
            "model": {"name": "gpt", "layers": 11},
            "pipeline": {"maxStages": 4, "schedule": "LoopedBFS", "stagesPerRank": 3},
        },
        "pipeline.stagesPerRank",
        "model.layers: 11",
    ),
    ({"pipeline": {"maxStages": 4}, "repack": {"minStages": 5}}, "repack.minStages", "could never shrink"),
    (
        {"pipeline": {"minStages": 2, "maxStages": 4}, "repack": {"enabled": True, "targetStages": 1}},
        "repack.targetStages",
        "below pipeline.minStages",
    ),
    (
        {"pipeline": {"maxStages": 4}, "repack": {"enabled": True, "targetStages": 5}},
        "repack.targetStages",
        "above pipeline.maxStages",
    ),
    (
        {"pipeline": {"schedule": "GPipe"}, "rebalance": {"balancer": "network"}},
        "rebalance.balancer",
        "predicts the steps of other schedules",
    ),
    (
        {"pipeline": {"replicas": [2, 1]}, "rebalance": {"balancer": "network"}},
        "rebalance.balancer",
        "has no pipeline.replicas",
    ),
    (
        {"pipeline": {"replicas": [2, 1]}, "rebalance": {"balancer": "deepspeed"}},
        "rebalance.balancer",
        "has no pipeline.replicas",
    ),
    (
        {"pipeline": {"schedule": "PipeDream"}, "training": {"clipNorm": 1.0}},
        "training.clipNorm",
        "no stage knows the norm",
    ),
    (
        {"pipeline": {"schedule": "PipeDream2BW"}, "training": {"precision": "fp16"}},
        "training.precision",
        "To fix: precision: bf16 or fp32",
    ),
    ({"training": {"dtype": "bf16"}}, "training.dtype", "To fix: precision: bf16"),
    ({"training": {"masterWeights": False}}, "training.masterWeights", "To fix: dtype: bf16"),
    (
        {"training": {"precision": "bf16", "dtype": "bf16", "masterWeights": False}, "dynamics": [PRUNING]},
        "training.dtype",
        "To fix: leave dtype out, or pruning",
    ),
    (
        {"training": {"precision": "bf16", "dtype": "bf16"}, "dynamics": [PRUNING]},
        "training.masterWeights",
        "To fix: masterWeights: false",
    ),
    (
        {"pipeline": {"schedule": "PipeDream"}, "training": {"skipBadSamples": 1}},
        "training.skipBadSamples",
        "without a flush ranks are at several steps",
    ),
    (
        {"pipeline": {"schedule": "PipeDream"}, "parallelism": {"tensor": 2}},
        "parallelism.tensor",
        "parallelism.tensor: 2",
    ),
    ({"parallelism": {"tensor": 2}, "dynamics": [PRUNING]}, "dynamics", "parallelism.tensor: 2"),
    (
        {
            "pipeline": {"schedule": "ZeroBubbleH1"},
            "parallelism": {"tensor": 2, "stragglers": {"policy": "semi"}},
        },
        "parallelism.stragglers.policy",
        "To fix: policy: resize",
    ),
    ({"parallelism": {"data": 3}}, "parallelism.data", "pipeline.microbatches: 8, parallelism.data: 3"),
    ({"parallelism": {"zeroStage": 1}}, "parallelism.zeroStage", "To fix: parallelism.data: 2 or more"),
    (
        {"parallelism": {"data": 2, "zeroStage": 1}, "pipeline": {"schedule": "PipeDream"}},
        "parallelism.zeroStage",
        "a schedule without a flush",
    ),
    (
        {"parallelism": {"data": 2, "zeroStage": 2}, "pipeline": {"schedule": "ZeroBubbleH1"}},
        "parallelism.zeroStage",
        "splits the backward",
    ),
    (
        {"parallelism": {"data": 2, "tensor": 2, "zeroStage": 2, "stragglers": {"policy": "migrate"}}},
        "parallelism.zeroStage",
        "or stragglers.policy: none",
    ),
    (
        {"parallelism": {"data": 2, "zeroStage": 1}, "dynamics": [PRUNING]},
        "parallelism.zeroStage",
        "use whole gradients",
    ),
    (
        {"pipeline": {"schedule": "ZeroBubbleH1", "replicas": [2, 1]}},
        "pipeline.replicas",
        "or use one of 1F1B, GPipe, PipeDream",
    ),
    ({"pipeline": {"replicas": [2, 1]}, "parallelism": {"tensor": 2}}, "parallelism", "stage by stage"),
    (
        {"pipeline": {"replicas": [2, 1]}, "repack": {"enabled": True}},
        "repack.enabled",
        "fix the number of ranks",
    ),
    ({"pipeline": {"replicas": [2, 1]}, "dynamics": [PRUNING]}, "dynamics", "leave pruning or replicas out"),
    (
        {"pipeline": {"maxStages": 4}, "parallelism": {"tensor": 2, "gpusPerPod": 3}},
        "parallelism.gpusPerPod",
        "parallelism.gpusPerPod: 3, parallelism.tensor: 2",
    ),
    (
        {"pipeline": {"maxStages": 4}, "parallelism": {"gpusPerPod": 8}},
        "parallelism.gpusPerPod",
        "more GPUs than the largest gang",
    ),
    (
        {
            "pipeline": {"maxStages": 4},
            "parallelism": {"gpusPerPod": 2},
            "repack": {"enabled": True, "targetStages": 3},
        },
        "repack.targetStages",
        "a part of a pod cannot be released",
    ),
    (
        {"training": {"decay": "linear", "warmupSteps": 10}},
        "training.warmupSteps",
        "training.warmupSteps: 10, totalSteps: 10",
    ),
    *(
        (
            {"model": {"name": name, "layers": 8}, "dynamics": [{"kind": "earlyExit"}]},
            "dynamics",
            f"models of the family {name}",
        )
        for name in ("recurrent", "autoencoder")
    ),
    ({"dynamics": [{"kind": "freezing"}]}, "dynamics[0].target", "needs a target"),
    (
        {"dynamics": [{"kind": "mixtureOfExperts", "target": 0.5}]},
        "dynamics[0].kind",
        "from the first step on",
    ),
    ({"dynamics": [{**PRUNING, "exits": {}}]}, "dynamics[0].exits", "kind: earlyExit alone"),
    (
        {"dynamics": [{"kind": "mixtureOfExperts", "experts": {"count": 2, "topK": 3}}]},
        "dynamics[0].experts.topK",
        "topK: 3, count: 2",
    ),
    (
        {
            "dynamics": [
                {**PRUNING, "kind": "earlyExit"},
                {**PRUNING, "kind": "mixtureOfDepths"},
            ]
        },
        "dynamics",
        "both route positions",
    ),
    *SCRIPT,
]
