"""Simulation of elastic jobs: in rounds at whose ends they change, or under the operator's own rules.

Under the operator's rules a start, and a move to another GPU type, takes the job's restart time; a change of
size on its type is live. A GPU type is one pool. Under the operator's rules a gang on more nodes than hold it
has the speed that the file states there; otherwise each is on as few as hold it.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Self

from ballast_policies.allocation.problem import Configuration, Job
from ballast_policies.elastic.completion_time import ELASTIC_POLICIES, ElasticPolicy
from ballast_policies.elastic.job import ElasticCluster, ElasticJob, JobState, sizes_of
from ballast_policies.rounds.gangs import ElasticGang, SpreadGang, speeds_where_it_is
from ballast_policies.rounds.values import Node, Placement, PoolPart, Round
from ballast_policies.scheduling.decision import SchedulingPolicy
from ballast_policies.scheduling.state import ClusterJob
from ballast_policies.simulator.clock import (
    LEAST_STEP,
    Active,
    ActiveJob,
    Answer,
    Clock,
    Decide,
    OnProgress,
    SimulationError,
)
from ballast_policies.simulator.decisions import ClusterGang, OperatorDecisions, cluster_of
from ballast_policies.simulator.elastic_file import ElasticWorkload
from ballast_policies.simulator.result import HOUR, PERCENTILES
from ballast_policies.simulator.settings import check_seconds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ElasticJobResult:
    """Result of a job; s. ``finish`` is infinite where the simulation was over before."""

    name: str
    arrival: float
    finish: float
    alone: float
    restarts: int
    gpu_seconds: float

    @property
    def completion_time(self) -> float:
        """Seconds from arrival to finish."""
        return self.finish - self.arrival


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ElasticResult:
    """Result of a run.

    Attributes:
        jobs: in order of arrival.
        decisions: number of times that the policy was asked.
        until: s, when it was over at the latest; averages are of the jobs that had ended.
    """

    workload: str
    policy: str
    round_seconds: float
    gpus: int
    decisions: int
    jobs: tuple[ElasticJobResult, ...]
    until: float = math.inf

    def __post_init__(self) -> None:
        if not self.finished:
            raise SimulationError(
                f"none of {len(self.jobs)} jobs ends within {self.until:g} s. To fix: --until, later"
            )

    @property
    def finished(self) -> tuple[ElasticJobResult, ...]:
        """Jobs that have ended."""
        return tuple(job for job in self.jobs if job.finish <= self.until)

    @property
    def average_completion_time(self) -> float:
        """S."""
        return sum(job.completion_time for job in self.finished) / len(self.finished)

    @property
    def average_alone(self) -> float:
        """s, with each job alone on its best configuration: no policy can do better."""
        return sum(job.alone for job in self.finished) / len(self.finished)

    @property
    def makespan(self) -> float:
        """Seconds from the first arrival to the last finish."""
        return max(job.finish for job in self.finished) - min(job.arrival for job in self.jobs)

    @property
    def restarts_per_job(self) -> float:
        """Changes of configuration and resumes, the first start not counted."""
        return sum(job.restarts for job in self.finished) / len(self.finished)

    @property
    def utilisation(self) -> float:
        """Part of all GPU time that jobs held GPUs, from 0 to the last finish or ``until``."""
        held = sum(job.gpu_seconds for job in self.jobs)
        return held / (self.gpus * min(self.until, max(job.finish for job in self.jobs)))

    def percentile(self, percent: float) -> float:
        """Completion time within which that part of the jobs is done, s."""
        ordered = sorted(job.completion_time for job in self.finished)
        return ordered[min(len(ordered) - 1, int(percent / 100 * len(ordered)))]

    def to_json(self, *, per_job: bool = False) -> dict[str, Any]:
        """The form of ``ballast simulate --elastic --output json``."""
        return {
            "workload": self.workload,
            "policy": self.policy,
            "round_seconds": self.round_seconds,
            "jobs_measured": len(self.finished),
            "jobs_unfinished": len(self.jobs) - len(self.finished),
            "average_jct_hours": self.average_completion_time / HOUR,
            "average_jct_seconds": self.average_completion_time,
            "average_alone_seconds": self.average_alone,
            "jct_percentiles_hours": {p: self.percentile(p) / HOUR for p in PERCENTILES},
            "makespan_hours": self.makespan / HOUR,
            "restarts_per_job": self.restarts_per_job,
            "utilisation": self.utilisation,
            "decisions": self.decisions,
            **({"jobs": [_row(job) for job in self.finished]} if per_job else {}),
        }


def _row(job: ElasticJobResult) -> dict[str, Any]:
    return {**dataclasses.asdict(job), "completion_time": job.completion_time}


def simulate(
    workload: ElasticWorkload,
    *,
    policy: str,
    round_seconds: float = 60.0,
    until: float = math.inf,
    progress: OnProgress | None = None,
) -> ElasticResult:
    """Run the jobs to their ends.

    Jobs start, change, resume and give back GPUs at multiples of ``round_seconds``.
    The policy is asked when jobs have arrived or ended, or each round where it wants that.

    ``policy``: a name in :data:`~ballast_policies.elastic.completion_time.ELASTIC_POLICIES`; ``until``,
    ``progress``: as of :func:`simulate_rules`.

    Raises:
        RegistryError: there is no such policy, or it cannot be loaded.
        SimulationError: the policy breaks its promise, or no job ends by ``until``.
    """
    decide = _RoundEnds(
        policy=ELASTIC_POLICIES.find(policy).build(workload.cluster, round_seconds),
        cluster=workload.cluster,
        seconds=round_seconds,
    )
    played = _played(workload, policy, round_seconds, _SizedJob.of, decide, until, progress)
    return dataclasses.replace(played, decisions=decide.decisions)


def _played(
    workload: ElasticWorkload,
    policy: str,
    round_seconds: float,
    arrives: Callable[[ElasticJob], Active],
    decide: Decide[Active],
    until: float,
    progress: OnProgress | None,
) -> ElasticResult:
    """Result of the jobs on a clock; ``arrives``: a job as it plays there."""
    jobs = {job.name: arrives(job) for job in workload.jobs}
    finish = dict.fromkeys(jobs, math.inf)
    clock = Clock(
        arrivals=((job.arrival, jobs[job.name]) for job in workload.jobs),
        decide=decide,
        ended=lambda one, now: finish.update({one.name: now}),
        total=len(jobs),
        progress=progress,
    )
    clock.run(until)
    return ElasticResult(
        workload=workload.name,
        policy=policy,
        round_seconds=round_seconds,
        gpus=sum(workload.cluster.gpus.values()),
        decisions=clock.decisions,
        jobs=tuple(
            ElasticJobResult(
                name=job.name,
                arrival=job.arrival,
                finish=finish[job.name],
                alone=job.fastest_seconds(),
                restarts=max(0, jobs[job.name].starts - 1),
                gpu_seconds=jobs[job.name].gpu_seconds,
            )
            for job in workload.jobs
        ),
        until=until,
    )


@dataclasses.dataclass(slots=True, kw_only=True)
class _SizedJob(ActiveJob):
    """A job that a policy of elastic jobs gives one of its ``options``, by the GPUs that these hold."""

    job: ElasticJob
    options: Mapping[Placement, Configuration]

    @classmethod
    def of(cls, job: ElasticJob) -> Self:
        """The job as it arrives."""
        options = {_placed(each): each for each in job.configurations}
        return cls(
            name=job.name,
            remaining=job.work,
            speed_at=lambda at: options[at].throughput,
            restart_seconds=job.restart_seconds,
            pause_seconds=0.0,
            job=job,
            options=options,
        )

    def follow(self, decided: Round, now: float) -> None:
        """Also forget a start that was broken off before the first step."""
        if self.placement is None and self.starts == 1 and self.remaining == self.job.work:
            self.starts = 0
        ActiveJob.follow(self, decided, now)

    @property
    def state(self) -> JobState:
        """The job as policies see it."""
        return JobState(
            job=self.job,
            remaining=self.remaining,
            current=None if self.placement is None else self.options[self.placement],
            restart_left=self.waits,
            restarts=max(0, self.starts - 1),
        )


@dataclasses.dataclass(slots=True, kw_only=True)
class _RoundEnds:
    """Decisions of a policy of elastic jobs, which change at multiples of ``seconds`` only."""

    policy: ElasticPolicy
    cluster: ElasticCluster
    seconds: float
    decisions: int = 0
    asked: tuple[str, ...] = ()
    placements: Mapping[str, Placement] = dataclasses.field(default_factory=dict)

    def __call__(self, present: Mapping[str, _SizedJob], now: float) -> Answer:
        """The policy's choice; between ends of rounds, and while no job arrives or ends, the last."""
        # Of large numbers the quotient may be just below the whole one.
        names, nearest = tuple(present), round(now / self.seconds)
        end = nearest * self.seconds
        if abs(now - end) <= LEAST_STEP and (self.policy.every_round or names != self.asked):
            chosen = self.policy([one.state for one in present.values()], now)
            sizes = sizes_of(chosen)
            if not self.cluster.fits(sizes):
                raise SimulationError(f"at {now:g} s {sizes} do not fit the nodes")
            self.placements = {
                name: _placed(to) for name, to in zip(names, chosen, strict=True) if to is not None
            }
            self.decisions, self.asked = self.decisions + 1, names
        again = self.policy.every_round or names != self.asked or not self.placements
        if end <= now + LEAST_STEP:
            end = (nearest + 1) * self.seconds
        return Answer(round=Round(placements=self.placements, reasons={}), until=end if again else math.inf)


def _placed(configuration: Configuration) -> Placement:
    """GPUs of the configuration; each type is one pool, and one node."""
    parts = tuple(
        PoolPart(pool=kind, gpu_type=kind, gpus=gpus) for kind, gpus in configuration.gpus.items() if gpus
    )
    nodes = tuple(part.pool for part in parts for _ in range(part.gpus))
    return Placement(gpu_type=parts[0].gpu_type, pool=parts[0].pool, nodes=nodes, parts=parts)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRules(SchedulingPolicy):
    """Rules of a ClusterPolicy, and how long changes take under them.

    Attributes:
        pause_seconds: how long training stands still when a gang changes its size live.
        growth_seconds: from the decision that a gang grows until it trains on more GPUs; it trains meanwhile.
        end_seconds: from a job's last step until it counts as done and its GPUs are free.

    Raises:
        ValueError: a value is impossible.
    """

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

    ``until``: s; nothing is simulated from then on; ``progress``: called after each decision.

    Raises:
        SimulationError: a job can never run, or has configurations of several types; or no job ends by
            ``until``.
        ProblemError: there is no such policy, or it lacks an input.
    """
    cluster = workload.cluster
    decide = OperatorDecisions[ClusterGang](
        cluster_of(
            Node(name=f"{kind}-{number}", pool=kind, gpu_type=kind, gpus=cluster.gpus_per_node[kind])
            for kind, count in cluster.nodes.items()
            for number in range(count)
        ),
        rules,
        first_round_ends=rules.round_seconds,
    )
    return _played(
        workload,
        rules.objective,
        rules.round_seconds,
        lambda job: _gang(job, workload, rules),
        decide,
        until,
        progress,
    )


@dataclasses.dataclass(slots=True, kw_only=True)
class _Gang(ClusterGang):
    """A job of a file; ``per_node``: GPU type -> GPUs of a node."""

    spread: Mapping[tuple[str, int], Mapping[int, float]] = dataclasses.field(default_factory=dict)
    per_node: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def speed_on(self, gpu_type: str, gpus: int, nodes: int, packed: float) -> float:
        """Units/s on ``nodes`` nodes, as stated of the nearest number beyond those that hold it."""
        by_nodes = self.spread.get((gpu_type, gpus))
        if not by_nodes or nodes <= math.ceil(gpus / self.per_node[gpu_type]):
            return packed
        return by_nodes[min(by_nodes, key=lambda known: (abs(known - nodes), known))]

    def as_cluster_job(self, now: float) -> ClusterJob:
        """Also with its speeds where it is."""
        found, at = ClusterGang.as_cluster_job(self, now), self.placement
        if at is None or not self.spread:
            return found
        gpus, per_node = len(at.nodes), self.per_node[at.gpu_type]
        packed, fewest = self.one.speed(at), math.ceil(gpus / per_node)
        if len(set(at.nodes)) > fewest:
            speed = self.speed_at(at)
            gang = SpreadGang(
                at=at,
                fewest=fewest,
                speed=speed,
                packed_speed=packed,
                restart_seconds=self.restart_seconds,
                may_move=self.trains,
            )
            found = dataclasses.replace(found, spread=gang)
        if (elastic := found.elastic) is not None and at.gpu_type in elastic.speeds:
            here = speeds_where_it_is(
                at,
                elastic.speeds[at.gpu_type],
                math.inf,
                lambda size: math.ceil(size / per_node),
                lambda size, nodes, rate: self.speed_on(at.gpu_type, size, nodes, rate),
            )
            elastic = dataclasses.replace(elastic, speeds={**elastic.speeds, at.gpu_type: here})
            found = dataclasses.replace(found, elastic=elastic)
        return found


def _gang(job: ElasticJob, workload: ElasticWorkload, rules: OperatorRules) -> ClusterGang:
    """Gang of a job; to policies its speed is that at the least size, on the types that have it."""
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
    gang = dataclasses.replace(
        _Gang.of(one, {}, 0.0, live=True, arrived=job.arrival),
        restart_seconds=job.restart_seconds,
        pause_seconds=rules.pause_seconds,
        growth_seconds=rules.growth_seconds,
        ending=rules.end_seconds,
        spread=job.spread,
        per_node=workload.cluster.gpus_per_node,
    )

    def speed_at(at: Placement) -> float:
        return gang.speed_on(at.gpu_type, len(at.nodes), len(set(at.nodes)), one.speed(at))

    gang.speed_at = speed_at
    return gang


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
