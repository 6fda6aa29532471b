"""Whether a job may run in several pools at once, and which jobs cannot."""

import enum
from collections.abc import Callable

from ballast_policies.contract.job import JobConfig
from ballast_policies.planning.schedules import SCHEDULES

from ballast_operator.api.base import Rule


class MixedPools(enum.StrEnum):
    """Whether a gang may have GPUs of several pools at once."""

    NEVER = "Never"
    """Each launch is in one pool."""
    ALLOWED = "Allowed"
    """Where several pools together are faster, or only they have room for the gang."""


PREDICTED = SCHEDULES.own(lambda kind: kind.closed_form)
"""Schedules whose step time on unlike GPUs has a closed form."""
NOT_PREDICTED = SCHEDULES.own(lambda kind: not kind.closed_form)


def can_mix(config: JobConfig) -> bool:
    """Whether the job could set ``mixedPools: Allowed``."""
    return all(holds(config) for _, _, holds in _NEEDS)


def _rule(expression: str, reason: str, holds: Callable[[JobConfig], bool]) -> Rule:
    return Rule(
        f"self.mixedPools != 'Allowed' || {expression}",
        f"mixedPools: Allowed {reason}",
        ".mixedPools",
        holds=lambda spec: spec.mixed_pools is not MixedPools.ALLOWED or holds(spec.config),
    )


_NEEDS: tuple[tuple[str, str, Callable[[JobConfig], bool]], ...] = (
    (
        "has(self.model)",
        "needs a model, which Ballast cuts into stages that suit unlike GPUs; a script it does not. "
        "To fix: leave mixedPools out",
        lambda config: config.model is not None,
    ),
    (
        "!has(self.model) || has(self.model.layers)",
        "needs the number of layers that are cut into stages. To fix: set model.layers",
        lambda config: config.model is None or config.model.layers is not None,
    ),
    (
        f"!(self.pipeline.schedule in {list(NOT_PREDICTED)})",
        f"is for the schedules {' and '.join(PREDICTED)}, whose speed on unlike GPUs can be predicted. "
        f"To fix: pipeline.schedule: {PREDICTED[0]}, or leave mixedPools out",
        lambda config: SCHEDULES[config.pipeline.schedule].closed_form,
    ),
    (
        "(!has(self.pipeline.stagesPerRank) || self.pipeline.stagesPerRank == 1) && "
        "(!has(self.pipeline.replicas) || self.pipeline.replicas.all(x, x == 1))",
        "is for one stage on each rank, and one rank for each stage. "
        "To fix: leave pipeline.stagesPerRank and pipeline.replicas out, or mixedPools",
        lambda config: config.pipeline.stages_per_rank in (None, 1) and not config.pipeline.used_replicas,
    ),
    (
        "!has(self.parallelism) || (self.parallelism.tensor == 1 && self.parallelism.data == 1)",
        "is for pipelines alone: ranks that share a stage would wait for the slowest GPU. "
        "To fix: parallelism.tensor: 1 and parallelism.data: 1, or leave mixedPools out",
        lambda config: config.parallelism.tensor == 1 and config.parallelism.data == 1,
    ),
)

RULES = tuple(_rule(*need) for need in _NEEDS)
