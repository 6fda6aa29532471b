"""How a model changes while it trains."""

import dataclasses

from ballast_policies.contract.conditions import at
from ballast_policies.contract.rules import Rule
from ballast_policies.contract.settings import Settings, setting
from ballast_policies.planning.dynamics import DYNAMICS


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DynamicConfig(Settings):
    """One change of the model while it trains."""

    RULES = (
        Rule(
            condition=at("start_step") <= at("end_step"),
            field="end_step",
            reason="endStep is before startStep",
            fix="raise endStep",
        ),
    )

    kind: str = setting(max_length=253, registry=DYNAMICS)
    """What changes: a name under [Dynamics](#dynamics), or ``prefix.name`` of a distribution that is
    installed in the operator's and the trainer's image."""
    start_step: int = setting(0, ge=0, le=2**53)
    """First step that changes something."""
    end_step: int = setting(ge=0, le=2**53)
    """Step at which ``target`` is reached."""
    every_steps: int = setting(1, ge=1, le=2**31 - 1)
    """Steps between two changes."""
    target: float = setting(ge=0, le=1)
    """What is reached at ``endStep``, 0 to 1: final sparsity, fraction of layers frozen, and the like."""
