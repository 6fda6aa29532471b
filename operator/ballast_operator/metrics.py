"""The operator's Prometheus metrics. Labels are bounded: pools, states and causes, never job names."""

import functools
import time
from collections.abc import Mapping
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

Labels = TypeVar("Labels", bound=tuple[str, ...])


class Metrics:
    """A registry and its series; made once per operator, so that tests do not share counts.

    Who counts makes the series whose labels it knows when it starts: Prometheus sees no increase in a counter
    that first appears with its first event.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = functools.partial(Counter, registry=self.registry)
        gauge = functools.partial(Gauge, registry=self.registry)
        histogram = functools.partial(Histogram, registry=self.registry)
        self.jobs = gauge("ballast_jobs", "Training jobs by state.", ["state"])
        self.jobs_waiting = gauge("ballast_jobs_waiting", "Jobs that wait, by the reason why.", ["reason"])
        self.gpus_capacity = gauge("ballast_gpus_capacity", "GPUs usable for training.", ["pool", "gpu_type"])
        self.gpus_allocated = gauge("ballast_gpus_allocated", "GPUs held by gangs.", ["pool", "gpu_type"])
        self.gpus_shared = gauge("ballast_gpus_shared", "GPUs that two jobs share.", ["pool"])
        self.solve_seconds = histogram(
            "ballast_solve_seconds",
            "Time to solve an allocation.",
            ["policy"],
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
        )
        self.solve_fallbacks = counter(
            "ballast_solve_fallbacks", "Allocations made by the greedy fallback.", ["reason"]
        )
        self.grown_gpus = counter("ballast_grown_gpus", "GPUs that jobs took while they ran.")
        self.decision_seconds = histogram(
            "ballast_decision_seconds",
            "Time of one decision, by part: read, prepare, solve, conclude, all.",
            ["part"],
            buckets=(0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 30),
        )
        self.queue_due = gauge("ballast_queue_due", "Jobs that wait to be looked at now.")
        self.rounds = counter("ballast_rounds", "Rounds decided.")
        self.reconcile_seconds = histogram(
            "ballast_reconcile_seconds",
            "Time of one reconcile of a job.",
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10),
        )
        self.reconcile_errors = counter(
            "ballast_reconcile_errors", "Reconciles that did not finish.", ["reason"]
        )
        self.writes_refused = counter(
            "ballast_writes_refused",
            "Writes whose content the API server refused: the same write would never succeed.",
            ["kind"],
        )
        self.jobs_failing = gauge(
            "ballast_jobs_failing",
            "Jobs of which the last five passes or more ended with an error.",
        )
        self.task_restarts = counter(
            "ballast_task_restarts", "Background tasks started again after an error.", ["task"]
        )
        self.launches = counter("ballast_launches", "Gangs launched.", ["pool"])
        self.repacks = counter("ballast_repacks", "Pipelines that shrank while they ran.")
        self.released_gpus = counter("ballast_released_gpus", "GPUs that repacks set free.")
        self.restarts = counter("ballast_restarts", "Gangs that ended early, by cause.", ["cause"])
        self.api_writes = counter("ballast_api_writes", "Writes to the API server.", ["verb", "kind"])
        self.writes_per_job = gauge(
            "ballast_api_writes_per_job",
            "Writes in the last minute divided by jobs that are not finished.",
        )
        self.effective_throughput = gauge(
            "ballast_effective_throughput",
            "Sum over running jobs of steps per second / steps per second alone on the fastest GPU type.",
        )
        self.pool_cost = gauge(
            "ballast_pool_cost",
            "What the pool's GPUs have cost, held or idle, and data read there.",
            ["pool"],
        )
        self.pool_idle_cost = gauge(
            "ballast_pool_idle_cost", "The part of it in which no job held them.", ["pool"]
        )
        self.pool_price = gauge(
            "ballast_pool_price_per_gpu_hour", "Price of a GPU hour that counts now.", ["pool"]
        )
        self.price_age_seconds = gauge(
            "ballast_price_age_seconds", "Age of the last good price of a price feed.", ["pool"]
        )
        self.jobs_kept_off_spot = gauge(
            "ballast_jobs_kept_off_spot",
            "Jobs that spec.spot of the ClusterPolicy keeps off spot machines.",
        )
        self.team_cost = gauge(
            "ballast_team_cost", "What a team's jobs have cost, deleted ones included.", ["team"]
        )
        self.team_budget = gauge("ballast_team_budget", "What a team's jobs may cost.", ["team", "period"])
        self.team_budget_spent = gauge(
            "ballast_team_budget_spent",
            "What counts against it: the cost of this month, or of all time.",
            ["team", "period"],
        )
        self.wasted_cost = gauge(
            "ballast_wasted_cost",
            "Cost of idle GPUs, of start-ups and lost steps of the jobs that are not deleted, and of data "
            "that was read from other regions.",
            ["kind"],
        )
        self.gpu_seconds = gauge(
            "ballast_gpu_seconds",
            "GPU seconds of the jobs that are not deleted, by what they were for: productive, or what not.",
            ["use"],
        )
        self.goodput = gauge(
            "ballast_goodput", "The productive part of the GPU time of jobs, by pool.", ["pool"]
        )
        self.history_dropped = counter(
            "ballast_history_dropped", "Rows of history that could not be written in time."
        )
        self.history_failures = counter("ballast_history_failures", "Writes of history that failed.")
        self.leader = gauge("ballast_leader", "1 where this replica leads.")
        self.watch_age_seconds = gauge(
            "ballast_watch_lag_seconds",
            "How long a watch has been behind the API server.",
            ["kind"],
        )
        self.waiting_seconds = gauge(
            "ballast_operator_waiting_seconds",
            "How long the operator has waited, by what it waits for; 0: it does not.",
            ["reason"],
        )


def replace_series(gauge: Gauge, values: Mapping[Labels, float]) -> None:
    """Give a gauge these series alone, by their labels; a scrape meanwhile misses none of those that stay."""
    for labels, value in values.items():
        gauge.labels(*labels).set(value)
    stay: set[tuple[str, ...]] = set(values)
    for family in gauge.collect():
        for sample in family.samples:
            if (shown := tuple(sample.labels.values())) not in stay:
                gauge.remove(*shown)


class Stopwatch:
    """Times the parts of something into a histogram with the label ``part``, from when it is made."""

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._began = self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        """Book the seconds since the last lap."""
        now = time.perf_counter()
        self._histogram.labels(part).observe(now - self._last)
        self._last = now

    def total(self, part: str) -> float:
        """Book the seconds since the beginning, and return them."""
        seconds = self._last - self._began
        self._histogram.labels(part).observe(seconds)
        return seconds
