"""The rate at which spot machines are taken away, its uncertainty, and the cost of a preemption.

Preemptions are taken for a Poisson process over the time that machines run: n preemptions in T machine hours.
The rate is a posterior's mean, with a prior that hardly counts once a machine was lost; bounds have no
prior (Garwood 1936), so that they hold whatever the rate is.
"""

import dataclasses
import math

PRIOR_PREEMPTIONS = 0.5
PRIOR_HOURS = 12.0
"""Jeffreys' shape 1/2, with the weight of half a day of one machine: once a day where nothing is known."""

PRIOR_HOURS_AFTER_A_LOSS = 1.0
"""Its weight from the first preemption on: a rate of one an hour is common, too, and shows within hours."""

MOST_PER_HOUR = 60.0
"""No bound is above it: where hours are too few to say more."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hazard:
    """Rate at which one machine of a pool is taken away.

    Attributes:
        preemptions: seen.
        hours: machine hours in which they were seen.
    """

    preemptions: int = 0
    hours: float = 0.0

    def __post_init__(self) -> None:
        if self.preemptions < 0 or not (self.hours >= 0 and math.isfinite(self.hours)):
            raise ValueError(f"{self.preemptions} preemptions in {self.hours} machine hours: impossible")

    @property
    def per_hour(self) -> float:
        """Mean of the posterior, preemptions per machine hour."""
        prior = PRIOR_HOURS_AFTER_A_LOSS if self.preemptions else PRIOR_HOURS
        return (PRIOR_PREEMPTIONS + self.preemptions) / (prior + self.hours)

    def quantile_per_hour(self, probability: float) -> float:
        """The rate that is not exceeded with this probability, at least, above 1/2; at most below 1/2.

        Garwood's exact limits for a Poisson mean: quantiles of Gamma(n, T) below, of Gamma(n + 1, T) above.
        So an interval of two of them covers every rate at least as often as it says.

        Raises:
            ValueError: the probability is not between 0 and 1.
        """
        if not 0 < probability < 1:
            raise ValueError(f"probability: {probability} is not between 0 and 1")
        from scipy.special import gammaincinv

        upper = probability >= 0.5
        shape = self.preemptions + upper
        seen = float(gammaincinv(shape, probability)) if shape else 0.0
        limit = min(seen / self.hours, MOST_PER_HOUR) if self.hours > 0 else MOST_PER_HOUR * upper
        return max(limit, self.per_hour) if upper else min(limit, self.per_hour)

    def per_hour_in_class(self, others: "Hazard") -> float:
        """The rate that a choice between pools expects: that of the class is the prior, half a day's weight.

        Low where little was seen: a pool that is avoided is never learnt. In twenty weeks of logs
        (lab/benchmarks/prices/weeks.py) a prior of less weight cost 1 % more.

        ``others``: all that was seen in the class, this pool included.
        """
        prior = (PRIOR_PREEMPTIONS + others.preemptions) / (PRIOR_HOURS + others.hours)
        return (prior * PRIOR_HOURS + self.preemptions) / (PRIOR_HOURS + self.hours)

    def plus(self, other: "Hazard") -> "Hazard":
        """Both observations together: live preemptions beside those of history."""
        return Hazard(preemptions=self.preemptions + other.preemptions, hours=self.hours + other.hours)


def daly_interval(checkpoint_seconds: float, mean_seconds_between_failures: float) -> float:
    """Seconds of work between checkpoints, to higher order (Daly 2006, equation 37).

    sqrt(2 C M) [1 + 1/3 sqrt(C / 2M) + 1/9 (C / 2M)] - C for C < 2M, else M.

    Raises:
        ValueError: a time is not positive.
    """
    C, M = checkpoint_seconds, mean_seconds_between_failures
    if not (C > 0 and M > 0 and math.isfinite(M)):
        raise ValueError(f"checkpoint {C} s, mean time between failures {M} s: both must be positive")
    if C >= 2 * M:
        return M
    half = C / (2 * M)
    return math.sqrt(2 * C * M) * (1 + math.sqrt(half) / 3 + half / 9) - C


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RestartCosts:
    """Costs of moves and preemptions to a job.

    Attributes:
        startup_seconds: from the request for a machine to the first step: it is paid, and nothing is trained.
        notice_seconds: between the notice and the loss of a machine; enough to save when it is at least
            ``checkpoint_seconds``.
    """

    startup_seconds: float = 180.0
    checkpoint_seconds: float = 5.0
    notice_seconds: float = 120.0

    def useful_part(self, hazard_per_hour: float, interval_seconds: float) -> float:
        """Part of the rented time in which a job gets on, 0 to 1.

        Of every stretch of running, 1/rate long on average, checkpoints take C/(tau + C), and the preemption
        takes the save at the notice and, where the notice is too short to save, the work since the last
        checkpoint, half an interval on average (Daly 2006, section 2). A start-up comes on top.
        """
        rate = hazard_per_hour / 3600.0
        lost = 0.0 if self.notice_seconds >= self.checkpoint_seconds else interval_seconds / 2
        inside = rate * (lost + min(self.notice_seconds, self.checkpoint_seconds))
        saving = self.checkpoint_seconds / (interval_seconds + self.checkpoint_seconds)
        return max(0.0, (1.0 - saving) * (1.0 - inside) / (1.0 + rate * self.startup_seconds))


SELDOM = 1e-6
"""Preemptions an hour below which checkpoints are for other failures: one an hour."""


def checkpoint_interval(hazard_per_hour: float, restart: RestartCosts) -> float:
    """Seconds of work between checkpoints by Daly's formula, at least 60 s and at most a day.

    Where the notice is long enough to save, preemptions take no work, and an hour is for other failures.
    """
    noticed = restart.notice_seconds >= restart.checkpoint_seconds
    if hazard_per_hour < SELDOM or noticed:
        return 3600.0
    return min(max(daly_interval(restart.checkpoint_seconds, 3600.0 / hazard_per_hour), 60.0), 86400.0)


def steps_between_checkpoints(
    *, checkpoint_seconds: float, step_seconds: float, failures_per_hour: float
) -> int:
    """Steps between checkpoints by :func:`checkpoint_interval`, at least 1, as if no notice came.

    ``failures_per_hour``: the sum over the gang's machines. Raises ValueError: the step takes no time.
    """
    if not (step_seconds > 0 and math.isfinite(step_seconds)):
        raise ValueError(f"step_seconds: {step_seconds} is not positive")
    costs = RestartCosts(checkpoint_seconds=checkpoint_seconds, notice_seconds=0.0)
    return max(1, round(checkpoint_interval(failures_per_hour, costs) / step_seconds))


def saving_part(restart: RestartCosts) -> float:
    """Part of the time on demand that is not spent on checkpoints."""
    return restart.useful_part(0.0, checkpoint_interval(0.0, restart))
