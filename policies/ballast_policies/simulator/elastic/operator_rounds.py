"""Elastic jobs under the operator's own rules: shares, ``decide_elastic_round``, live changes of size.

When a job arrives or ends, free GPUs are handed out at once, as the operator does within a round; at the end
of a round gangs may also be stopped, moved or resized for one another. A start, and a move to another GPU
type, takes the job's restart time; a change of size on its type is live and takes a pause.

A GPU type is one pool. Where the parts of a gang are has no influence on its speed.
"""

import dataclasses
import math
from collections.abc import Mapping

from ballast_policies.allocation.problem import Allocation, Job, Problem
from ballast_policies.allocation.registry import allocate, find_policy
from ballast_policies.contract.limits import MOST_SECONDS
from ballast_policies.elastic.job import ElasticJob
from ballast_policies.rounds import Node, Placement, Round, RoundMemory, RoundSettings, RoundState
from ballast_policies.rounds.sizes import ElasticGang, SizeSettings, decide_elastic_round
from ballast_policies.simulator.elastic.engine import ElasticJobResult, ElasticResult, SimulationError
from ballast_policies.simulator.elastic.workload_file import ElasticWorkload
from ballast_policies.simulator.progress import OnProgress, SimulationProgress

LEAST_STEP = 1e-6
"""Seconds; nearer events are one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRules:
    """As in a ClusterPolicy.

    Attributes:
        policy: ``spec.objective.policy``.
        round_seconds: ``spec.roundSeconds``.
        min_run_seconds: ``spec.moves.minRunSeconds``.
        max_moves_per_hour: ``spec.moves.maxMovesPerHour``.
        pause_seconds: training stands still for so long when a gang changes its size live.

    Raises:
        ValueError: a value is impossible.
    """

    policy: str
    round_seconds: float = 360.0
    min_run_seconds: float = 0.0
    max_moves_per_hour: int | None = None
    pause_seconds: float = 1.0

    def __post_init__(self) -> None:
        for option, value, least in (
            ("--round", self.round_seconds, 1.0),
            ("--min-run-seconds", self.min_run_seconds, 0.0),
            ("--pause-seconds", self.pause_seconds, 0.0),
        ):
            if not least <= value <= MOST_SECONDS:
                raise ValueError(f"{option}: {value:g} s is not between {least:g} and {MOST_SECONDS:g} s")
        if self.max_moves_per_hour is not None and self.max_moves_per_hour < 0:
            raise ValueError(f"--max-moves-per-hour: {self.max_moves_per_hour} is below 0")


@dataclasses.dataclass(slots=True, kw_only=True)
class _Running:
    """A job that has arrived and not ended."""

    job: ElasticJob
    sizes: Mapping[str, Mapping[int, float]]
    remaining: float
    at: Placement | None = None
    since: float = 0.0
    waits: float = 0.0
    starts: int = 0
    gpu_seconds: float = 0.0

    @property
    def least(self) -> int:
        return min(min(by_size) for by_size in self.sizes.values())

    @property
    def speed(self) -> float:
        return 0.0 if self.at is None else self.sizes[self.at.gpu_type][len(self.at.nodes)]

    def seconds_left(self) -> float:
        return self.waits + self.remaining / self.speed if self.at is not None else math.inf

    def advance(self, seconds: float) -> None:
        if self.at is None:
            return
        waited = min(self.waits, seconds)
        self.waits -= waited
        self.remaining -= (seconds - waited) * self.speed
        self.gpu_seconds += seconds * len(self.at.nodes)

    def as_job(self, now: float) -> Job:
        """As policies see it: its speed at the least size, on the types that have it."""
        return Job(
            name=self.job.name,
            gpus=self.least,
            throughput={kind: by_size.get(self.least, 0.0) for kind, by_size in self.sizes.items()},
            steps_remaining=max(self.remaining, 1e-9),
            elapsed=now - self.job.arrival,
        )

    def as_gang(self, pause_seconds: float) -> ElasticGang | None:
        """Its sizes; None: it has one."""
        sizes = {kind: by_size for kind, by_size in self.sizes.items() if self.least in by_size}
        if all(len(by_size) == 1 for by_size in sizes.values()):
            return None
        trains = self.waits <= 0
        return ElasticGang(
            speeds=sizes,
            may_shrink=trains,
            may_grow=trains,
            may_move=trains,
            pause_seconds=pause_seconds,
            restart_seconds=self.job.restart_seconds,
        )


def simulate_rules(
    workload: ElasticWorkload, rules: OperatorRules, *, progress: OnProgress | None = None
) -> ElasticResult:
    """Run the jobs to their ends.

    Args:
        workload: jobs and cluster; a configuration has one GPU type.
        rules: of the operator.
        progress: called after each decision.

    Raises:
        SimulationError: a job can never run, or has configurations of several types; or restarts take
            longer than gangs run.
        ProblemError: there is no such policy, or it lacks an input.
    """
    return _Simulation(workload, rules).run(progress)


class _Simulation:
    def __init__(self, workload: ElasticWorkload, rules: OperatorRules) -> None:
        self._workload, self._rules = workload, rules
        cluster = workload.cluster
        self._gpus = cluster.gpus
        self._nodes = tuple(
            Node(name=f"{kind}-{number}", pool=kind, gpu_type=kind, gpus=cluster.gpus_per_node[kind])
            for kind, count in cluster.nodes.items()
            for number in range(count)
        )
        self._present: dict[str, _Running] = {}
        self._memory: RoundMemory | None = None
        self._allocation: tuple[frozenset[str], Allocation] | None = None
        self._surplus = find_policy(rules.policy).surplus
        self._reads_progress = bool(find_policy(rules.policy).reads)
        self._decisions = 0

    def run(self, progress: OnProgress | None) -> ElasticResult:
        longest = max(job.restart_seconds for job in self._workload.jobs)
        if longest >= max(self._rules.round_seconds, self._rules.min_run_seconds):
            raise SimulationError(
                f"a restart takes up to {longest:g} s, a round {self._rules.round_seconds:g} s: gangs that "
                f"take turns would never train. To fix: --round or --min-run-seconds above {longest:g}"
            )
        waiting = list(reversed(self._workload.jobs))
        done: dict[str, ElasticJobResult] = {}
        now, boundary = 0.0, self._rules.round_seconds
        while waiting or self._present:
            arrived = False
            while waiting and waiting[-1].arrival <= now + LEAST_STEP:
                self._arrive(waiting.pop())
                arrived = True
            at_boundary = now >= boundary - LEAST_STEP
            if at_boundary:
                length = self._rules.round_seconds
                boundary += length * (1 + (now - boundary + LEAST_STEP) // length)
            if self._present:
                self._decide(now, within_round=not at_boundary, changed=arrived)
            ends = {name: now + one.seconds_left() for name, one in self._present.items()}
            coming = [waiting[-1].arrival] if waiting else []
            if not coming and ends and math.isinf(min(ends.values())) and at_boundary:
                raise SimulationError(f"at {now:g} s all of {len(ends)} jobs wait, and none arrives")
            later = min([boundary if self._present else math.inf, *ends.values(), *coming])
            for one in self._present.values():
                one.advance(later - now)
            now = later
            for name in [name for name, end in ends.items() if end <= now + LEAST_STEP]:
                done[name] = _result(self._present.pop(name), now)
            if progress is not None:
                progress(
                    SimulationProgress(
                        seconds=now,
                        done=len(done),
                        total=len(self._workload.jobs),
                        present=len(self._present),
                        waiting=sum(one.at is None for one in self._present.values()),
                    )
                )
        return ElasticResult(
            workload=self._workload.name,
            policy=self._rules.policy,
            round_seconds=self._rules.round_seconds,
            gpus=sum(self._gpus.values()),
            decisions=self._decisions,
            jobs=tuple(done[job.name] for job in self._workload.jobs),
        )

    def _arrive(self, job: ElasticJob) -> None:
        sizes: dict[str, dict[int, float]] = {}
        for each in job.configurations:
            if len(each.gpus) > 1:
                raise SimulationError(
                    f"{job.name}: configuration {each.name} has several GPU types, and the operator's gangs "
                    "have one. To fix: leave out --rules"
                )
            (kind,) = each.gpus
            if each.fits(self._gpus):
                sizes.setdefault(kind, {})[each.total] = each.throughput
        if not sizes:
            raise SimulationError(f"{job.name}: none of its configurations fits the cluster")
        ordered = {kind: dict(sorted(by_size.items())) for kind, by_size in sizes.items()}
        self._present[job.name] = _Running(job=job, sizes=ordered, remaining=job.work)

    def _decide(self, now: float, *, within_round: bool, changed: bool) -> None:
        rules, present = self._rules, self._present
        jobs = tuple(one.as_job(now) for one in present.values())
        shares = self._shares(jobs, fresh=changed or (self._reads_progress and not within_round))
        running = {name: one.at for name, one in present.items() if one.at is not None}
        since = {name: one.since for name, one in present.items() if one.at is not None}
        if self._memory is None:
            memory = RoundMemory.from_running(running, since, shares, now=now)
        else:
            memory = self._memory.of_jobs(present).until(
                now, shares, running=running, round_seconds=rules.round_seconds
            )
        gangs = {name: one.as_gang(rules.pause_seconds) for name, one in present.items()}
        decided = decide_elastic_round(
            now=now,
            shares=shares,
            jobs=jobs,
            nodes=self._nodes,
            state=RoundState(
                received=memory.account.received,
                promised=memory.account.promised,
                running=running,
                running_since=since,
                moves=memory.moves,
            ),
            settings=RoundSettings(
                round_seconds=rules.round_seconds,
                min_run_seconds=rules.min_run_seconds,
                max_moves_per_hour=rules.max_moves_per_hour,
                within_round=within_round,
            ),
            elastic={name: gang for name, gang in gangs.items() if gang is not None},
            sizes=SizeSettings(surplus=self._surplus),
        )
        self._memory = memory.with_moves(decided, now)
        self._decisions += 1
        self._carry_out(decided, now)

    def _shares(self, jobs: tuple[Job, ...], *, fresh: bool) -> Mapping[str, Mapping[str, float]]:
        """By the policy; those of the last solve where the same jobs are there and none is asked for."""
        names = frozenset(job.name for job in jobs)
        if fresh or self._allocation is None or self._allocation[0] != names:
            problem = Problem(gpu_types=tuple(self._gpus), capacity=self._gpus, jobs=jobs)
            self._allocation = names, allocate(self._rules.policy, problem)
        return self._allocation[1].allocation

    def _carry_out(self, decided: Round, now: float) -> None:
        used = dict.fromkeys((node.name for node in self._nodes), 0)
        for name, one in self._present.items():
            before, after = one.at, decided.placements.get(name)
            for held in () if after is None else after.nodes:
                used[held] += 1
            if after == before:
                continue
            one.at = after
            if after is None:
                continue
            if name in decided.resized:
                one.waits += self._rules.pause_seconds
            else:
                one.waits, one.since = one.job.restart_seconds, now
                one.starts += 1
        for node in self._nodes:
            if used[node.name] > node.gpus:
                raise SimulationError(
                    f"at {now:g} s {used[node.name]} of {node.gpus} GPUs of {node.name} are given out"
                )


def _result(one: _Running, now: float) -> ElasticJobResult:
    return ElasticJobResult(
        name=one.job.name,
        arrival=one.job.arrival,
        finish=now,
        alone=one.job.fastest_seconds(),
        restarts=one.starts - 1,
        gpu_seconds=one.gpu_seconds,
    )
