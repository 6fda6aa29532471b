"""``completion-time``: the shortest average completion time of elastic jobs whose lengths are known.

A choice maximises the sum over the jobs of worth x speed. A job's worth is what its progress is worth to
the total completion time, of which each job's counts by its weight. It follows heSRPT, which is optimal for
jobs that k GPUs speed up by k^p: with W_k the weights of the k longest jobs (for their weight), the k-th is
worth (W_k^q - W_(k-1)^q)^(1/q), q = 1 / (1 - p), so that short jobs come first and long ones keep a part
(Berg, Vesilo, Harchol-Balter, heSRPT: Parallel scheduling to minimize mean slowdown, 2020). Speeds of
distinct jobs are compared in units between their fastest and their most efficient use of the cluster.

What a restart costs is not known in advance: it depends on how long the new configuration will last.  So a
few choices with other exponents and stays are tried: the jobs in the system are run to their end for each (a
rollout, with the base's choices afterwards), and the first choice with the least total completion time is
taken.  Arrivals that have not happened are not guessed.  One-step rollouts of a base policy never do worse
than the base where the model is right: Bertsekas, Tsitsiklis and Wu, Rollout algorithms for combinatorial
optimization, 1997.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ballast_policies.allocation.problem import Configuration
from ballast_policies.elastic.job import (
    ElasticCluster,
    ElasticJob,
    JobState,
    Option,
    best_assignment,
    combinations,
)
from ballast_policies.registry import Registry


class ElasticPolicy(Protocol):
    """Policy that gives each job in the system a configuration at a time (s)."""

    @property
    def every_round(self) -> bool:
        """True if it is asked at each round, not only when jobs have arrived or ended."""
        ...

    def __call__(self, jobs: Sequence[JobState], now: float) -> list[Configuration | None]:
        """Configurations in the order of ``jobs``; None: the job waits."""
        ...


@dataclasses.dataclass(frozen=True)
class ElasticPolicyKind:
    """A row.

    Attributes:
        build: the policy for a cluster and the seconds of a round.
    """

    summary: str
    build: Callable[[ElasticCluster, float], ElasticPolicy]


ELASTIC_POLICIES: Registry[ElasticPolicyKind] = Registry(
    "elastic policy",
    group="ballast.elastic_policies",
    row_type=ElasticPolicyKind,
    rows={
        "completion-time": ElasticPolicyKind(
            summary="the shortest average completion time of jobs whose lengths are known",
            build=lambda cluster, seconds: CompletionTime(cluster=cluster, round_seconds=seconds),
        ),
    },
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """Weights of the comparison of configurations.

    Attributes:
        exponent: p, 0 to 1 exclusive: how well jobs are taken to scale when they are ranked.
        expected_stay: s; a restart is spread over the time until the next change, at most this.
        keep: a job's own configuration is worth this part more.
    """

    exponent: float
    expected_stay: float
    keep: float


BASE = Preference(exponent=0.7, expected_stay=2400.0, keep=0.06)
CANDIDATES = (
    Preference(exponent=0.5, expected_stay=1200.0, keep=0.03),
    Preference(exponent=0.9, expected_stay=2400.0, keep=0.06),
    Preference(exponent=0.7, expected_stay=600.0, keep=0.1),
    Preference(exponent=0.7, expected_stay=4800.0, keep=0.25),
)
EFFICIENCY = 0.3
"""Part of a job's unit of speed that is its most efficient use of the whole cluster; the rest is its fastest
configuration.  0.3 to 0.5 did best over Sia's 18 short workloads, by 1 % over 0."""
LEAST_PART = 0.2
"""A restart never takes more from a configuration's worth than down to about this part."""
MOST_WORK = 100_000
"""Jobs x configurations x changes x candidates that the rollouts of one decision may cost; beyond it the base
preference decides."""
MOST_CELLS_TRIED = 500_000_000
"""Jobs x configurations x candidates x combinations of GPUs left: about half a second of one core."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompletionTime:
    """The policy.

    Attributes:
        round_seconds: changes happen at the rounds' ends only.
    """

    cluster: ElasticCluster
    round_seconds: float
    every_round: bool = False

    def __call__(self, jobs: Sequence[JobState], now: float) -> list[Configuration | None]:
        """The configuration of each job from now on, as long as none arrives or ends."""
        del now
        units = {state.job.name: unit_of_speed(state.job, self.cluster) for state in jobs}
        base = self.choice(jobs, BASE, units)
        options = sum(len(state.job.configurations) for state in jobs)
        work = options * len(jobs) // 2 * len(CANDIDATES)
        if len(jobs) < 2 or work > MOST_WORK or work * combinations(self.cluster) > MOST_CELLS_TRIED:
            return base
        firsts: dict[tuple[Configuration | None, ...], None] = {tuple(base): None}
        for preference in CANDIDATES:
            firsts.setdefault(tuple(self.choice(jobs, preference, units)))
        firsts.setdefault(tuple(state.current for state in jobs))
        if len(firsts) == 1:
            return base
        return min(map(list, firsts), key=lambda first: self._total_completion_time(jobs, first, units))

    def choice(
        self,
        jobs: Sequence[JobState],
        preference: Preference,
        units: Mapping[str, float] | None = None,
    ) -> list[Configuration | None]:
        """The best choice by ``preference`` alone; ``units``: job -> its unit of speed, if it is known."""
        own = [
            unit_of_speed(state.job, self.cluster) if units is None else units[state.job.name]
            for state in jobs
        ]
        left = [state.remaining / unit for state, unit in zip(jobs, own, strict=True)]
        weights = hesrpt_weights(left, [state.job.weight for state in jobs], preference.exponent)
        options = [
            _options(state, weight / unit, preference)
            for state, weight, unit in zip(jobs, weights, own, strict=True)
        ]
        if any(state.held_to for state in jobs):
            # Worth more than all others together.
            first = sum(max((option.worth for option in row), default=0.0) for row in options)
            options = [
                [dataclasses.replace(option, worth=option.worth + first) for option in row]
                if state.held_to
                else row
                for state, row in zip(jobs, options, strict=True)
            ]
        return best_assignment(options, self.cluster)

    def _total_completion_time(
        self,
        jobs: Sequence[JobState],
        first: Sequence[Configuration | None],
        units: Mapping[str, float],
    ) -> float:
        """Completion times, summed, of all jobs that run as ``first`` until one ends, and under BASE then."""
        states, chosen, total = list(jobs), first, 0.0
        while states:
            states = [changed(state, to) for state, to in zip(states, chosen, strict=True)]
            needs = [seconds_left(state) for state in states]
            until = min(needs)
            if math.isinf(until):
                return math.inf
            length = max(1.0, math.ceil(until / self.round_seconds - 1e-9)) * self.round_seconds
            total += sum(
                state.job.weight * min(need, length) for state, need in zip(states, needs, strict=True)
            )
            states = [
                advanced(state, length) for state, need in zip(states, needs, strict=True) if need > length
            ]
            if states:
                chosen = self.choice(states, BASE, units)
        return total


def hesrpt_weights(left: Sequence[float], weights: Sequence[float], exponent: float) -> list[float]:
    """Worth of each job's progress, by its rank among the times ``left`` (s) for its weight (heSRPT).

    ``exponent``: p; k GPUs speed a job up by k^p.
    """
    power = 1.0 / (1.0 - exponent)
    worth, above = [0.0] * len(left), 0.0
    for i in sorted(range(len(left)), key=lambda i: -left[i] / weights[i]):
        own, above = weights[i], above + weights[i]
        # above^q - (above - own)^q without cancellation
        part = -math.expm1(power * math.log1p(-own / above)) if own < above else 1.0
        worth[i] = above * part ** (1.0 / power)
    return worth


def unit_of_speed(job: ElasticJob, cluster: ElasticCluster) -> float:
    """Units/s, between the fastest configuration's and the cluster's if it runs the most efficient ones."""
    fastest = max(each.throughput for each in job.configurations)
    gpus = cluster.gpus
    by_types: dict[frozenset[str], float] = {}
    for each in job.configurations:
        copies = min(gpus[gpu_type] / count for gpu_type, count in each.gpus.items() if count)
        types = frozenset(each.gpus)
        by_types[types] = max(by_types.get(types, 0.0), copies * each.throughput)
    efficient = sum(speed for types, speed in by_types.items() if len(types) == 1) or max(by_types.values())
    return float(fastest ** (1.0 - EFFICIENCY) * efficient**EFFICIENCY)


def _options(state: JobState, weight: float, preference: Preference) -> list[Option]:
    job = state.job
    options = []
    for configuration in state.held_to or job.configurations:
        worth = weight * configuration.throughput
        if configuration == state.current:
            worth *= 1 + preference.keep
        else:
            change = job.change_seconds(state.current, configuration)
            stay = min(state.remaining / configuration.throughput + change, preference.expected_stay)
            lost = change / stay
            worth *= max(1 - lost, LEAST_PART / (1 + lost))
        options.append(Option(configuration=configuration, worth=worth))
    return options


def changed(state: JobState, to: Configuration | None) -> JobState:
    """The job once it has been given ``to``; a first start counts as no restart."""
    if to == state.current:
        return state
    begun = state.current is not None or state.restarts > 0 or state.remaining < state.job.work
    return dataclasses.replace(
        state,
        current=to,
        restart_left=0.0 if to is None else state.job.change_seconds(state.current, to),
        restarts=state.restarts + (1 if to is not None and begun else 0),
    )


def seconds_left(state: JobState) -> float:
    """Seconds until the job ends in its configuration; infinite where it waits."""
    if state.current is None:
        return math.inf
    return state.restart_left + state.remaining / state.current.throughput


def advanced(state: JobState, seconds: float) -> JobState:
    """The job after these seconds in its configuration, before its end."""
    if state.current is None:
        return state
    waited = min(state.restart_left, seconds)
    return dataclasses.replace(
        state,
        restart_left=state.restart_left - waited,
        remaining=state.remaining - (seconds - waited) * state.current.throughput,
        held_to=(),
    )
