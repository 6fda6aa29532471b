"""Starts and ends of a snapshot's jobs as forecast: the operator's own decisions, round after round.

Speeds are those of the snapshot and no job arrives, so it holds for the jobs that are there now.
A start or a move takes a gang the restart time that was measured for it, a change of its size a pause.
"""

import dataclasses
from collections.abc import Collection, Mapping

from ballast_policies.allocation.problem import ProblemError
from ballast_policies.rounds.values import Round
from ballast_policies.scheduling.decision import isolated_speeds
from ballast_policies.simulator.clock import Answer, Clock, OnProgress, SimulationProgress
from ballast_policies.simulator.decisions import HOUR, ClusterGang, OperatorDecisions

from ballast_operator.allocator.decider import scheduling_policy
from ballast_operator.allocator.problem.snapshot import Snapshot
from ballast_operator.api.cluster_policy import ClusterPolicy

MOST_WORK = 2_000_000
"""Jobs that are decided on, summed over all decisions, after which a forecast ends: a few minutes."""

DECISION_WORK = 10
"""Jobs whose part of a decision takes as long as the rest of it."""


def forecast(
    snapshot: Snapshot,
    policy: ClusterPolicy,
    *,
    now: float,
    seconds: float,
    live: Collection[str] = (),
    agnostic: bool = False,
    of: Collection[str] = (),
    progress: OnProgress | None = None,
) -> tuple[tuple[ClusterGang, ...], float]:
    """(forecasts of the jobs of ``snapshot`` under ``policy``, in its order; seconds that they look ahead).

    A round begins ``now`` (epoch seconds). ``seconds``: how far to look ahead; less where that is more than
    MOST_WORK. ``live``: names of the jobs that change their size without a restart. ``agnostic``: all GPU
    types are taken for equally fast. ``of``: nothing is decided after these jobs have ended; empty: all.

    Raises:
        ProblemError: the policy cannot be used on what is there at some moment.
    """
    jobs = _active_jobs(snapshot, now, live)
    awaited = {job.name for job in jobs if not of or job.name in of}
    work, reach = 0, seconds

    def ended(job: ClusterGang, at: float) -> None:
        job.ends = at
        awaited.discard(job.name)
        clock.over = not awaited

    def passed(moment: SimulationProgress) -> None:
        nonlocal work, reach
        work += moment.present + DECISION_WORK
        if work > MOST_WORK and not clock.over:
            clock.over, reach = True, moment.seconds
        if progress is not None:
            progress(moment)

    clock = Clock(
        arrivals=[(0.0, job) for job in jobs],
        decide=_decisions(snapshot, policy, now, agnostic=agnostic),
        ended=ended,
        total=len(jobs),
        progress=passed,
        over=not awaited,
    )
    clock.run(seconds)
    return tuple(jobs), reach


def next_round(snapshot: Snapshot, policy: ClusterPolicy, *, now: float, live: Collection[str] = ()) -> Round:
    """The round that the operator would begin at once; arguments and errors as of :func:`forecast`."""
    jobs = {job.name: job for job in _active_jobs(snapshot, now, live)}
    agnostic = policy.spec.objective.heterogeneity_agnostic
    return _decisions(snapshot, policy, now, agnostic=agnostic)(jobs, 0.0).round


def _decisions(snapshot: Snapshot, policy: ClusterPolicy, now: float, *, agnostic: bool) -> "_Decisions":
    by = dataclasses.replace(scheduling_policy(policy), heterogeneity_agnostic=agnostic)
    return _Decisions(snapshot, by, began=now, first_round_ends=0.0)


def _active_jobs(snapshot: Snapshot, now: float, live: Collection[str]) -> list[ClusterGang]:
    prices = snapshot.capacity.pool_prices
    return [ClusterGang.of(one, prices, now, live=one.name in live) for one in snapshot.jobs]


class _Decisions(OperatorDecisions[ClusterGang]):
    """The operator's, which also say how much faster than on its isolated share each job is."""

    def __call__(self, present: Mapping[str, ClusterGang], now: float) -> Answer:
        try:
            answer = super().__call__(present, now)
        except ProblemError as error:
            raise ProblemError(f"{now / HOUR:.2f} h from now: {error}") from error
        assert self.last is not None
        ratios = isolated_speeds(self.state, self.last.inputs.problem, answer.round.placements)
        for name, job in present.items():
            ratio = ratios.get(name, 0.0)
            job.isolated_rate = 1.0 / ratio if ratio > 0 else 0.0
        return answer
