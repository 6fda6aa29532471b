"""Rounds of elastic jobs: at each round's end jobs arrive, end and change configuration."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from ballast_policies.allocation.problem import Configuration
from ballast_policies.elastic.assignment import sizes_of
from ballast_policies.elastic.completion_time import ELASTIC_POLICIES, advanced, changed, seconds_left
from ballast_policies.elastic.job import ElasticCluster, ElasticJob, JobState
from ballast_policies.simulator.clock import OnProgress, SimulationError, SimulationProgress
from ballast_policies.simulator.elastic.workload_file import ElasticWorkload
from ballast_policies.simulator.result import HOUR, PERCENTILES


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ElasticJobResult:
    """One job; s. ``finish`` is infinite where the simulation was over before."""

    name: str
    arrival: float
    finish: float
    alone: float
    restarts: int
    gpu_seconds: float

    @property
    def completion_time(self) -> float:
        """From arrival to finish."""
        return self.finish - self.arrival


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ElasticResult:
    """Of a run.

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
    def _end(self) -> float:
        return min(self.until, max(job.finish for job in self.jobs))

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
        """From the first arrival to the last finish, s."""
        return max(job.finish for job in self.finished) - min(job.arrival for job in self.jobs)

    @property
    def restarts_per_job(self) -> float:
        """Changes of configuration and resumes, the first start not counted."""
        return sum(job.restarts for job in self.finished) / len(self.finished)

    @property
    def utilisation(self) -> float:
        """Part of all GPU time that jobs held GPUs, from 0 to the last finish or ``until``."""
        held = sum(job.gpu_seconds for job in self.jobs)
        return held / (self.gpus * self._end)

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

    Args:
        workload: jobs and cluster.
        policy: a name in :data:`~ballast_policies.elastic.completion_time.ELASTIC_POLICIES`.
        round_seconds: above 0.
        until: s; nothing is simulated from then on.
        progress: called after each stretch of rounds without a change.

    Raises:
        RegistryError: there is no such policy, or it cannot be loaded.
        SimulationError: the policy breaks its promise, or no job ends by ``until``.
    """
    decide = ELASTIC_POLICIES.find(policy).build(workload.cluster, round_seconds)
    waiting, states, done = list(reversed(workload.jobs)), list[JobState](), dict[str, ElasticJobResult]()
    gpu_seconds = {job.name: 0.0 for job in workload.jobs}
    now, decisions, changes = 0.0, 0, False
    while (waiting or states) and now < until:
        while waiting and waiting[-1].arrival <= now:
            job = waiting.pop()
            states.append(JobState(job=job, remaining=job.work))
            changes = True
        if states and (changes or decide.every_round):
            chosen = decide(states, now)
            _check(chosen, workload.cluster, now)
            states = [changed(state, to) for state, to in zip(states, chosen, strict=True)]
            decisions, changes = decisions + 1, False
        needs = [seconds_left(state) for state in states]
        nearest = min([now + min(needs, default=math.inf), *(job.arrival for job in waiting[-1:])])
        if math.isinf(nearest):
            raise SimulationError(
                f"at {now:g} s {policy} lets all of {len(states)} jobs wait, and none arrives"
            )
        rounds = 1.0 if decide.every_round and states else math.ceil((nearest - now) / round_seconds - 1e-9)
        length = max(1.0, rounds) * round_seconds
        left = []
        for state, need in zip(states, needs, strict=True):
            job = state.job
            if state.current is not None:
                gpu_seconds[job.name] += min(need, length, until - now) * state.current.total
            if need > length:
                left.append(advanced(state, length))
                continue
            done[job.name] = result_of(job, now + need, state.restarts, gpu_seconds[job.name])
            changes = True
        states, now = left, now + length
        if progress is not None:
            progress(
                SimulationProgress(
                    seconds=now,
                    done=len(done),
                    total=len(workload.jobs),
                    present=len(states),
                    waiting=sum(state.current is None for state in states),
                )
            )
    return ElasticResult(
        workload=workload.name,
        policy=policy,
        round_seconds=round_seconds,
        gpus=sum(workload.cluster.gpus.values()),
        decisions=decisions,
        jobs=tuple(
            done.get(job.name) or result_of(job, math.inf, 0, gpu_seconds[job.name]) for job in workload.jobs
        ),
        until=until,
    )


def result_of(job: ElasticJob, finish: float, restarts: int, gpu_seconds: float) -> ElasticJobResult:
    """The job as it ended; ``finish`` infinite: it has not."""
    return ElasticJobResult(
        name=job.name,
        arrival=job.arrival,
        finish=finish,
        alone=job.fastest_seconds(),
        restarts=restarts,
        gpu_seconds=gpu_seconds,
    )


def _check(chosen: Sequence[Configuration | None], cluster: ElasticCluster, now: float) -> None:
    sizes = sizes_of(chosen)
    for gpu_type, gpus in cluster.gpus.items():
        if sum(sizes.get(gpu_type, [])) > gpus:
            raise SimulationError(f"at {now:g} s {sum(sizes[gpu_type])} of {gpus} {gpu_type} are given out")
    if not cluster.fits(sizes):
        raise SimulationError(f"at {now:g} s {sizes} do not fit the nodes")
