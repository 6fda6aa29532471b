"""Objects survive the way through the models, whatever their values."""

from typing import Any

import pytest
from ballast_operator.api.cluster_policy import CHOOSABLE
from ballast_operator.api.read import read_cluster_policy, read_training_job
from hypothesis import given
from hypothesis import strategies as st

NAMES = st.from_regex(r"[a-z]([-a-z0-9]{0,20}[a-z0-9])?", fullmatch=True)
NUMBERS = st.floats(min_value=0, max_value=1e6, allow_nan=False)
JSON = st.recursive(
    st.booleans() | st.integers(-(2**53), 2**53) | NUMBERS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def dynamics(draw: st.DrawFn) -> list[dict[str, Any]]:
    kinds = draw(st.lists(st.sampled_from(["pruning", "freezing"]), unique=True))
    starts = [draw(st.integers(0, 1000)) for _ in kinds]
    return [
        {
            "kind": kind,
            "startStep": start,
            "endStep": start + draw(st.integers(0, 1000)),
            "everySteps": draw(st.integers(1, 100)),
            "target": draw(st.floats(0, 1)),
            "args": {},
        }
        for kind, start in zip(kinds, starts, strict=True)
    ]


@st.composite
def training_jobs(draw: st.DrawFn) -> dict[str, Any]:
    most = draw(st.integers(1, 64))
    microbatches = draw(st.integers(most, 128))
    fewest = draw(st.integers(1, most))
    schedule, each = draw(
        st.sampled_from([("1F1B", 1), ("GPipe", 1), ("ZeroBubbleV", 2), ("Interleaved1F1B", 3)])
    )
    balancer, by = draw(
        st.sampled_from([("exact", "time"), ("exact", "parameters"), ("diffusion", "parameters")])
    )
    changes = draw(dynamics())
    pruned = any(change["kind"] == "pruning" for change in changes)
    shrunk = draw(st.integers(1, most))
    replicas = draw(st.sampled_from([n for n in range(1, 9) if microbatches % n == 0]))
    stragglers = draw(st.sampled_from(["none", "resize"]))
    shares = [0] if replicas == 1 or pruned else [0, 1]
    if len(shares) > 1 and not changes and stragglers == "none" and schedule in ("1F1B", "GPipe"):
        shares += [2, 3]
    spec = {
        "totalSteps": draw(st.integers(1, 2**53)),
        "model": {
            "name": draw(NAMES),
            "args": draw(st.dictionaries(st.text(max_size=4), JSON, max_size=3)),
            "layers": draw(st.integers(most * each, 200)),
        },
        "pipeline": {
            "minStages": fewest,
            "maxStages": most,
            "microbatches": microbatches,
            "globalBatchSize": microbatches * draw(st.integers(1, 64)),
            "schedule": schedule,
            "stagesPerRank": each,
            "replicas": [],
        },
        "parallelism": {
            "tensor": draw(st.integers(1, 1 if pruned else 8)),
            "data": replicas,
            "zeroStage": draw(st.sampled_from(shares)),
            "scatterGather": draw(st.booleans()),
            "stragglers": {
                "policy": stragglers,
                "selection": draw(st.sampled_from(["priority", "random"])),
                "differentiated": draw(st.booleans()),
                "imputation": draw(st.sampled_from(["zero", "average", "same"])),
                "epochSteps": draw(st.integers(1, 99)),
                "tolerance": draw(st.floats(0, 1)),
            },
        },
        "metrics": {"port": draw(st.integers(1, 65_535)), "jsonLines": "/logs/steps.jsonl"},
        "profiling": {
            "path": "/logs/traces",
            "firstStep": draw(st.integers(1, 99)),
            "steps": draw(st.integers(1, 9)),
            "ranks": draw(st.lists(st.integers(0, 9), max_size=3)),
            "memorySnapshot": draw(st.booleans()),
        },
        "dynamics": changes,
        "rebalance": {
            "enabled": draw(st.booleans()),
            "everySteps": draw(st.integers(1, 999)),
            "minGain": draw(st.floats(0, 1)),
            "balancer": balancer,
            "by": by,
            "memoryBytes": draw(st.integers(1, 2**53)),
        },
        "repack": {
            "enabled": True,
            "minStages": shrunk,
            "targetStages": draw(st.integers(max(shrunk, fewest), most)),
            "everySteps": draw(st.integers(1, 999)),
            "maxSlowdown": draw(st.floats(0, 10)),
        },
        "training": {
            "seed": draw(st.integers(0, 2**53)),
            "learningRate": draw(st.floats(0, 1)),
            "weightDecay": draw(st.floats(0, 1)),
            "warmupSteps": draw(st.integers(0, 1000)),
            "clipNorm": draw(st.floats(0.01, 10)),
            "optimizer": draw(st.sampled_from(["adamw", "sgd", "my.optimizers:lion"])),
            "decay": draw(st.sampled_from(["linear", "cosine"])),
            "decaySteps": draw(st.integers(1001, 2**53)),
            "decayTo": draw(st.floats(0, 1)),
            **draw(
                st.sampled_from(
                    [
                        *(
                            {"precision": precision, "dtype": "fp32", "masterWeights": True}
                            for precision in ("fp32", "fp16", "bf16")
                        ),
                        *([] if pruned else [{"precision": "bf16", "dtype": "bf16", "masterWeights": False}]),
                    ]
                )
            ),
            "recompute": draw(st.booleans()),
            "dataloaderNumWorkers": draw(st.integers(0, 64)),
            "skipBadSamples": draw(st.integers(0, 9)),
            "deterministic": draw(st.booleans()),
            "compile": draw(st.booleans()),
            "commTimeoutSeconds": draw(st.floats(1, 86400)),
        },
        "data": {
            "name": "my.data:windows",
            "args": draw(st.dictionaries(st.text(max_size=4), JSON, max_size=3)),
            "columns": {"inputs": "input_ids", "targets": draw(NAMES)},
            "shiftLabels": draw(st.booleans()),
            **draw(
                st.sampled_from(
                    [
                        {"collate": "my.data:collate", "packing": False},
                        {"padToMultipleOf": 64, "packing": not pruned},
                    ]
                )
            ),
        },
        "gpuTypes": draw(st.lists(NAMES, unique=True, max_size=3)),
        "throughput": [
            {"gpuType": name, "stages": 1, "stepsPerSecond": draw(st.just(0.0) | st.floats(1e-9, 1e6))}
            for name in draw(st.lists(NAMES, unique=True, max_size=3))
        ],
        "weight": draw(st.floats(1e-3, 1e6)),
        "entity": draw(NAMES),
        "user": draw(NAMES),
        "budget": draw(st.floats(0.01, 1e9)),
        "spot": draw(st.sampled_from(["Allow", "Forbid", "Require"])),
        "dataLocation": {
            "region": "us-east-1",
            draw(st.sampled_from(["readPerStep", "readInAll"])): "1.5Gi",
            "checkpointSize": "12Gi",
        },
        "onBudgetExhausted": draw(st.sampled_from(["Suspend", "Continue", "Fail"])),
        "onDeadlineMissed": draw(st.sampled_from(["Suspend", "Continue", "Fail"])),
        "activeDeadlineSeconds": draw(st.integers(1, 10**9)),
        "deadline": f"20{draw(st.integers(30, 99))}-01-31T12:00:00Z",
        "checkpoint": {
            "path": "/" + draw(NAMES),
            "everySteps": 5,
            "keep": 1,
            "startOver": draw(st.booleans()),
            "retrySeconds": 60.0,
            "asyncMode": draw(st.sampled_from(["async", "disabled"])),
            "inMemoryEverySteps": 0,
        },
        "grow": draw(st.booleans()),
        "topology": {draw(st.sampled_from(["required", "preferred"])): draw(NAMES)},
        "mixedPools": "Never",
        "sharesGpu": draw(st.sampled_from(["Never", "Allowed"])),
        "suspend": draw(st.booleans()),
        "backoffLimit": draw(st.integers(0, 1000)),
        "ttlSecondsAfterFinished": draw(st.integers(0, 2**31 - 1)),
        "template": {
            "metadata": {"labels": draw(st.dictionaries(NAMES, NAMES, max_size=2)), "annotations": {}},
            "spec": {"containers": [{"name": draw(NAMES), "resources": {"limits": {"cpu": draw(NAMES)}}}]},
        },
    }
    if draw(st.booleans()):
        stages = 1 if most == 1 else most * each
        spec["plan"] = {"layers": [3] * stages, "gpus": [{"gpuType": draw(NAMES), "stages": most}]}
        spec["model"]["layers"] = 3 * stages
        spec["pipeline"]["minStages"] = most
        spec["repack"]["enabled"] = False
        del spec["repack"]["targetStages"]
        spec["gpuTypes"] = []
    return {"metadata": {"name": draw(NAMES)}, "spec": spec}


@pytest.mark.slow
@given(training_jobs())
def test_a_training_job_with_every_field_comes_back_unchanged(item: dict[str, Any]) -> None:
    """No field is lost, renamed or rounded."""
    job = read_training_job(item)
    assert job.spec.to_dict() == item["spec"]
    assert read_training_job({**item, "spec": job.spec.to_dict()}) == job


@st.composite
def objectives(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.lists(NAMES, unique=True, max_size=4))
    entities = {}
    for i, name in enumerate(names):
        entities[name] = {
            "weight": draw(st.floats(1e-3, 1e6)),
            "policy": draw(st.sampled_from(["fairness", "fifo"])),
            "byUser": draw(st.booleans()),
        }
        if i and draw(st.booleans()):
            entities[name]["parent"] = draw(st.sampled_from(names[:i]))
    return {
        "policy": draw(st.sampled_from([*CHOOSABLE, "my_policies:fair"])),
        "heterogeneityAgnostic": draw(st.booleans()),
        "entities": entities,
    }


@st.composite
def tenants(draw: st.DrawFn) -> dict[str, Any]:
    fields = {name: st.integers(0, 10**6) for name in ("maxGpus", "maxRunningJobs", "maxWaitingJobs")}
    by_type = st.dictionaries(NAMES, st.integers(0, 10**6), max_size=3)
    limits = st.fixed_dictionaries({}, optional={**fields, "maxGpusByType": by_type})
    return {
        "eachNamespace": {"maxWaitingJobs": 10_000, **draw(limits)},
        "namespaces": draw(st.dictionaries(NAMES, limits, max_size=3)),
    }


def budgets() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "amount": st.floats(0.01, 1e12),
            "period": st.sampled_from(["Total", "Month"]),
            "onExhausted": st.sampled_from(["Suspend", "Continue"]),
        }
    )


def prices() -> st.SearchStrategy[dict[str, Any]]:
    more = {"key": st.just(""), "staleAfterSeconds": st.floats(1, 1e9), "currency": st.just("USD")}
    aws = st.just({"region": "us-east-1", "zone": "", "instanceType": "p3.8xlarge"})
    gcp = st.just({"skus": [{"id": "039F-D0DA-4055", "perGpu": 1.0}]})
    spot, either = st.just("spot"), st.sampled_from(["onDemand", "spot"])
    return st.one_of(
        st.fixed_dictionaries({"capacityType": either}),
        *(
            st.fixed_dictionaries({"capacityType": kind, "priceFeed": st.fixed_dictionaries(more | feed)})
            for kind, feed in (
                (either, {"configMap": NAMES, "key": st.just("") | NAMES}),
                (spot, {"aws": aws}),
                (either, {"gcp": gcp}),
            )
        ),
    )


@st.composite
def cluster_policies(draw: st.DrawFn) -> dict[str, Any]:
    pools = [
        {
            "name": name,
            "nodeSelector": {"pool": name},
            "gpuType": draw(NAMES),
            "gpuResource": "amd.com/gpu",
            "pricePerGpuHour": draw(NUMBERS),
            "startSeconds": draw(st.floats(0, 86_400)),
            **draw(st.sampled_from([{}, {"region": "us-west-2"}])),
            **draw(
                st.sampled_from([{}, {"gpusPerNode": 8, "maxNodes": 3}, {"gpusPerNode": 1, "maxNodes": 0}])
            ),
            **draw(prices()),
        }
        for name in draw(st.lists(NAMES, unique=True, min_size=1, max_size=4))
    ]
    seconds = draw(st.integers(1, 86_400))
    kinds = [pool.get("capacityType") for pool in pools]
    spec = {
        "objective": draw(objectives()),
        "roundSeconds": seconds,
        "nodePools": pools,
        "moves": {
            "minRunSeconds": draw(st.floats(0, seconds)),
            "maxMovesPerHour": draw(st.integers(0, 3600)),
        },
        "solver": {"timeLimitSeconds": draw(st.floats(0.01, 3600))},
        "tenants": draw(tenants()),
        "dataPrices": [{"fromRegion": "us-east-1", "toRegion": "*", "pricePerGb": draw(st.floats(0, 1e6))}],
        "spot": {
            "onDemandShare": 0.0 if set(kinds) == {"spot"} else draw(st.floats(0, 1)),
            "mostInOnePool": draw(st.floats(0.01, 1)),
        },
        "topology": {"levels": [{"nodeLabel": "example.com/" + draw(NAMES)}]},
        "nodeHealth": {
            "unhealthyConditions": draw(st.sampled_from([[], ["GpuMemWatch", "Own=False"]])),
            "failedJobs": draw(st.integers(2, 100)),
            "withinSeconds": draw(st.floats(1, 604_800)),
            "avoidSeconds": draw(st.floats(0, 604_800)),
        },
        "budgets": draw(st.dictionaries(NAMES, budgets(), max_size=3)),
        "dryRun": draw(st.booleans()),
    }
    return {"metadata": {"name": draw(NAMES)}, "spec": spec}


@pytest.mark.slow
@given(cluster_policies())
def test_a_cluster_policy_with_every_field_comes_back_unchanged(item: dict[str, Any]) -> None:
    """No field is lost, renamed or rounded."""
    assert read_cluster_policy(item).spec.to_dict() == item["spec"]
