"""Elastic jobs under the operator's own rules: shares, ``decide_elastic_round``, live changes of size.

When a job arrives or ends, free GPUs are handed out at once, as the operator does within a round; at the end
of a round gangs may also be stopped, moved or resized for one another. A start, and a move to another GPU
type, takes the job's restart time; a change of size on its type is live and takes a pause. A gang that grows
holds its new GPUs from the decision on, and trains at its old size until its new pods are there.

A GPU type is one pool. Where the parts of a gang are has no influence on its speed.
"""

import dataclasses
import math
from collections.abc import Mapping

from ballast_policies.allocation.problem import Allocation, Job, Problem
from ballast_policies.allocation.registry import allocate, find_policy
from ballast_policies.contract.limits import MOST_SECONDS
from ballast_policies.rounds import Node, Round, RoundMemory, RoundSettings, RoundState
from ballast_policies.rounds.sizes import (
    SizeSettings,
    decide_elastic_round,
    seconds_before_growth,
)
from ballast_policies.simulator.elastic.engine import ElasticJobResult, ElasticResult, SimulationError
from ballast_policies.simulator.elastic.running import LEAST_STEP, ElasticRunning, sizes_within
from ballast_policies.simulator.elastic.workload_file import ElasticWorkload
from ballast_policies.simulator.progress import OnProgress, SimulationProgress


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRules:
    """As in a ClusterPolicy.

    Attributes:
        policy: ``spec.objective.policy``.
        round_seconds: ``spec.roundSeconds``.
        min_run_seconds: ``spec.moves.minRunSeconds``.
        max_moves_per_hour: ``spec.moves.maxMovesPerHour``.
        pause_seconds: how long training stands still when a gang changes its size live.
        growth_seconds: from the decision that a gang grows until it trains on more GPUs; it trains meanwhile.
        end_seconds: from a job's last step until it counts as done and its GPUs are free.

    Raises:
        ValueError: a value is impossible.
    """

    policy: str
    round_seconds: float = 360.0
    min_run_seconds: float = 0.0
    max_moves_per_hour: int | None = None
    pause_seconds: float = 1.0
    growth_seconds: float = 0.0
    end_seconds: float = 0.0

    def __post_init__(self) -> None:
        for option, value, least in (
            ("--round", self.round_seconds, 1.0),
            ("--min-run-seconds", self.min_run_seconds, 0.0),
            ("--pause-seconds", self.pause_seconds, 0.0),
            ("--growth-seconds", self.growth_seconds, 0.0),
            ("--end-seconds", self.end_seconds, 0.0),
        ):
            if not least <= value <= MOST_SECONDS:
                raise ValueError(f"{option}: {value:g} s is not between {least:g} and {MOST_SECONDS:g} s")
        if self.max_moves_per_hour is not None and self.max_moves_per_hour < 0:
            raise ValueError(f"--max-moves-per-hour: {self.max_moves_per_hour} is below 0")


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
        self._present: dict[str, ElasticRunning] = {}
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
                job = waiting.pop()
                self._present[job.name] = ElasticRunning(
                    job=job,
                    sizes=sizes_within(job, self._gpus),
                    remaining=job.work,
                    ending=self._rules.end_seconds,
                    pause=self._rules.pause_seconds,
                )
                arrived = True
            at_boundary = now >= boundary - LEAST_STEP
            if at_boundary:
                length = self._rules.round_seconds
                boundary += length * (1 + (now - boundary + LEAST_STEP) // length)
            if self._present:
                self._decide(now, within_round=not at_boundary, changed=arrived)
            ends = {name: now + one.seconds_left() for name, one in self._present.items()}
            changes = [now + one.changes_in(now) for one in self._present.values()]
            coming = [waiting[-1].arrival] if waiting else []
            if not coming and ends and math.isinf(min(*ends.values(), *changes)) and at_boundary:
                raise SimulationError(f"at {now:g} s all of {len(ends)} jobs wait, and none arrives")
            later = min([boundary if self._present else math.inf, *ends.values(), *changes, *coming])
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
        gangs = {name: one.as_gang(now) for name, one in present.items()}
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
            if name not in decided.resized or before is None:
                one.waits, one.since = one.job.restart_seconds, now
                one.trains_on, one.joins = len(after.nodes), 0.0
                one.starts += 1
                continue
            grows = len(after.nodes) > len(before.nodes)
            if grows and self._rules.growth_seconds > 0:
                one.joins = self._rules.growth_seconds
            else:
                one.trains_on, one.waits = len(after.nodes), self._rules.pause_seconds
            one.settled = now + one.joins + seconds_before_growth(self._rules.pause_seconds)
        for node in self._nodes:
            if used[node.name] > node.gpus:
                raise SimulationError(
                    f"at {now:g} s {used[node.name]} of {node.gpus} GPUs of {node.name} are given out"
                )


def _result(one: ElasticRunning, now: float) -> ElasticJobResult:
    return ElasticJobResult(
        name=one.job.name,
        arrival=one.job.arrival,
        finish=now,
        alone=one.job.fastest_seconds(),
        restarts=one.starts - 1,
        gpu_seconds=one.gpu_seconds,
    )
