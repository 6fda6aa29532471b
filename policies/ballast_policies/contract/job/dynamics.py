"""How a model changes while it trains."""

from typing import Annotated

from pydantic import Field

from ballast_policies.contract.conditions import absent, at, given
from ballast_policies.contract.job.changes import (
    AttentionSettings,
    DepthsSettings,
    ExitsSettings,
    ExpertsSettings,
    FreezingSettings,
    PruningSettings,
)
from ballast_policies.contract.model import Arguments, Named, Settings
from ballast_policies.contract.row_conditions import row
from ballast_policies.contract.rules import Rule
from ballast_policies.planning.dynamics import DYNAMICS

_SECTIONS = {
    "pruning": "pruning",
    "freezing": "freezing",
    "attention": "sparseAttention",
    "exits": "earlyExit",
    "depths": "mixtureOfDepths",
    "experts": "mixtureOfExperts",
}
"""Field -> the kind that reads it."""

_BY_STEPS = row("kind", DYNAMICS, lambda case: case.by_steps)
_CHOSEN_TARGET = row("kind", DYNAMICS, lambda case: not case.needs_target)


class DynamicConfig(Settings):
    """One change of the model while it trains."""

    RULES = (
        Rule(
            condition=at("start_step") <= at("end_step"),
            field="end_step",
            reason="endStep is before startStep",
            fix="raise endStep",
        ),
        Rule(
            condition=given("target") | _CHOSEN_TARGET | given("freezing"),
            field="target",
            reason="this kind of change needs a target",
            fix="give target a value from 0 to 1",
        ),
        Rule(
            condition=_BY_STEPS | (absent("target") & absent("end_step") & (at("start_step") == 0)),
            field="kind",
            reason="this kind of change does not follow steps: it holds from the first step on",
            fix="leave startStep, endStep and target out",
        ),
        Rule(
            condition=at("pruning.initial_sparsity") <= at("target"),
            field="target",
            reason="target is below pruning.initialSparsity, and what is pruned does not come back",
            fix="raise target or lower initialSparsity",
        ),
        *(
            Rule(
                condition=absent(section) | at("kind").is_in([kind]),
                field=section,
                reason=f"{section} is read by kind: {kind} alone",
                fix=f"leave {section} out, or kind: {kind}",
            )
            for section, kind in _SECTIONS.items()
        ),
        Rule(
            condition=lambda config: not config.args or config.kind not in DYNAMICS.builtin,
            field="args",
            reason="args are for the kinds of other distributions",
            fix="leave args out",
        ),
    )

    kind: Annotated[str, Field(max_length=253), Named(DYNAMICS)]
    """What changes: a name under [Dynamics](#dynamics), or ``prefix.name`` of a distribution that is
    installed in the operator's and the trainer's image."""
    start_step: int = Field(0, ge=0, le=2**53)
    """First step that changes something."""
    end_step: int | None = Field(None, ge=0, le=2**53)
    """Step at which ``target`` is reached. Absent: at ``startStep``; for a criterion: the job's last step."""
    every_steps: int = Field(1, ge=1, le=2**31 - 1)
    """Steps between two changes, or two looks at a criterion."""
    target: float | None = Field(None, ge=0, le=1)
    """What is reached at ``endStep``, 0 to 1: final sparsity, fraction of layers frozen, and the like. Where
    the model's own measurements decide, the most that may be reached; absent: 1."""
    pruning: PruningSettings | None = None
    """What is pruned, of ``kind: pruning``."""
    freezing: FreezingSettings | None = None
    """When layers freeze, of ``kind: freezing``."""
    attention: AttentionSettings | None = None
    """Who attends to whom, of ``kind: sparseAttention``."""
    exits: ExitsSettings | None = None
    """When positions leave, of ``kind: earlyExit``."""
    depths: DepthsSettings | None = None
    """How positions are routed, of ``kind: mixtureOfDepths``."""
    experts: ExpertsSettings | None = None
    """The experts of ``kind: mixtureOfExperts``."""
    args: Arguments = Field(default_factory=dict)
    """For the kinds of other distributions, which define what they read."""
