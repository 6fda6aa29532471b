"""Least average completion time of jobs whose lengths are known: whole jobs, in one configuration each.

    maximise  sum_m  w_m v_m throughput(m, X)   over X in {0, 1}

v_m is what the progress of job m is worth to the total completion time, by its rank among the times left
(heSRPT; ``ballast_policies.elastic.completion_time`` says how, and how speeds of distinct jobs are compared):
short jobs come first, and long ones keep a part where jobs are elastic. Exact within the limits of
``elastic.assignment``; no bound is given on the completion times themselves.

Decisions depend on the problem alone. Rounds choose again by the same rule, with the sizes of elastic gangs,
what a restart costs, and who holds what (``rounds.by_completion_time``).
Objective: that sum, in jobs: of jobs that run as fast as they could alone each counts about v_m.
"""

import numpy as np

from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.policy import Answer
from ballast_policies.allocation.problem import Configuration
from ballast_policies.contract.limits import MOST_SECONDS
from ballast_policies.elastic.completion_time import BASE, CompletionTime, hesrpt_weights, unit_of_speed
from ballast_policies.elastic.job import LEAST_SECONDS, ElasticCluster, ElasticJob, JobState

SOLVER = "assignment"


def solve(instance: Instance) -> Answer:
    """Each job whole in one of its configurations, or waiting."""
    states = _states(instance)
    cluster = _cluster(instance)
    x = np.zeros(len(instance.columns))
    if states:
        chosen = CompletionTime(cluster=cluster, round_seconds=1.0).choice(states, BASE)
        x[[int(to.name) for to in chosen if to is not None]] = 1.0
    return Answer(x=x, solver=SOLVER, status="heuristic")


def objective(instance: Instance, x: np.ndarray) -> float:
    """Sum over the jobs of worth x speed."""
    states = _states(instance)
    cluster = _cluster(instance)
    units = [unit_of_speed(state.job, cluster) for state in states]
    worth = hesrpt_weights(
        [state.remaining / unit for state, unit in zip(states, units, strict=True)],
        [state.job.weight for state in states],
        BASE.exponent,
    )
    speed = instance.throughput(x)
    return float(
        sum(
            value / unit * speed[int(state.job.name)]
            for state, value, unit in zip(states, worth, units, strict=True)
        )
    )


def _cluster(instance: Instance) -> ElasticCluster:
    """GPUs by type; where they are has no influence."""
    gpus = np.floor(instance.capacity + 1e-9).astype(int).tolist()
    return ElasticCluster(
        nodes=dict(zip(instance.gpu_types, gpus, strict=True)),
        gpus_per_node=dict.fromkeys(instance.gpu_types, 1),
    )


def _states(instance: Instance) -> list[JobState]:
    """The jobs that can run and have something to do, named by row, with configurations named by column."""
    columns, steps = instance.columns, instance.steps()
    alone = columns.second < 0
    column, kind, gpus = columns.entries()
    by_column: dict[int, dict[str, int]] = {}
    for c, k, count in zip(column.tolist(), kind.tolist(), gpus.tolist(), strict=True):
        if alone[c] and columns.rate_first[c] > 0:
            by_column.setdefault(c, {})[instance.gpu_types[k]] = round(count)
    of_job: dict[int, list[Configuration]] = {}
    for c in sorted(by_column):
        of_job.setdefault(int(columns.first[c]), []).append(
            Configuration(name=str(c), gpus=by_column[c], throughput=float(columns.rate_first[c]))
        )
    states = []
    for m, configurations in of_job.items():
        if steps[m] <= 0:
            continue
        fastest = max(each.throughput for each in configurations)
        work = float(np.clip(steps[m], LEAST_SECONDS * fastest * 2, MOST_SECONDS * fastest / 2))
        job = ElasticJob(
            name=str(m),
            arrival=0.0,
            work=work,
            restart_seconds=0.0,
            configurations=tuple(configurations),
            weight=float(instance.weights[m]),
        )
        states.append(JobState(job=job, remaining=work))
    return states
