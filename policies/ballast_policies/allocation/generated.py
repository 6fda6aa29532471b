"""Configurations generated at the prices of the present optimum: a job need not list them.

A job with thousands of configurations states its best answer to prices instead
(:class:`ConfigurationSource`, a planner's question): which of them gains most, ``worth x throughput - price
of its GPUs``? Each linear program of a policy is solved with the configurations known so far; its multipliers
(worth of a step/s, prices of GPUs) go to every source, and answers that gain more than the job's known ones
enter. When no program has such an answer, its multipliers are optimal for all configurations: by weak duality
the bound holds for those too that were never seen. (Dantzig and Wolfe, "Decomposition principle for linear
programs", Operations Research 8, 1960.)
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from ballast_policies.accounting import jobs_alike
from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.own_share import best_use
from ballast_policies.allocation.policy import Reads
from ballast_policies.allocation.problem import Allocation, Configuration, Problem, ProblemError
from ballast_policies.allocation.registry import allocate, find_policy
from ballast_policies.allocation.solvers.linear import LinearSolution, SolverError, watched

GAINS = 1e-9
"""Part of the gain of a full-time share by which an answer must be better than the known ones."""
FIRST = 1e5
"""Weight of the cost of leaving the optimum, in gains of a tie."""
MOST_ROUNDS = 200
GENERATES = ("max-min-fairness", "makespan", "finish-time-fairness", "max-throughput")
"""Policies whose programs count a configuration by its speed, times a number of its job, and by its GPUs."""


class ConfigurationSource(Protocol):
    """All configurations of a job, reached by one question."""

    def best_answer(
        self, prices: Mapping[str, float], worth: float, most: Mapping[str, int]
    ) -> Configuration | None:
        """The configuration with the largest ``worth * throughput - sum of gpus * prices``.

        Args:
            prices: of a GPU of each type that the cluster has, 0 or more.
            worth: of a step per second, more than 0.
            most: GPUs of each type that it may take.

        Returns:
            None where the job cannot run. Equal configurations have equal names in all answers.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """An allocation, and what was generated for it.

    Attributes:
        allocation: as of ``allocate``; its gap is proven over all configurations of the sources.
        configurations: job -> those that came into question, in order; the allocation's names are theirs.
        rounds: how often the policy was solved.
    """

    allocation: Allocation
    configurations: Mapping[str, tuple[Configuration, ...]]
    rounds: int


def allocate_generated(
    policy: str, problem: Problem, sources: Mapping[str, ConfigurationSource], *, within: float = 0.0
) -> Generated:
    """Solve ``problem`` by the named policy, the jobs in ``sources`` having all configurations of theirs.

    The optimum is that of the problem with all configurations listed. Jobs that share a source object share
    its answers.

    Args:
        policy: one of :data:`GENERATES`.
        problem: the cluster and its jobs; those in ``sources`` have neither throughput nor configurations.
        sources: by name of the job.
        within: part of the optimum, and of each job's own share, that may be missing: sources are asked less
            often. The gap tells what is missing of the optimum.

    Raises:
        ProblemError: a name is unknown, or the policy cannot price configurations that it has not seen.
        SolverError: the solver failed, or answers kept coming.
    """
    _check(policy, problem, sources)
    search = _Search(problem, sources, within, by_weight=Reads.ISOLATED_ELAPSED in find_policy(policy).reads)
    for rounds in range(1, MOST_ROUNDS + 1):
        posed = search.posed()
        with watched() as programs:
            found = allocate(policy, posed)
        columns, missing, first = max((len(real.columns) for real, _, _ in programs), default=0), 0.0, None
        before = search.size
        for real, value, solution in programs:
            if len(real.columns) == columns:
                excess, first = search.ask(real, value, solution), solution
                missing = max(missing, excess / abs(solution.bound)) if solution.bound else missing
            else:
                search.ask(real, value, solution, within=first)
        if search.size == before or 0 < missing <= within:
            gap = None if found.gap is None else found.gap + missing
            used = {job.name: job.configurations for job in posed.jobs if job.name in sources}
            return Generated(
                allocation=dataclasses.replace(found, gap=gap), configurations=used, rounds=rounds
            )
    raise SolverError(f"configurations kept coming for {MOST_ROUNDS} rounds")


class _Search:
    """The configurations known so far, by source."""

    def __init__(
        self, problem: Problem, sources: Mapping[str, ConfigurationSource], within: float, *, by_weight: bool
    ) -> None:
        self.problem, self.within = problem, within
        self.most = {t: int(n) for t, n in problem.capacity.items() if n > 0}
        self.source = [sources.get(job.name) for job in problem.jobs]
        self.known = self._best_uses(by_weight=by_weight)

    @property
    def size(self) -> int:
        """Number of columns."""
        return sum(map(len, self.known.values()))

    def posed(self) -> Problem:
        """The problem with the configurations known so far."""
        jobs = (
            job
            if source is None
            else dataclasses.replace(job, configurations=tuple(self.known[id(source)].values()))
            for job, source in zip(self.problem.jobs, self.source, strict=True)
        )
        return dataclasses.replace(self.problem, jobs=tuple(jobs))

    def ask(
        self,
        real: Instance,
        value: np.ndarray,
        solution: LinearSolution,
        *,
        within: LinearSolution | None = None,
    ) -> float:
        """Ask all sources at the multipliers of a program; the sum of what answers gain beyond known ones.

        The program may be about a tie: among the columns that an optimum of ``within`` may use.
        """
        columns, n = real.columns, len(real.names)
        worth = np.zeros(n)
        worth[columns.first] = value / columns.rate_first
        worth, of_types = worth + solution.level_duals, solution.shadow_prices
        if within is not None and within.level_duals.any():
            # Its reduced costs count before all gains.
            before = FIRST * float(worth.max(initial=0.0) / within.level_duals.max())
            worth = worth + before * within.level_duals
            of_types = of_types + before * within.shadow_prices
        gain = worth[columns.first] * columns.rate_first - columns.cost(of_types)
        held = np.zeros(n)
        np.maximum.at(held, columns.first, gain)
        prices = dict(zip(real.gpu_types, of_types.tolist(), strict=True))
        excess = 0.0
        for m, source in enumerate(self.source):
            if source is None or not worth[m] > 0:
                continue
            answer = source.best_answer(prices, float(worth[m]), self.most)
            if answer is None:
                continue
            more = _gain(answer, prices, float(worth[m])) - float(held[m])
            if more > GAINS * float(worth[m]) * answer.throughput:
                excess += more
                self.known[id(source)].setdefault(answer.name, answer)
        return excess

    def _best_uses(self, *, by_weight: bool) -> dict[int, dict[str, Configuration]]:
        """Configurations of each source that make the best of 1/n of all GPUs, and the fastest.

        As :mod:`.own_share` with all of them listed; ``by_weight``: also of its jobs' parts by their weights.
        """
        sources = {id(source): source for source in self.source if source is not None}
        weights = np.array([job.weight for job in self.problem.jobs])
        alike = jobs_alike(weights, weights).tolist() if by_weight else ()
        # A source is asked for each part of the cluster that a job of it has; n: as one of n jobs like it.
        asked = dict.fromkeys((at, float(len(weights))) for at in sources)
        asked |= {(id(one), n): None for one, n in zip(self.source, alike, strict=False) if one is not None}
        known: dict[tuple[int, float], dict[str, Configuration]] = {each: {} for each in asked}
        limit = dict.fromkeys(asked, (np.zeros(len(self.most)), -1.0, 0.0))
        for _ in range(MOST_ROUNDS):
            better = []
            for at, (prices, most, value) in limit.items():
                named = dict(zip(self.most, prices.tolist(), strict=True))
                answer = sources[at[0]].best_answer(named, 1.0, self.most)
                if answer is None or answer.name in known[at]:
                    continue
                more = _gain(answer, named, 1.0) - most
                if more > max(GAINS * answer.throughput, self.within * value):
                    known[at][answer.name] = answer
                    better.append(at)
            if not better:
                break
            limit = self._multipliers({at: list(known[at].values()) for at in better})
        found: dict[int, dict[str, Configuration]] = {at: {} for at in sources}
        for (source, _), some in known.items():
            found[source] |= some
        # A job that cannot run is an elastic one all the same, whose units differ from those of gangs.
        idle = Configuration.of_one_type(self.problem.gpu_types[0], 1, 0.0)
        return {at: some or {idle.name: idle} for at, some in found.items()}

    def _multipliers(
        self, known: Mapping[tuple[int, float], Sequence[Configuration]]
    ) -> dict[tuple[int, float], tuple[np.ndarray, float, float]]:
        """Prices (k,) of GPUs, worth of a job's time, and speed, at its best use of 1/n of all GPUs.

        By (source, n).
        """
        part = np.array(list(self.most.values())) / np.array([[n] for _, n in known])
        gpus = np.zeros((len(known), len(self.most) + 1, max(map(len, known.values()))))
        worth = np.zeros((len(known), gpus.shape[2]))
        for row, some in enumerate(known.values()):
            worth[row, : len(some)] = [each.throughput for each in some]
            gpus[row, :-1, : len(some)] = np.transpose(
                [[each.gpus.get(t, 0) for t in self.most] for each in some]
            )
            gpus[row, -1, : len(some)] = 1.0
        gpus[:, :-1] /= part[:, :, None]
        unit = np.maximum(worth.max(axis=1, keepdims=True), np.finfo(float).tiny)
        multipliers = best_use(worth / unit, gpus)[1] * unit
        return {
            at: (row[:-1] / own, float(row[-1]), float(row.sum()))
            for at, own, row in zip(known, part, multipliers, strict=True)
        }


def _gain(each: Configuration, prices: Mapping[str, float], worth: float) -> float:
    return worth * each.throughput - sum(n * prices.get(t, 0.0) for t, n in each.gpus.items() if n)


def _check(policy: str, problem: Problem, sources: Mapping[str, ConfigurationSource]) -> None:
    find_policy(policy)
    if policy not in GENERATES:
        raise ProblemError(
            f"{policy}: it cannot price configurations that it has not seen. "
            f"To fix: list them, or choose one of {', '.join(GENERATES)}"
        )
    jobs = {job.name: job for job in problem.jobs}
    for name in sources:
        if name not in jobs:
            raise ProblemError(f"sources[{name}]: not one of the jobs {sorted(jobs)}")
        if jobs[name].throughput or jobs[name].configurations:
            raise ProblemError(
                f"jobs[{name}]: its source states GPUs and speed. "
                "To fix: leave out throughput and configurations"
            )
