"""The operator's Prometheus metrics. Labels are bounded: pools, states and causes, never job names."""

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Metrics:
    """One registry and its series; made once per operator, so that tests do not share counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.jobs = Gauge("ballast_jobs", "Training jobs by state.", ["state"], registry=r)
        self.jobs_waiting = Gauge(
            "ballast_jobs_waiting", "Jobs that wait, by the reason why.", ["reason"], registry=r
        )
        self.gpus_capacity = Gauge(
            "ballast_gpus_capacity", "GPUs usable for training.", ["pool", "gpu_type"], registry=r
        )
        self.gpus_allocated = Gauge(
            "ballast_gpus_allocated", "GPUs held by gangs.", ["pool", "gpu_type"], registry=r
        )
        self.gpus_shared = Gauge("ballast_gpus_shared", "GPUs that two jobs share.", ["pool"], registry=r)
        self.solve_seconds = Histogram(
            "ballast_solve_seconds",
            "Time to solve an allocation.",
            ["policy"],
            registry=r,
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
        )
        self.solve_fallbacks = Counter(
            "ballast_solve_fallbacks", "Allocations made by the greedy fallback.", ["reason"], registry=r
        )
        self.grown_gpus = Counter("ballast_grown_gpus", "GPUs that jobs took while they ran.", registry=r)
        self.decision_seconds = Histogram(
            "ballast_decision_seconds",
            "Time of one decision, by part: read, prepare, solve, conclude, all.",
            ["part"],
            registry=r,
            buckets=(0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 30),
        )
        self.queue_due = Gauge("ballast_queue_due", "Jobs that wait to be looked at now.", registry=r)
        self.rounds = Counter("ballast_rounds", "Rounds decided.", registry=r)
        self.reconcile_seconds = Histogram(
            "ballast_reconcile_seconds",
            "Time of one reconcile of a job.",
            registry=r,
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10),
        )
        self.reconcile_errors = Counter(
            "ballast_reconcile_errors", "Reconciles that did not finish.", ["reason"], registry=r
        )
        self.writes_refused = Counter(
            "ballast_writes_refused",
            "Writes whose content the API server refused: the same write would never succeed.",
            ["kind"],
            registry=r,
        )
        self.jobs_failing = Gauge(
            "ballast_jobs_failing",
            "Jobs of which the last five passes or more ended with an error.",
            registry=r,
        )
        self.task_restarts = Counter(
            "ballast_task_restarts", "Background tasks started again after an error.", ["task"], registry=r
        )
        self.launches = Counter("ballast_launches", "Gangs launched.", ["pool"], registry=r)
        self.repacks = Counter("ballast_repacks", "Pipelines that shrank while they ran.", registry=r)
        self.released_gpus = Counter("ballast_released_gpus", "GPUs that repacks set free.", registry=r)
        self.restarts = Counter(
            "ballast_restarts", "Gangs that ended early, by cause.", ["cause"], registry=r
        )
        self.api_writes = Counter(
            "ballast_api_writes", "Writes to the API server.", ["verb", "kind"], registry=r
        )
        self.writes_per_job = Gauge(
            "ballast_api_writes_per_job",
            "Writes in the last minute divided by jobs that are not finished.",
            registry=r,
        )
        self.effective_throughput = Gauge(
            "ballast_effective_throughput",
            "Sum over running jobs of steps per second / steps per second alone on the fastest GPU type.",
            registry=r,
        )
        self.pool_cost = Gauge(
            "ballast_pool_cost",
            "What the pool's GPUs have cost, held or idle, and data read there.",
            ["pool"],
            registry=r,
        )
        self.pool_idle_cost = Gauge(
            "ballast_pool_idle_cost", "The part of it in which no job held them.", ["pool"], registry=r
        )
        self.pool_price = Gauge(
            "ballast_pool_price_per_gpu_hour", "Price of a GPU hour that counts now.", ["pool"], registry=r
        )
        self.price_age_seconds = Gauge(
            "ballast_price_age_seconds", "Age of the last good price of a price feed.", ["pool"], registry=r
        )
        self.jobs_kept_off_spot = Gauge(
            "ballast_jobs_kept_off_spot",
            "Jobs that spec.spot of the ClusterPolicy keeps off spot machines.",
            registry=r,
        )
        self.team_cost = Gauge(
            "ballast_team_cost", "What a team's jobs have cost, deleted ones included.", ["team"], registry=r
        )
        self.team_budget = Gauge(
            "ballast_team_budget", "What a team's jobs may cost.", ["team", "period"], registry=r
        )
        self.wasted_cost = Gauge(
            "ballast_wasted_cost",
            "Cost of idle GPUs, of start-ups and lost steps of the jobs that are not deleted, and of data "
            "that was read from other regions.",
            ["kind"],
            registry=r,
        )
        self.gpu_seconds = Gauge(
            "ballast_gpu_seconds",
            "GPU seconds of the jobs that are not deleted, by what they were for: productive, or what not.",
            ["use"],
            registry=r,
        )
        self.goodput = Gauge(
            "ballast_goodput", "The productive part of the GPU time of jobs, by pool.", ["pool"], registry=r
        )
        self.history_dropped = Counter(
            "ballast_history_dropped", "Rows of history that could not be written in time.", registry=r
        )
        self.history_failures = Counter(
            "ballast_history_failures", "Writes of history that failed.", registry=r
        )
        self.leader = Gauge("ballast_leader", "1 where this replica leads.", registry=r)
        self.watch_age_seconds = Gauge(
            "ballast_watch_lag_seconds",
            "How long a watch has been behind the API server.",
            ["kind"],
            registry=r,
        )
        self.waiting_seconds = Gauge(
            "ballast_operator_waiting_seconds",
            "How long the operator has waited, by what it waits for; 0: it does not.",
            ["reason"],
            registry=r,
        )


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
