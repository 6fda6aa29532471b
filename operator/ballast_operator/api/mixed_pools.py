"""Whether a job may run in several pools at once, and which jobs cannot."""

import enum
from collections.abc import Callable

from ballast_policies.contract.conditions import Cel
from ballast_policies.contract.job import JobConfig
from ballast_policies.contract.rules import Rule
from ballast_policies.planning.schedules import SCHEDULES


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
    return all(holds(config) for _, holds, _, _ in _NEEDS)


def _rule(expression: str, holds: Callable[[JobConfig], bool], reason: str, fix: str) -> Rule:
    return Rule(
        condition=Cel(
            f"self.mixedPools != 'Allowed' || {expression}",
            lambda spec: spec.mixed_pools is not MixedPools.ALLOWED or holds(spec),
        ),
        field="mixed_pools",
        reason=f"mixedPools: Allowed {reason}",
        fix=fix,
    )


_NEEDS: tuple[tuple[str, Callable[[JobConfig], bool], str, str], ...] = (
    (
        "has(self.model)",
        lambda config: config.model is not None,
        "needs a model, which Ballast cuts into stages that suit unlike GPUs; a script it does not",
        "leave mixedPools out",
    ),
    (
        "!has(self.model) || has(self.model.layers)",
        lambda config: config.model is None or config.model.layers is not None,
        "needs the number of layers that are cut into stages",
        "set model.layers",
    ),
    (
        f"!(self.pipeline.schedule in {list(NOT_PREDICTED)})",
        lambda config: SCHEDULES[config.pipeline.schedule].closed_form,
        f"is for the schedules {' and '.join(PREDICTED)}, whose speed on unlike GPUs can be predicted",
        f"pipeline.schedule: {PREDICTED[0]}, or leave mixedPools out",
    ),
    (
        "(!has(self.pipeline.stagesPerRank) || self.pipeline.stagesPerRank == 1) && "
        "(!has(self.pipeline.replicas) || self.pipeline.replicas.all(x, x == 1))",
        lambda config: config.pipeline.stages_per_rank in (None, 1) and not config.pipeline.used_replicas,
        "is for one stage on each rank, and one rank for each stage",
        "leave pipeline.stagesPerRank and pipeline.replicas out, or mixedPools",
    ),
)

RULES = tuple(_rule(*need) for need in _NEEDS)
