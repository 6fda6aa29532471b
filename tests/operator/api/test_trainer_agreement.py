"""What the API lets through, the trainer takes: the two never import each other, so a test compares them."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from ballast_operator.api import InvalidObject, read_cluster_policy, read_training_job
from ballast_operator.api.cluster_policy import CHOOSABLE
from ballast_operator.api.training_job import TRAINER_FIELDS
from ballast_operator.api.training_recipe import DynamicKind
from ballast_policies.planning.schedules import trained_schedules
from ballast_trainer.config import TrainerConfig
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.launch import ValidatedJob

from tests.operator.api.objects import JOB, POLICY, RESHAPED, changed

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("**/*.yaml"))
OBJECTS = [
    pytest.param(item, id=f"{path.name}-{item['metadata']['name']}")
    for path in EXAMPLES
    for item in yaml.safe_load_all(path.read_text())
    if "apiVersion" in item
]


def test_the_kinds_of_change() -> None:
    """Are those that the trainer carries out, all of them and no others."""
    from ballast_policies.planning.dynamics import DYNAMICS

    assert {kind.value for kind in DynamicKind} == set(DYNAMICS)


def test_a_schedule_without_a_flush() -> None:
    """Does not clip, here and there; asking for it is refused here, as the trainer would."""
    flowing = changed(JOB, "spec.pipeline.schedule", "PipeDream2BW")
    flowing = changed(flowing, "spec.model", {"name": "gpt"})
    config = ValidatedJob.from_mapping(read_training_job(flowing).trainer_config()).config
    assert config.training.clip_norm is None
    with pytest.raises(ValueError, match="no stage knows the norm over all"):
        read_training_job(changed(flowing, "spec.training", {"clipNorm": 1.0}))


def test_the_defaults() -> None:
    """Mean the same with and without Kubernetes."""
    given = {
        name: JOB["spec"][name] for name in ("totalSteps", "model", "pipeline", "dynamics", "checkpoint")
    }
    config = read_training_job(JOB).trainer_config()
    assert TrainerConfig.from_mapping(config) == TrainerConfig.from_mapping(given)


@pytest.mark.parametrize("policy", CHOOSABLE)
def test_the_policies(policy: str) -> None:
    """Each that can be solved can be chosen."""
    item = changed(POLICY, "spec.objective", {"policy": policy})
    assert read_cluster_policy(item).spec.objective.policy == policy


@pytest.mark.parametrize("item", OBJECTS)
def test_an_example(item: dict[str, Any]) -> None:
    """Is read by the operator, and what the trainer gets of it by the trainer."""
    if item["kind"] == "ClusterPolicy":
        read_cluster_policy(item)
    else:
        TrainerConfig.from_mapping(read_training_job(item).trainer_config())


def test_what_is_said_about_rebalancing_and_repacking() -> None:
    """Reaches the trainer as it was said."""
    config = TrainerConfig.from_mapping(read_training_job(RESHAPED).trainer_config())
    assert (config.rebalance.balancer, config.rebalance.by) == ("diffusion", "parameters")
    assert config.rebalance.memory_bytes == 2**33
    assert (config.repack.target_stages, config.pipeline.stages_per_rank) == (3, 2)


@pytest.mark.parametrize("by", [None, "time", "parameters", "colour"])
@pytest.mark.parametrize("balancer", [None, "exact", "diffusion", "network", "deepspeed", "luck"])
@pytest.mark.parametrize("memory", [None, 1, 0])
def test_rebalancing_is_refused_here_where_the_trainer_refuses_it(
    balancer: str | None, by: str | None, memory: int | None
) -> None:
    """So that no pod starts for a job that cannot train: all values together, with 1F1B and without."""
    given = {"balancer": balancer, "by": by, "memoryBytes": memory}
    rebalance = {name: value for name, value in given.items() if value is not None}
    for schedule in ("1F1B", "GPipe"):
        item = changed(changed(JOB, "spec.rebalance", rebalance), "spec.pipeline.schedule", schedule)
        assert _taken(item) == _trains(item)


@pytest.mark.parametrize("count", [None, 1, 2, 3])
@pytest.mark.parametrize("schedule", trained_schedules())
def test_stages_a_rank_are_refused_here_where_the_trainer_refuses_them(
    schedule: str, count: int | None
) -> None:
    """The same schedules leave them free."""
    from ballast_trainer.pipeline.layout import check_schedule

    item = changed(JOB, "spec.pipeline.schedule", schedule)
    item = changed(item, "spec.model", {"name": "gpt"})
    if count is not None:
        item = changed(item, "spec.pipeline.stagesPerRank", count)
    try:
        check_schedule(schedule, count)
    except ConfigurationError:
        assert not _taken(item)
    else:
        assert _taken(item)


def _taken(item: dict[str, Any]) -> bool:
    try:
        read_training_job(item)
    except InvalidObject:
        return False
    return True


def _trains(item: dict[str, Any]) -> bool:
    try:
        TrainerConfig.from_mapping(
            {name: item["spec"][name] for name in TRAINER_FIELDS if name in item["spec"]}
        )
    except ConfigurationError:
        return False
    return True
