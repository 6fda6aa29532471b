"""The steps at which a dynamic case acts, and its progress at a step."""

import dataclasses
import math

from ballast_policies.contract.job.dynamics import DynamicConfig, FreezingCriterion

ALWAYS = 2**53
"""The end of a change that looks at the model until the job ends."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChangeSteps:
    """The steps at which a change acts: start, start + every, ..., end."""

    start: int
    end: int
    every: int

    @classmethod
    def of(cls, config: DynamicConfig) -> "ChangeSteps":
        """Steps of the configuration."""
        end = config.end_step
        if end is None:
            end = ALWAYS if looks_at_the_model(config) else config.start_step
        return cls(start=config.start_step, end=end, every=config.every_steps)

    def acts_at(self, step: int) -> bool:
        """True if the change acts before ``step`` runs."""
        return self.start <= step <= self.end and ((step - self.start) % self.every == 0 or step == self.end)

    def last_at(self, step: int) -> int | None:
        """The newest acting step at or before ``step``; None before the first."""
        if step < self.start:
            return None
        if step >= self.end:
            return self.end
        return step - (step - self.start) % self.every

    def too_late(self, total_steps: int) -> str:
        """Reason that nothing happens in a job of so many steps; empty: something does."""
        return (
            "" if self.start < total_steps else f"startStep {self.start}, and the job has {total_steps} steps"
        )

    def progress(self, step: int) -> float:
        """Fraction of the way from start to end at ``step``, as of the newest acting step."""
        last = self.last_at(step)
        if last is None:
            return 0.0
        return 1.0 if self.end == self.start else (last - self.start) / (self.end - self.start)


def looks_at_the_model(config: DynamicConfig) -> bool:
    """True if a criterion that is measured at each acting step decides, not the step."""
    return config.freezing is not None and config.freezing.criterion != FreezingCriterion.SCHEDULE


def whole_units(amount: float) -> int:
    """Units in a share of them, rounded down; (1 - 0.9) x 10, a rounding error below 1, is 1."""
    return math.floor(amount + 1e-9)
