"""Elastic jobs under the operator's own rules: shares, ``decide_round``, live changes of size.

When a job arrives or ends, free GPUs are handed out at once, as the operator does within a round; at the end
of a round gangs may also be stopped, moved or resized for one another. A start, and a move to another GPU
type, takes the job's restart time; a change of size on its type is live and takes a pause. A gang that grows
holds its new GPUs from the decision on, and trains at its old size until its new pods are there.

A GPU type is one pool. Where the parts of a gang are has no influence on its speed.
"""

import dataclasses
import math
from collections.abc import Mapping

from ballast_policies.allocation.problem import Job
from ballast_policies.elastic.job import ElasticJob
from ballast_policies.rounds.gangs import ElasticGang
from ballast_policies.rounds.values import Node
from ballast_policies.scheduling import ClusterJob, SchedulingPolicy
from ballast_policies.simulator.clock import Clock, OnProgress, SimulationError
from ballast_policies.simulator.decisions import ClusterGang, OperatorDecisions, cluster_of
from ballast_policies.simulator.elastic.engine import ElasticJobResult, ElasticResult, result_of
from ballast_policies.simulator.elastic.workload_file import ElasticWorkload
from ballast_policies.simulator.settings import check_seconds


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
        check_seconds("--round", self.round_seconds, least=1.0)
        check_seconds("--min-run-seconds", self.min_run_seconds)
        check_seconds("--pause-seconds", self.pause_seconds)
        check_seconds("--growth-seconds", self.growth_seconds)
        check_seconds("--end-seconds", self.end_seconds)
        if self.max_moves_per_hour is not None and self.max_moves_per_hour < 0:
            raise ValueError(f"--max-moves-per-hour: {self.max_moves_per_hour} is below 0")


def simulate_rules(
    workload: ElasticWorkload,
    rules: OperatorRules,
    *,
    until: float = math.inf,
    progress: OnProgress | None = None,
) -> ElasticResult:
    """Run the jobs to their ends.

    Args:
        workload: jobs and cluster; a configuration has one GPU type.
        rules: of the operator.
        until: s; nothing is simulated from then on.
        progress: called after each decision.

    Raises:
        SimulationError: a job can never run, or has configurations of several types; or restarts take
            longer than gangs run; or no job ends by ``until``.
        ProblemError: there is no such policy, or it lacks an input.
    """
    longest = max(job.restart_seconds for job in workload.jobs)
    if longest >= max(rules.round_seconds, rules.min_run_seconds):
        raise SimulationError(
            f"a restart takes up to {longest:g} s, a round {rules.round_seconds:g} s: gangs that "
            f"take turns would never train. To fix: --round or --min-run-seconds above {longest:g}"
        )
    cluster, done = workload.cluster, dict[str, ElasticJobResult]()
    jobs = {job.name: job for job in workload.jobs}
    clock = Clock(
        arrivals=((job.arrival, _gang(job, workload, rules)) for job in workload.jobs),
        decide=OperatorDecisions[ClusterGang](
            cluster_of(
                Node(name=f"{kind}-{number}", pool=kind, gpu_type=kind, gpus=cluster.gpus_per_node[kind])
                for kind, count in cluster.nodes.items()
                for number in range(count)
            ),
            SchedulingPolicy(
                objective=rules.policy,
                round_seconds=rules.round_seconds,
                min_run_seconds=rules.min_run_seconds,
                max_moves_per_hour=rules.max_moves_per_hour,
            ),
            first_round_ends=rules.round_seconds,
        ),
        ended=lambda one, now: done.update(
            {one.name: result_of(jobs[one.name], now, one.starts - 1, one.gpu_seconds)}
        ),
        total=len(workload.jobs),
        progress=progress,
    )
    clock.run(until)
    held = {one.name: one.gpu_seconds for one in clock.present.values()}
    return ElasticResult(
        workload=workload.name,
        policy=rules.policy,
        round_seconds=rules.round_seconds,
        gpus=sum(cluster.gpus.values()),
        decisions=clock.decisions,
        jobs=tuple(
            done.get(job.name) or result_of(job, math.inf, 0, held.get(job.name, 0.0))
            for job in workload.jobs
        ),
        until=until,
    )


def _gang(job: ElasticJob, workload: ElasticWorkload, rules: OperatorRules) -> ClusterGang:
    """To policies its speed is that at the least size, on the types that have it."""
    sizes = sizes_within(job, workload.cluster.gpus)
    least = min(min(by_size) for by_size in sizes.values())
    sizes_from_least = {kind: by_size for kind, by_size in sizes.items() if least in by_size}
    elastic = ElasticGang(
        speeds=sizes_from_least, pause_seconds=rules.pause_seconds, restart_seconds=job.restart_seconds
    )
    one = ClusterJob(
        job=Job(
            name=job.name,
            gpus=least,
            throughput={kind: by_size.get(least, 0.0) for kind, by_size in sizes.items()},
            steps_remaining=job.work,
        ),
        elastic=elastic if any(len(by_size) > 1 for by_size in sizes_from_least.values()) else None,
    )
    return dataclasses.replace(
        ClusterGang.of(one, {}, 0.0, live=True, arrived=job.arrival),
        restart_seconds=job.restart_seconds,
        pause_seconds=rules.pause_seconds,
        growth_seconds=rules.growth_seconds,
        ending=rules.end_seconds,
    )


def sizes_within(job: ElasticJob, gpus: Mapping[str, int]) -> dict[str, dict[int, float]]:
    """GPU type -> number -> speed, of the configurations that the cluster can hold.

    Raises:
        SimulationError: there is none, or one has several GPU types.
    """
    sizes: dict[str, dict[int, float]] = {}
    for each in job.configurations:
        if len(each.gpus) > 1:
            raise SimulationError(
                f"{job.name}: configuration {each.name} has several GPU types, and the operator's gangs "
                "have one. To fix: leave out --rules"
            )
        (kind,) = each.gpus
        if each.fits(gpus):
            sizes.setdefault(kind, {})[each.total] = each.throughput
    if not sizes:
        raise SimulationError(f"{job.name}: none of its configurations fits the cluster")
    return {kind: dict(sorted(by_size.items())) for kind, by_size in sizes.items()}
