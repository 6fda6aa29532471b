"""Jobs whose pipeline is malformed, or how it changes, rebalances or shrinks."""

from typing import Any

from tests.operator.api.objects import JOB, REMOVED, Malformed


def _mixed(**changes: Any) -> dict[str, Any]:
    """A job's spec that may run in several pools, with these fields of it or of its pipeline."""
    own = {field: changes.pop(field) for field in ("model", "dynamics") if field in changes}
    pipeline = {**JOB["spec"]["pipeline"], **changes}
    return {**JOB["spec"], "mixedPools": "Allowed", **own, "pipeline": pipeline}


def _planned(*types: str, **changes: Any) -> dict[str, Any]:
    """A job's spec with a plan over these GPU types, a stage each."""
    stages = {"minStages": len(types), "maxStages": len(types)}
    layers = [1] * (len(types) - 1) + [JOB["spec"]["model"]["layers"] - len(types) + 1]
    gpus = [{"gpuType": gpu_type, "stages": 1} for gpu_type in types]
    spec = {field: value for field, value in JOB["spec"].items() if field != "gpuTypes"}
    return {
        **spec,
        "pipeline": {**spec["pipeline"], **stages},
        "plan": {"layers": layers, "gpus": gpus},
        "repack": {"enabled": False},
        **changes,
    }


PIPELINES: list[Malformed] = [
    ("mixed pools of a word", "spec.mixedPools", "Maybe", "spec.mixedPools", "Allowed"),
    (
        "mixed pools of unknown layers",
        "spec",
        _mixed(model={"name": "gpt"}),
        "spec.mixedPools",
        "model.layers",
    ),
    (
        "mixed pools under another schedule",
        "spec",
        _mixed(schedule="ZeroBubbleH1"),
        "spec.mixedPools",
        "1F1B and GPipe",
    ),
    (
        "mixed pools and replicas",
        "spec",
        _mixed(replicas=[2, 1, 1, 1], dynamics=[]),
        "spec.mixedPools",
        "one rank for each stage",
    ),
    (
        "a plan of two GPU types for one pool",
        "spec",
        _planned("a100", "v100"),
        "spec.mixedPools",
        "which are in several pools",
    ),
    (
        "a plan of a GPU type that it must not use",
        "spec",
        _planned("a100", "v100", mixedPools="Allowed", gpuTypes=["a100"]),
        "spec.plan.gpus",
        "gpuTypes does not allow",
    ),
    ("no pipeline", "spec.pipeline", REMOVED, "spec.pipeline", "required"),
    ("fewest above most", "spec.pipeline.minStages", 5, "spec.pipeline.minStages", "above maxStages"),
    ("a fractional number of stages", "spec.pipeline.maxStages", 3.5, "spec.pipeline.maxStages", "integer"),
    (
        "too few microbatches",
        "spec.pipeline.microbatches",
        2,
        "spec.pipeline.maxStages",
        "above microbatches",
    ),
    ("no batch size", "spec.pipeline.globalBatchSize", REMOVED, "spec.pipeline.globalBatchSize", "missing"),
    ("an uneven batch", "spec.pipeline.globalBatchSize", 20, "spec.pipeline.globalBatchSize", "multiple"),
    (
        "a negative batch",
        "spec.pipeline.globalBatchSize",
        -8,
        "spec.pipeline.globalBatchSize",
        "greater than",
    ),
    ("a schedule that does not work yet", "spec.pipeline.schedule", "ZBV", "spec.pipeline.schedule", "1F1B"),
    ("a change of an unknown kind", "spec.dynamics.0.kind", "magic", "spec.dynamics[0].kind", "freezing"),
    (
        "a kind of change that does not work yet",
        "spec.dynamics.0.kind",
        "layerDropping",
        "spec.dynamics[0].kind",
        "pruning",
    ),
    (
        "a change without a target",
        "spec.dynamics.0.target",
        REMOVED,
        "spec.dynamics[0].target",
        "needs a target",
    ),
    (
        "pruning more than all",
        "spec.dynamics.0.target",
        1.5,
        "spec.dynamics[0].target",
        "less than or equal to 1",
    ),
    (
        "a change that ends before it starts",
        "spec.dynamics.0.endStep",
        5,
        "spec.dynamics[0].endStep",
        "before",
    ),
    (
        "a kind of change twice",
        "spec.dynamics.1",
        {"kind": "pruning", "endStep": 9, "target": 0.1},
        "spec.dynamics[1]",
        "duplicate",
    ),
    (
        "a negative gain",
        "spec.rebalance.minGain",
        -0.1,
        "spec.rebalance.minGain",
        "greater than or equal to 0",
    ),
    ("rebalancing as a word", "spec.rebalance.enabled", "yes", "spec.rebalance.enabled", "boolean"),
    ("shrinking to more", "spec.repack.minStages", 6, "spec.repack.minStages", "never shrink"),
    (
        "shrinking below the fewest",
        "spec.repack",
        {"minStages": 3, "targetStages": 2},
        "spec.repack.targetStages",
        "below minStages",
    ),
    (
        "shrinking to fewer than a launch has",
        "spec.repack.targetStages",
        1,
        "spec.repack.targetStages",
        "below pipeline.minStages",
    ),
    (
        "shrinking to more than a launch has",
        "spec.repack.targetStages",
        5,
        "spec.repack.targetStages",
        "above pipeline.maxStages",
    ),
    (
        "shrinking to nothing",
        "spec.repack.targetStages",
        0,
        "spec.repack.targetStages",
        "greater than or equal to 1",
    ),
    ("an unknown balancer", "spec.rebalance.balancer", "luck", "spec.rebalance.balancer", "diffusion"),
    ("something else spread evenly", "spec.rebalance.by", "colour", "spec.rebalance.by", "parameters"),
    (
        "ranks without memory",
        "spec.rebalance.memoryBytes",
        0,
        "spec.rebalance.memoryBytes",
        "greater than or equal to 1",
    ),
    (
        "parameters against seconds on links",
        "spec.rebalance",
        {"balancer": "network", "by": "parameters"},
        "spec.rebalance.by",
        "weighs seconds on links",
    ),
    (
        "a rule that knows no limit of memory",
        "spec.rebalance",
        {"balancer": "deepspeed", "memoryBytes": 10**9},
        "spec.rebalance.balancer",
        "no limit of memory",
    ),
    (
        "slow links under a schedule whose period is not known",
        "spec",
        {
            **JOB["spec"],
            "pipeline": {**JOB["spec"]["pipeline"], "schedule": "GPipe"},
            "rebalance": {"balancer": "network"},
        },
        "spec.rebalance.balancer",
        "predicts the steps of other schedules",
    ),
    (
        "several stages a rank of 1F1B",
        "spec.pipeline.stagesPerRank",
        2,
        "spec.pipeline.stagesPerRank",
        "another number of stages per rank",
    ),
    (
        "three legs of a V",
        "spec.pipeline",
        {**JOB["spec"]["pipeline"], "schedule": "ZeroBubbleV", "stagesPerRank": 3},
        "spec.pipeline.stagesPerRank",
        "another number of stages per rank",
    ),
    (
        "no stages a rank",
        "spec.pipeline",
        {**JOB["spec"]["pipeline"], "schedule": "Interleaved1F1B", "stagesPerRank": 0},
        "spec.pipeline.stagesPerRank",
        "greater than or equal to 1",
    ),
    (
        "more stages over all ranks than layers",
        "spec.pipeline",
        {**JOB["spec"]["pipeline"], "schedule": "Interleaved1F1B", "stagesPerRank": 3},
        "spec.pipeline.stagesPerRank",
        "above model.layers",
    ),
]
