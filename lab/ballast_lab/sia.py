"""``sia``: a 0/1 program over configurations each round, to compare with.

S. Jayaram Subramanya et al., Sia: Heterogeneity-aware, goodput-optimized ML-cluster scheduling, SOSP 2023,
section 3.4: with the speeds of a job divided by its least one, maximise sum (lambda - (r G)^p) over the
chosen configurations, where r = (age - restarts x restart time) / (age + restart time) discounts changes.
"""

import dataclasses
from collections.abc import Sequence

from ballast_policies.allocation.problem import Configuration
from ballast_policies.elastic.completion_time import ElasticPolicyKind
from ballast_policies.elastic.job import ElasticCluster, JobState, Option, best_assignment

POWER = -0.5
WAITING = 1.1
"""lambda, for a job that gets nothing."""
LEAST_DISCOUNT = 1e-3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sia:
    """The policy, with speeds known."""

    cluster: ElasticCluster
    round_seconds: float
    every_round: bool = True

    def __call__(self, jobs: Sequence[JobState], now: float) -> list[Configuration | None]:
        """The configuration of each job for the next round; a job in its restart keeps its own."""
        return best_assignment([self._options(state, now) for state in jobs], self.cluster)

    def _options(self, state: JobState, now: float) -> list[Option]:
        job = state.job
        slowest = min(each.throughput for each in job.configurations)
        age = now - job.arrival
        lost = job.restart_seconds * (state.restarts + 1)
        discount = max(LEAST_DISCOUNT, (age - lost) / (age + job.restart_seconds)) if age > 0 else 1.0
        options = []
        for each in job.configurations:
            kept = each == state.current
            if state.current is not None and state.restart_left > 0 and not kept:
                continue
            gain = each.throughput / slowest * (1.0 if kept or state.current is None else discount)
            worth = WAITING - gain**POWER
            if kept and state.restart_left > 0:
                worth += 1e6
            if worth > 0:
                options.append(Option(configuration=each, worth=worth))
        return options


KIND = ElasticPolicyKind(
    summary="Sia's integer program: the largest sum of normalised goodput, once a round",
    build=lambda cluster, seconds: Sia(cluster=cluster, round_seconds=seconds),
)
