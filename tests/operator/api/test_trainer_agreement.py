"""What the API lets through, the trainer takes: the two never import each other, so a test compares them."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from ballast_operator.api import read_cluster_policy, read_training_job
from ballast_operator.api.training_recipe import DynamicKind, Schedule
from ballast_policies.allocation.registry import POLICY_NAMES
from ballast_trainer.config import TrainerConfig
from ballast_trainer.launch import Job

from tests.operator.api.objects import JOB, POLICY, changed

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("**/*.yaml"))
OBJECTS = [
    pytest.param(item, id=f"{path.name}-{item['metadata']['name']}")
    for path in EXAMPLES
    for item in yaml.safe_load_all(path.read_text())
    if "apiVersion" in item
]


def test_the_kinds_of_change() -> None:
    """Are those that the trainer carries out, all of them and no others."""
    from ballast_trainer.dynamics.registry import DYNAMICS

    assert {kind.value for kind in DynamicKind} == set(DYNAMICS)


def test_the_schedules() -> None:
    """Are those that the trainer runs."""
    from ballast_trainer.runtime.layout import FLOWING, FLUSHING

    assert {schedule.value for schedule in Schedule if schedule.flushes} == set(FLUSHING)
    assert {schedule.value for schedule in Schedule if not schedule.flushes} == set(FLOWING)


def test_a_schedule_without_a_flush() -> None:
    """Does not clip, here and there; asking for it is refused here, as the trainer would."""
    flowing = changed(JOB, "spec.pipeline.schedule", "PipeDream2BW")
    flowing = changed(flowing, "spec.model", {"name": "gpt"})
    config = Job.from_mapping(read_training_job(flowing).trainer_config()).config
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


@pytest.mark.parametrize("policy", POLICY_NAMES)
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
