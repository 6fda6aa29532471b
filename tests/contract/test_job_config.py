"""The configuration of a job: every refusal names the field, the value, the reason and what to change."""

import pytest
from ballast_policies.contract.conditions import Condition
from ballast_policies.contract.errors import ContractError
from ballast_policies.contract.job.job import JobConfig
from ballast_policies.contract.job.pipeline import PipelineConfig
from ballast_policies.contract.job.training import TrainingConfig
from ballast_policies.contract.model import Settings, cluster_problems

from tests.contract.refusals import PRUNING, RULES

PLAIN = {"totalSteps": 10, "model": {"name": "gpt"}}

SHARED_EXPERTS = [{"kind": "mixtureOfExperts", "experts": {"parallel": True}}]

FIELDS = [
    ({"totalSteps": 0}, "totalSteps", "0 is below 1. To fix: 1 or more"),
    ({"totalStep": 3}, "totalStep", "did you mean 'totalSteps'?"),
    ({"model": {}}, "model.name", "missing"),
    ({"model": {"name": "my model"}}, "model.name", "'my model' is not the name of a model"),
    ({"pipeline": {"microbatches": 0}}, "pipeline.microbatches", "0 is below 1. To fix: 1 to 65536"),
    ({"pipeline": {"schedule": "gpipe"}}, "pipeline.schedule", "did you mean 'GPipe'?"),
    ({"pipeline": {"schedule": "DualPipeV"}}, "pipeline.schedule", "'DualPipeV' is not one of 1F1B"),
    ({"pipeline": {"replicas": [2, 0]}}, "pipeline.replicas[1]", "0 is below 1"),
    ({"dynamics": [{"kind": "pruning", "endStep": 3}]}, "dynamics[0].target", "needs a target"),
    ({"dynamics": [{**PRUNING, "target": 2}]}, "dynamics[0].target", "2 is above 1. To fix: 0 to 1"),
    ({"dynamics": [{**PRUNING, "kind": "thaw"}]}, "dynamics[0].kind", "'thaw' is not one of pruning"),
    ({"dynamics": [PRUNING, PRUNING]}, "dynamics", "'pruning' is given twice"),
    (
        {
            "pipeline": {"replicas": [2, 1]},
            "dynamics": [{"kind": "freezing", "freezing": {"criterion": "plasticity"}}],
        },
        "dynamics",
        "or parallelism.data in place of replicas",
    ),
    ({"rebalance": {"everySteps": 0}}, "rebalance.everySteps", "0 is below 1"),
    ({"rebalance": {"balancer": "exakt"}}, "rebalance.balancer", "did you mean 'exact'?"),
    ({"rebalance": {"by": "weight"}}, "rebalance.by", "'weight' is not one of time, parameters"),
    ({"rebalance": {"memoryBytes": 0}}, "rebalance.memoryBytes", "0 is below 1. To fix: 1 or more"),
    ({"repack": {"maxSlowdown": -1}}, "repack.maxSlowdown", "-1 is below 0. To fix: 0 to 100"),
    ({"checkpoint": {"keep": 0}}, "checkpoint.keep", "0 is below 1"),
    ({"training": {"precision": "fp8"}}, "training.precision", "'fp8' is not one of fp32, bf16, fp16"),
    ({"training": {"decay": "cosinus"}}, "training.decay", "did you mean 'cosine'?"),
    ({"training": {"decayTo": 1.5}}, "training.decayTo", "1.5 is above 1. To fix: 0 to 1"),
    ({"training": {"warmupSteps": -1}}, "training.warmupSteps", "-1 is below 0"),
    ({"training": {"clipNorm": -1}}, "training.clipNorm", "-1 is below 0"),
    ({"training": {"optimizer": "magic"}}, "training.optimizer", "'magic' is not adamw, sgd or module:"),
    ({"data": {"name": "words"}}, "data.name", "'words' is not module:callable. To fix: e.g. my_model:Data"),
    ({"metrics": {"writer": "recording"}}, "metrics.writer", "'recording' is not module:callable"),
    ({"metrics": {"tensorBoard": "x"}}, "metrics.tensorBoard", "did you mean 'tensorboard'?"),
    ({"metrics": {"port": 70_000}}, "metrics.port", "70000 is above 65535"),
    ({"parallelism": {"stragglers": {"policy": "wait"}}}, "parallelism.stragglers.policy", "not one of none"),
    (
        {
            "parallelism": {"data": 2, "zeroStage": 2},
            "dynamics": [{"kind": "mixtureOfExperts", "experts": {"parallel": True}}],
        },
        "parallelism.zeroStage",
        "experts.parallel",
    ),
    *(
        (
            {
                "parallelism": {"data": 2, "zeroStage": 3},
                "dynamics": [{"kind": "freezing", "target": 0.5, "freezing": freezing}],
            },
            "parallelism.zeroStage",
            "To fix: zeroStage: 2, or leave freezing.cacheBytes out",
        )
        for freezing in ({"cacheBytes": 1000}, {"criterion": "plasticity"})
    ),
    (
        {"pipeline": {"minStages": 3, "maxStages": 3}, "parallelism": {"gpusPerPod": 2}},
        "parallelism.gpusPerPod",
        "no number of stages from minStages: 3 to maxStages: 3, with 1 ranks each, fills pods of gpusPerPod",
    ),
    (
        {"pipeline": {"maxStages": 2, "replicas": [2, 1]}, "parallelism": {"gpusPerPod": 2}},
        "parallelism.gpusPerPod",
        "the 3 ranks of pipeline.replicas do not fill pods of gpusPerPod: 2",
    ),
    ({"dynamics": SHARED_EXPERTS}, "dynamics", "the replicas of a stage, and there is one"),
    (
        {
            "parallelism": {"data": 2},
            "pipeline": {"schedule": "ZeroBubbleH1"},
            "dynamics": SHARED_EXPERTS,
        },
        "dynamics",
        "replicas under ZeroBubbleH1 do not compute the same at the same time",
    ),
    *(
        ({"parallelism": {"data": 2}, "dynamics": [*SHARED_EXPERTS, other]}, "dynamics", "read those of all")
        for other in (
            {"kind": "pruning", "target": 0.5},
            {"kind": "freezing", "freezing": {"criterion": "weightChange"}},
        )
    ),
]


def refusals(change: dict) -> dict[str, str]:
    with pytest.raises(ContractError) as caught:
        JobConfig.from_mapping({**PLAIN, **change})
    return {problem.path: problem.reason for problem in caught.value.problems}


@pytest.mark.parametrize(("change", "field", "words"), FIELDS + RULES)
def test_a_wrong_field_is_named(change, field, words):
    """With its path as the user wrote it, the values, and what to change."""
    assert words in refusals(change)[field]


@pytest.mark.parametrize(
    "change",
    [
        {"pipeline": {"minStages": 1, "maxStages": 3}, "parallelism": {"gpusPerPod": 2}},
        {"pipeline": {"maxStages": 2, "replicas": [3, 1]}, "parallelism": {"gpusPerPod": 4}},
        {"pipeline": {"maxStages": 2}, "parallelism": {"tensor": 2, "data": 2, "gpusPerPod": 8}},
        {"pipeline": {"maxStages": 2}, "parallelism": {"tensor": 4, "gpusPerPod": 1}},
    ],
)
def test_a_size_with_whole_pods_is_enough(change):
    """Other sizes between minStages and maxStages are only never used."""
    assert JobConfig.from_mapping({**PLAIN, **change}).parallelism.gpus_per_pod is not None


@pytest.mark.parametrize(
    ("parallelism", "ranks"),
    [({}, 1), ({"tensor": 4}, 4), ({"tensor": 4, "gpusPerPod": 1}, 1), ({"tensor": 2, "gpusPerPod": 8}, 8)],
)
def test_a_pod_holds_a_tensor_group_unless_it_is_told_otherwise(parallelism, ranks):
    """A group communicates in every layer: NVLink and shared memory reach as far as the pod."""
    config = JobConfig.from_mapping({**PLAIN, "parallelism": parallelism, "pipeline": {"maxStages": 8}})
    assert config.parallelism.ranks_per_pod == ranks


def test_every_rule_has_an_example_that_breaks_it():
    """A rule that nothing can break is none; the examples are those of the test above."""
    broken = {reason for change, _, _ in RULES for reason in refusals(change).values()}

    def rules(part: type[Settings]) -> set[str]:
        # Rules that are functions, or have values of their own, have examples elsewhere (tests/registries).
        conditions = [rule for rule in part.RULES if isinstance(rule.condition, Condition)]
        found = {rule.reason for rule in conditions if rule.explain is None}
        for field in part.model_fields.values():
            if isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
                found |= rules(field.annotation)
        return found

    unbroken = {rule for rule in rules(JobConfig) if not any(reason.startswith(rule) for reason in broken)}
    assert unbroken == set()


def test_all_problems_are_named_at_once():
    """So that a user corrects them in one go."""
    found = refusals({"totalSteps": 0, "pipelines": {}, "training": {"seed": -1, "decay": "slow"}})
    assert set(found) == {"totalSteps", "pipelines", "training.seed", "training.decay"}


def test_a_configuration_made_in_python_is_checked_too():
    """No value exists that could not have been read."""
    with pytest.raises(ValueError, match="microbatches"):
        PipelineConfig(microbatches=0)
    with pytest.raises(ContractError, match="microbatches: 0 is below 1"):
        PipelineConfig().replace(microbatches=0)
    with pytest.raises(ContractError, match="minStages is above maxStages"):
        PipelineConfig(max_stages=2).replace(min_stages=3)


def test_a_null_is_a_field_left_out():
    """Kubernetes drops nulls; a file's mean the same."""
    given = {**PLAIN, "pipeline": {"microbatches": None, "maxStages": None}, "training": {"clipNorm": None}}
    assert JobConfig.from_mapping(given) == JobConfig.from_mapping(PLAIN)


@pytest.mark.parametrize(
    ("schedule", "clip_norm", "limit"),
    [("1F1B", None, 1.0), ("1F1B", 0.5, 0.5), ("1F1B", 0, None), ("PipeDream", None, None)],
)
def test_the_norm_of_the_gradient_is_limited_unless_turned_off(schedule, clip_norm, limit):
    """0 turns clipping off, and a schedule without a flush cannot clip."""
    given = {**PLAIN, "pipeline": {"schedule": schedule}, "training": {"clipNorm": clip_norm}}
    assert JobConfig.from_mapping(given).resolved().training.norm_limit == limit
    assert TrainingConfig().norm_limit == 1.0


def test_a_configuration_of_a_newer_operator_is_read():
    """Fields that this release does not have are ignored in config.json, and refused in a user's file."""
    config = JobConfig.from_mapping(PLAIN)
    newer = config.to_json().replace('{"checkpoint":', '{"sparkles":1,"checkpoint":')
    assert JobConfig.from_json(newer) == config


def test_a_cluster_needs_more_than_the_trainer():
    """The operator plans gangs by the number of stages, and a job must survive the loss of a pod."""
    found = {str(problem) for problem in cluster_problems(JobConfig, PLAIN)}
    assert found == {
        f"{path}: missing. To fix: give it a value"
        for path in ("pipeline.maxStages", "pipeline.globalBatchSize", "checkpoint.path")
    }
    script = {"totalSteps": 10, "pipeline": {}}
    assert [problem.path for problem in cluster_problems(JobConfig, script)] == ["pipeline.maxStages"]
    (relative,) = cluster_problems(
        JobConfig,
        {
            **PLAIN,
            "pipeline": {"maxStages": 2, "globalBatchSize": 8},
            "checkpoint": {"path": "checkpoints"},
        },
    )
    assert (
        str(relative) == "checkpoint.path: 'checkpoints' is not an absolute path. To fix: e.g. /checkpoints"
    )
