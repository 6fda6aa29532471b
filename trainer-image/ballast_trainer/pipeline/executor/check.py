"""Checks of a configuration with replicas of stages, or with a schedule without a flush."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ballast_policies.planning.dynamics import DYNAMICS
from ballast_policies.planning.schedules import find_schedule, replicable_schedules

from ballast_trainer.config import TrainerConfig
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.pipeline.layout import is_asynchronous, used_replicas


def with_schedule_defaults(config: TrainerConfig, given: Mapping[str, Any]) -> TrainerConfig:
    """Without a flush gradients are not clipped unless that is asked for (and then refused).

    Args:
        config: as read.
        given: what it was read from.
    """
    asked = "clipNorm" in (given.get("training") or {})
    if asked or not is_asynchronous(config.pipeline.schedule):
        return config
    return dataclasses.replace(config, training=dataclasses.replace(config.training, clip_norm=None))


def check_execution(config: TrainerConfig) -> None:
    """Refuse settings that these pipelines cannot honour.

    Raises:
        ConfigurationError: naming the field, the reason and what to change.
    """
    schedule = config.pipeline.schedule
    if is_asynchronous(schedule):
        _check_flow(config, f"{schedule} updates each stage on its own, without a flush")
    if used_replicas(config.pipeline.replicas):
        _check_replicas(config)


def _check_flow(config: TrainerConfig, why: str) -> None:
    if config.training.clip_norm is not None:
        raise ConfigurationError(
            "training.clipNorm",
            f"{config.training.clip_norm}: {why}, and none of them ever knows the norm over all. "
            "To fix: leave it out, or take a schedule with a flush, e.g. 1F1B",
        )
    if config.training.precision == "fp16":
        raise ConfigurationError(
            "training.precision",
            f"'fp16': {why}, and no step can be taken back on all of them when one overflows. "
            "To fix: bf16 or fp32",
        )
    _one_column(config, f"{config.pipeline.schedule} runs on one line of ranks")


def _check_replicas(config: TrainerConfig) -> None:
    replicas, schedule = list(config.pipeline.replicas), config.pipeline.schedule
    if find_schedule(schedule).build_replicated is None:
        raise ConfigurationError(
            "pipeline.replicas",
            f"{schedule} has no replicas of a stage. "
            f"To fix: schedule: one of {', '.join(replicable_schedules())}",
        )
    if config.repack.enabled:
        raise ConfigurationError(
            "repack.enabled",
            f"replicas {replicas} fix the ranks at {sum(replicas)}. To fix: repack.enabled: false",
        )
    for dynamic in config.dynamics:
        if DYNAMICS[dynamic.kind].compares_ranks:
            raise ConfigurationError(
                f"dynamics[{dynamic.kind}]",
                f"it compares weights rank by rank, and would count those of replicas {replicas} several "
                "times. To fix: leave it or pipeline.replicas out",
            )
    _one_column(config, f"replicas {replicas} are chosen stage by stage")


def _one_column(config: TrainerConfig, why: str) -> None:
    parallelism = config.parallelism
    if parallelism.data * parallelism.tensor > 1:
        raise ConfigurationError(
            "parallelism",
            f"data {parallelism.data} x tensor {parallelism.tensor}: {why}. To fix: data: 1, tensor: 1",
        )
