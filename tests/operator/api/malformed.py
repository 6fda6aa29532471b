"""Malformed objects: one table of a kind for two readers, the API server (CRDs) and the operator (models).

Of checks that the schema has from a field's type alone (bounds, forms, words) one of each sort is here: the
committed definitions have them all. Rules over two fields are in ``tests/contract/refusals.py``.
"""

from typing import Any

from tests.operator.api.objects import JOB, REMOVED, table


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


def _planner(**changes: Any) -> dict[str, Any]:
    """A job's spec whose degrees are planned, with these fields."""
    layers = [{"forwardSeconds": 0.1, "backwardSeconds": 0.2, "repeat": JOB["spec"]["model"]["layers"]}]
    return {
        **JOB["spec"],
        "planner": {"profiles": [{"layers": layers}], "gpus": [{"gpuType": "v100"}]},
        "repack": {"enabled": False},
        **changes,
    }


def _tried(**changes: Any) -> dict[str, Any]:
    """The same, whose best plans are tried."""
    planned = _planner(**changes)
    return {**planned, "planner": {**planned["planner"], "trial": 3}}


def _spread(nodes: int, rate: float, *, stages: int) -> dict[str, Any]:
    """Two steps a second on a V100's node, and ``rate`` over ``nodes``."""
    over = [{"nodes": nodes, "stepsPerSecond": rate}]
    return {"gpuType": "v100", "stages": stages, "stepsPerSecond": 2.0, "spread": over}


JOBS = table(
    (
        "mixed pools of unknown layers",
        "spec",
        _mixed(model={"name": "gpt"}),
        "model.layers",
        "spec.mixedPools",
    ),
    (
        "mixed pools under another schedule",
        "spec",
        _mixed(schedule="ZeroBubbleH1"),
        "1F1B and GPipe",
        "spec.mixedPools",
    ),
    (
        "mixed pools and one rack",
        "spec",
        {**_mixed(), "topology": {"required": "rack"}},
        "nodes of one pool",
        "spec.topology",
    ),
    (
        "mixed pools and replicas",
        "spec",
        _mixed(replicas=[2, 1, 1, 1], dynamics=[]),
        "one rank for each stage",
        "spec.mixedPools",
    ),
    (
        "a plan of two GPU types for one pool",
        "spec",
        _planned("a100", "v100"),
        "which are in several pools",
        "spec.mixedPools",
    ),
    (
        "a plan of a GPU type that it must not use",
        "spec",
        _planned("a100", "v100", mixedPools="Allowed", gpuTypes=["a100"]),
        "gpuTypes does not allow",
        "spec.plan.gpus",
    ),
    *(
        (f"planned degrees and {field}", "spec", _planner(**changes), words, f"spec.{field}")
        for field, changes, words in (
            (
                "pipeline.schedule",
                {"pipeline": {**JOB["spec"]["pipeline"], "schedule": "GPipe"}},
                "or keeps to 1F1B",
            ),
            (
                "pipeline.replicas",
                {"pipeline": {**JOB["spec"]["pipeline"], "replicas": [2, 1, 1, 1]}, "dynamics": []},
                "as many replicas of each stage",
            ),
            ("repack.enabled", {"repack": {"enabled": True}}, "number of ranks of a launch"),
            ("planner.gpus", {"gpuTypes": ["p100"], "throughput": []}, "gpuTypes does not allow"),
        )
    ),
    *(
        (f"a trial of plans {scenario}", "spec", _tried(**changes), words, "spec.planner.trial")
        for scenario, changes, words in (
            (
                "on one rank",
                {"pipeline": {**JOB["spec"]["pipeline"], "minStages": 1, "maxStages": 1}},
                "and the job has one",
            ),
            ("that move no layers", {"rebalance": {"enabled": False}}, "keeps where they are"),
            (
                "with copies in memory",
                {"checkpoint": {"path": "/checkpoints", "inMemoryEverySteps": 5}},
                "has the launch's",
            ),
        )
    ),
    ("a trial of one plan", "spec.planner", {**_planner()["planner"], "trial": 1}, "2", "spec.planner.trial"),
    (
        "a plan whose degrees are planned",
        "spec",
        _planned("v100", planner=_planner()["planner"]),
        "a plan for each launch",
        "spec.plan",
    ),
    ("a fractional number of stages", "spec.pipeline.maxStages", 3.5, "integer"),
    ("no batch size", "spec.pipeline.globalBatchSize", REMOVED, "missing"),
    ("a schedule that does not work yet", "spec.pipeline.schedule", "ZBV", "1F1B"),
    ("pruning more than all", "spec.dynamics.0.target", 1.5, "less than or equal to 1"),
    (
        "a kind of change twice",
        "spec.dynamics.1",
        {"kind": "pruning", "endStep": 9, "target": 0.1},
        "duplicate",
    ),
    ("rebalancing as a word", "spec.rebalance.enabled", "yes", "boolean"),
    ("no template", "spec.template", REMOVED, "required"),
    ("no containers", "spec.template.spec.containers", [], "at least 1"),
    (
        "a container without a name",
        "spec.template.spec.containers",
        [{"image": "trainer:1"}],
        "required",
        "spec.template.spec.containers[0].name",
    ),
    ("pods that restart by themselves", "spec.template.spec.restartPolicy", "Always", "Never"),
    ("a node chosen by the user", "spec.template.spec.nodeName", "n1", "node"),
    (
        "a service account chosen by the user",
        "spec.template.spec.serviceAccountName",
        "root",
        "own service account",
    ),
    ("pods that end by themselves", "spec.template.spec.activeDeadlineSeconds", 2, "one by one"),
    (
        "an environment as text",
        "spec.template.spec.containers",
        [{"name": "trainer", "env": "A=b"}],
        "must be of type array",
        "spec.template.spec.containers[0].env",
    ),
    (
        "requests as a list",
        "spec.template.spec.containers",
        [{"name": "trainer", "resources": {"requests": ["cpu"]}}],
        "must be of type object",
        "spec.template.spec.containers[0].resources.requests",
    ),
    (
        "terms as text",
        "spec.template.spec.affinity",
        {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": "abc"}}},
        "must be of type array",
        "spec.template.spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms",
    ),
    ("no steps at all", "spec.totalSteps", 0, "greater than or equal to 1"),
    ("steps as a word", "spec.totalSteps", "many", "integer"),
    ("a model name with a space", "spec.model.name", "my model", "match"),
    (
        "an exit code that fails the job and is none",
        "spec.failurePolicy",
        {"failOn": [42, 43], "ignore": [43]},
        "in failOn and in ignore",
        "spec.failurePolicy.failOn",
    ),
    ("an exit code of ranks that lost another", "spec.failurePolicy.failOn", [1, 76], "lost another, end so"),
    (
        "two levels",
        "spec.topology",
        {"required": "a", "preferred": "b"},
        "exactly one",
        "spec.topology.required",
    ),
    (
        "data of which nothing is read",
        "spec.dataLocation",
        {"region": "us-east-1"},
        "set exactly one",
    ),
    (
        "data that is stated twice",
        "spec.dataLocation",
        {"region": "us-east-1", "readPerStep": "1Gi", "readInAll": "1Ti"},
        "set exactly one",
    ),
    ("a GPU type twice", "spec.gpuTypes.2", "v100", "duplicate"),
    (
        "two speeds for one choice",
        "spec.throughput.1",
        {"gpuType": "v100", "stages": 4, "stepsPerSecond": 3.0},
        "duplicate",
    ),
    ("no weight", "spec.weight", 0, "greater than 0"),
    (
        "a speed that no number of steps can be divided by",
        "spec.throughput",
        [{"gpuType": "v100", "stages": 4, "stepsPerSecond": 1e-300}],
        "more than thirty years",
        "spec.throughput[0].stepsPerSecond",
    ),
    *(
        (name, "spec.throughput", [_spread(nodes, rate, stages=stages)], said, f"spec.throughput{field}")
        for name, nodes, rate, stages, said, field in (
            ("one GPU on two nodes", 2, 1.0, 1, "one GPU is on one node", ""),
            ("a speed spread over one node", 1, 1.0, 4, "greater than or equal to 2", "[0].spread[0].nodes"),
            ("faster on more nodes", 2, 3.0, 4, "faster than at stepsPerSecond", "[0].spread"),
            ("spread at no speed", 2, 0.0, 4, "greater than 0", "[0].spread[0].stepsPerSecond"),
            ("spread for thirty years", 2, 1e-300, 4, "thirty years", "[0].spread[0].stepsPerSecond"),
        )
    ),
    ("no checkpoint", "spec.checkpoint", REMOVED, "missing"),
    ("a budget as text", "spec.budget", "100 USD", "number"),
    ("an unknown end of a budget", "spec.onBudgetExhausted", "Pause", "Suspend"),
    ("a deadline as text", "spec.deadline", "tomorrow", "date"),
    ("a team without a name", "spec.entity", "", "at least 1"),
    ("a field that does not exist", "spec.pipelines", {}, "field"),
    ("a name too long for host names", "metadata.name", "a" * 49, "is part of host names"),
    ("the name of the leader's Lease", "metadata.name", "ballast-operator", "the operator's leader", ""),
    ("a name with a dot", "metadata.name", "my.job", "is part of host names"),
    ("a name that starts with a digit", "metadata.name", "7b", "is part of host names"),
)

_ONE_POOL = {"name": "fast", "nodeSelector": {"pool": "fast"}, "gpuType": "v100"}

POLICIES = table(
    ("no pools", "spec.nodePools", [], "at least 1"),
    ("an unknown objective", "spec.objective.policy", "luck", "max-min-fairness"),
    (
        "a policy that needs shared GPUs",
        "spec.objective.policy",
        "gandiva",
        "puts any two jobs on the same GPUs",
    ),
    ("a function without a module", "spec.objective.policy", ":fair", "not"),
    ("a team that shares by lot", "spec.objective.entities", {"vision": {"policy": "lottery"}}, "fifo"),
    (
        "a team inside an unknown one",
        "spec.objective.entities",
        {"vision": {"parent": "research"}},
        "parent is not another of the entities",
    ),
    (
        "a team inside itself",
        "spec.objective.entities",
        {"vision": {"parent": "vision"}},
        "parent is not another of the entities",
    ),
    ("a team without a name", "spec.objective.entities", {"": {"weight": 1}}, "1 to 253 characters"),
    ("a budget for no team", "spec.budgets", {"": {"amount": 1}}, "1 to 253 characters"),
    ("a pool without a GPU type", "spec.nodePools.0.gpuType", REMOVED, "required"),
    ("a pool that matches every node", "spec.nodePools.0.nodeSelector", {}, "at least 1"),
    (
        "a label that no node can have",
        "spec.nodePools.0.nodeSelector",
        {"!pool": "fast"},
        "no name of a label",
    ),
    ("a value that no label can have", "spec.nodePools.0.nodeSelector.pool", "fast ", "should match"),
    ("two pools of one name", "spec.nodePools.1.name", "fast", "duplicate", "spec.nodePools[1]"),
    ("a negative price", "spec.nodePools.0.pricePerGpuHour", -1, "greater than or equal to 0"),
    (
        "a price feed without a ConfigMap",
        "spec.nodePools.0.priceFeed",
        {"key": "fast"},
        "set exactly one",
    ),
    (
        "a price feed of two kinds",
        "spec.nodePools.0.priceFeed",
        {"configMap": "prices", "azure": {"region": "eastus", "vmSize": "Standard_NC6s_v3"}},
        "set exactly one",
    ),
    (
        "a price in euros without a rate",
        "spec.nodePools.0.priceFeed",
        {"gcp": {"skus": [{"id": "039F-D0DA-4055"}]}, "currency": "EUR"},
        "To fix: set priceFeed.rate",
    ),
    (
        "a rate of a ConfigMap",
        "spec.nodePools.0.priceFeed",
        {"configMap": "prices", "rate": 0.9},
        "in the pools' currency",
    ),
    (
        "a region that leads elsewhere",
        "spec.nodePools.0.priceFeed",
        {"aws": {"region": "us-east-1.example.com/", "instanceType": "p3.2xlarge"}},
        "",
        "spec.nodePools[0].priceFeed.aws.region",
    ),
    (
        "Azure's price of a pool that is neither spot nor on demand",
        "spec.nodePools.0",
        {
            "name": "fast",
            "nodeSelector": {"pool": "fast"},
            "gpuType": "fast",
            "priceFeed": {"azure": {"region": "eastus", "vmSize": "Standard_NC6s_v3"}},
        },
        "set capacityType",
    ),
    (
        "a spot price of machines on demand",
        "spec.nodePools.0",
        {
            "name": "fast",
            "nodeSelector": {"pool": "fast"},
            "gpuType": "fast",
            "capacityType": "onDemand",
            "priceFeed": {"aws": {"region": "us-east-1", "instanceType": "p3.2xlarge"}},
        },
        "state pricePerGpuHour",
    ),
    ("a capacity type that does not exist", "spec.nodePools.0.capacityType", "reserved", "onDemand"),
    ("GPUs shared by MPS", "spec.nodePools.0.sharing", {"kind": "MPS"}, "kind: TimeSlicing"),
    ("three jobs on a GPU", "spec.nodePools.0.sharing.jobsPerGpu", 3, "less than or equal to 2"),
    (
        "nodes to come whose GPUs are shared",
        "spec.nodePools",
        [{**_ONE_POOL, "maxNodes": 1, "gpusPerNode": 1, "sharing": {"kind": "TimeSlicing"}}],
        "maxNodes",
        "spec.nodePools[0].sharing",
    ),
    ("nodes that stay idle", "spec.nodePools.0.minNodes", 1, "the autoscaler"),
    (
        "nodes of unknown size",
        "spec.nodePools.0.maxNodes",
        9,
        "gpusPerNode",
        "spec.nodePools[0].gpusPerNode",
    ),
    (
        "a size of nodes that are not to come",
        "spec.nodePools",
        [{**_ONE_POOL, "gpusPerNode": 8}],
        "has no effect",
        "spec.nodePools[0].gpusPerNode",
    ),
    ("nothing may ever move", "spec.moves.minRunSeconds", 1e6, "hundred rounds"),
    (
        "nothing is on demand",
        "spec",
        {"nodePools": [_ONE_POOL | {"capacityType": "spot"}], "spot": {"onDemandShare": 0.1}},
        "every pool is spot",
        "spec.spot.onDemandShare",
    ),
)
