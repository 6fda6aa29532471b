"""The least that recorded jobs could have cost under any policy, proven by duality.

    minimise    sum_c usd_c x_c         over the time x_c of each job in each of its configurations
    subject to  sum_c speed_c x_c >= steps_m            for every job m that has done its steps
                sum_c x_c <= H                          for every job m
                sum_c gpus_cp x_c <= GPU seconds of p   for every pool p, as they were there within H

Whatever a policy decides, the time that it gives each job in each configuration is such an x, and it pays at
least these prices: they are the lowest of each pool within H. Starts, stops and arrivals are left out, which
makes it cheaper still. So the optimum is a lower bound, and so is every feasible point of the dual, whatever
the solver has answered (:func:`~ballast_policies.allocation.solvers.linear.certified`).
"""

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

import numpy as np

from ballast_policies.accounting import SECONDS_PER_HOUR
from ballast_policies.allocation.instance import instance
from ballast_policies.allocation.problem import Configuration, Job, Problem
from ballast_policies.allocation.solvers import linear
from ballast_policies.rounds.values import gpus_by
from ballast_policies.scheduling.state import ClusterJob
from ballast_policies.simulator.replay import Recording


def least_cost(recording: Recording, *, by: float | None = None) -> float:
    """USD below which no policy could have run the jobs that have done their steps; 0: nothing is known.

    ``by``: epoch seconds until which a policy has to be done; None: it has all the time, so that each job
    could wait for what is cheapest. Infinite is returned where none is done by then.
    """
    jobs = [job for job in recording.jobs if job.done]
    types = {pool.pool: pool.gpu_type for cluster in recording.clusters for pool in cluster.pools}
    prices, most, mean = _pools(recording, recording.until if by is None else by)
    found = [(job, ways) for job in jobs if (ways := tuple(_ways(job.one, most, types)))]
    usd_an_hour = [[_usd_an_hour(way, prices) for way in ways] for _, ways in found]
    alone = math.fsum(
        (job.one.job.steps_remaining or 0.0)
        * min(usd / SECONDS_PER_HOUR / way.throughput for usd, way in zip(costs, ways, strict=True))
        for (job, ways), costs in zip(found, usd_an_hour, strict=True)
    )
    if by is None or not found:
        return alone
    seconds = max(by - recording.since, 1.0)
    posed = instance(
        Problem(
            gpu_types=tuple(most),
            capacity=most,
            prices=prices,
            jobs=tuple(Job(name=job.one.name, configurations=ways) for job, ways in found),
        )
    )
    posed = dataclasses.replace(posed, capacity=np.array([mean[pool] for pool in most]))
    value = -posed.columns.spending(posed.prices()) * seconds / SECONDS_PER_HOUR
    base = np.array([(job.one.job.steps_remaining or 0.0) / seconds for job, _ in found])
    try:
        return max(alone, -linear.maximise(posed, value=value, base=base).bound)
    except linear.InfeasibleError:
        return math.inf


def _usd_an_hour(way: Configuration, prices: Mapping[str, float]) -> float:
    gpus = sum(prices[pool] * count for pool, count in way.gpus.items())
    return gpus + way.usd_per_step * way.throughput * SECONDS_PER_HOUR


def _pools(recording: Recording, by: float) -> tuple[dict[str, float], dict[str, int], dict[str, float]]:
    """Pool -> lowest price, most GPUs, and mean GPUs, until ``by``."""
    prices: dict[str, float] = {}
    most: Counter[str] = Counter()
    mean: defaultdict[str, float] = defaultdict(float)
    seconds, begins = max(by - recording.since, 1.0), recording.since
    ends = [cluster.at for cluster in recording.clusters[1:]] + [math.inf]
    for cluster, end in zip(recording.clusters, ends, strict=False):
        if begins > by:
            break
        there = gpus_by(cluster.nodes, lambda node: node.pool)
        for pool, price in cluster.capacity.pool_prices.items():
            prices[pool] = min(price, prices.get(pool, math.inf))
            most[pool] = max(most[pool], there[pool])
            mean[pool] += there[pool] * max(0.0, min(end, by) - begins) / seconds
        begins = max(begins, end)
    return prices, dict(most), mean


def _ways(one: ClusterJob, most: Mapping[str, int], types: Mapping[str, str]) -> Iterator[Configuration]:
    """The sizes that the job may have in each pool."""
    for pool, gpus in most.items():
        kind = types[pool]
        sizes = {one.job.gpus: one.job.throughput.get(kind, 0.0)}
        if one.elastic is not None:
            sizes = dict(one.elastic.speeds.get(kind, {}))
        for size, speed in sizes.items() if pool not in one.closed_pools else ():
            if size <= gpus and speed > 0:
                yield Configuration(
                    name=f"{size} of {pool}",
                    gpus={pool: size},
                    throughput=speed,
                    usd_per_step=one.usd_per_step.get(pool, 0.0),
                )
