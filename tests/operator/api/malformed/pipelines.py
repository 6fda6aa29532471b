"""Jobs whose pipeline is malformed, or how it changes, rebalances or shrinks; rules over two fields are in
``tests/contract/refusals.py``.
"""

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
        "mixed pools and one rack",
        "spec",
        {**_mixed(), "topology": {"required": "rack"}},
        "spec.topology",
        "nodes of one pool",
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
    ("a fractional number of stages", "spec.pipeline.maxStages", 3.5, "spec.pipeline.maxStages", "integer"),
    ("no batch size", "spec.pipeline.globalBatchSize", REMOVED, "spec.pipeline.globalBatchSize", "missing"),
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
        "pruning more than all",
        "spec.dynamics.0.target",
        1.5,
        "spec.dynamics[0].target",
        "less than or equal to 1",
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
        "no stages a rank",
        "spec.pipeline",
        {**JOB["spec"]["pipeline"], "schedule": "Interleaved1F1B", "stagesPerRank": 0},
        "spec.pipeline.stagesPerRank",
        "greater than or equal to 1",
    ),
]
