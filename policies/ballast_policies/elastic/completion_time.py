"""``completion-time``: the shortest average completion time of elastic jobs whose lengths are known.

Each choice maximises a sum over the jobs of f^-a, where f is the time that the job would still need in a
configuration, its restart included: with a > 0 short jobs come first, and with a below 1 a second GPU
is worth less than the first, so that jobs share.  Which a is best depends on who is there, so several are
tried: the jobs in the system are run to their end for each first choice (a rollout, with the choices of
one fixed a afterwards), and the first choice with the least total completion time is taken.  What runs
already is one of the choices.  Arrivals that have not happened are not guessed.

One-step rollouts of a base policy never do worse than the base policy where the model is right:
Bertsekas, Tsitsiklis and Wu, Rollout algorithms for combinatorial optimization, 1997.
"""

import dataclasses
import math
from collections.abc import Sequence

from ballast_policies.configuration import Configuration
from ballast_policies.elastic.assignment import Option, best_assignment
from ballast_policies.elastic.job import ElasticCluster, JobState


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """How configurations are weighed.

    Attributes:
        sharpness: a.
        expected_stay: s; a restart is spread over the time until the next change, at most this.
        keep: a job's own configuration is worth this part more.
    """

    sharpness: float
    expected_stay: float
    keep: float


BASE = Preference(sharpness=0.5, expected_stay=1200.0, keep=0.03)
CANDIDATES = tuple(
    Preference(sharpness=sharpness, expected_stay=stay, keep=keep)
    for sharpness in (0.1, 0.3, 0.6, 1.0)
    for stay, keep in ((1200.0, 0.03), (300.0, 0.0), (1200.0, 0.15))
)
MOST_WORK = 100_000
"""Jobs x configurations x changes x candidates that the rollouts of one decision may cost; beyond it the base
preference decides."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompletionTime:
    """The policy.

    Attributes:
        cluster: to share out.
        round_seconds: changes happen at the rounds' ends only.
    """

    cluster: ElasticCluster
    round_seconds: float
    every_round: bool = False

    def __call__(self, jobs: Sequence[JobState], now: float) -> list[Configuration | None]:
        """The configuration of each job from now on, as long as none arrives or ends."""
        del now
        base = self._choice(jobs, BASE)
        options = sum(len(state.job.configurations) for state in jobs)
        if len(jobs) < 2 or options * len(jobs) // 2 * len(CANDIDATES) > MOST_WORK:
            return base
        firsts: dict[tuple[Configuration | None, ...], None] = {tuple(base): None}
        for preference in CANDIDATES:
            firsts.setdefault(tuple(self._choice(jobs, preference)))
        firsts.setdefault(tuple(state.current for state in jobs))
        if len(firsts) == 1:
            return base
        return min(map(list, firsts), key=lambda first: self._total_completion_time(jobs, first))

    def _choice(self, jobs: Sequence[JobState], preference: Preference) -> list[Configuration | None]:
        return best_assignment([_options(state, preference) for state in jobs], self.cluster)

    def _total_completion_time(
        self, jobs: Sequence[JobState], first: Sequence[Configuration | None]
    ) -> float:
        """Of all jobs from now, when they run as ``first`` until one ends, and under BASE after that."""
        states, chosen, total = list(jobs), first, 0.0
        while states:
            states = [changed(state, to) for state, to in zip(states, chosen, strict=True)]
            needs = [seconds_left(state) for state in states]
            until = min(needs)
            if math.isinf(until):
                return math.inf
            length = max(1.0, math.ceil(until / self.round_seconds - 1e-9)) * self.round_seconds
            total += sum(min(need, length) for need in needs)
            states = [
                advanced(state, length) for state, need in zip(states, needs, strict=True) if need > length
            ]
            if states:
                chosen = self._choice(states, BASE)
        return total


def _options(state: JobState, preference: Preference) -> list[Option]:
    job = state.job
    options = []
    for configuration in job.configurations:
        seconds = state.remaining / configuration.throughput
        if configuration == state.current:
            worth = (seconds + state.restart_left) ** -preference.sharpness * (1 + preference.keep)
        else:
            stay = min(seconds, preference.expected_stay)
            worth = (seconds * (1 + job.restart_seconds / stay)) ** -preference.sharpness
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
        restart_left=0.0 if to is None else state.job.restart_seconds,
        restarts=state.restarts + (1 if to is not None and begun else 0),
    )


def seconds_left(state: JobState) -> float:
    """Until the job ends in its configuration; infinite where it waits."""
    if state.current is None:
        return math.inf
    return state.restart_left + state.remaining / state.current.throughput


def advanced(state: JobState, seconds: float) -> JobState:
    """The job after so many seconds in its configuration, before its end."""
    if state.current is None:
        return state
    waited = min(state.restart_left, seconds)
    return dataclasses.replace(
        state,
        restart_left=state.restart_left - waited,
        remaining=state.remaining - (seconds - waited) * state.current.throughput,
    )
