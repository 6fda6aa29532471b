"""Prometheus metrics of one job, served by rank 0; the operator serves those of all jobs."""

import collections
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from ballast_trainer.errors import ConfigurationError

_GAUGES = {
    "loss": "Mean loss of the newest step.",
    "validation_loss": "Mean loss on the validation data, of the newest evaluation.",
    "imbalance": "Busiest rank over the mean of the ranks, less 1.",
    "bubble": "Idle fraction of the ranks' time.",
    "bubble_schedule": "The part of it that the schedule leaves idle with even stages.",
    "bubble_imbalance": "The part of it that uneven stages add.",
    "flops_per_second": "Operations per second and rank, of the configured model's matrix products.",
    "part_of_peak": "Part of what the GPUs' data sheets promise in the job's precision.",
    "peak_memory_bytes": "Most bytes that tensors have taken on any rank since the launch; absent on CPUs.",
    "goodput": "Part of the time since the launch in which steps ran.",
    "ranks": "Ranks that hold layers.",
    "most_layers": "Layers on the rank that holds most.",
    "emulated": "Slow-down that is emulated; absent on real devices.",
}
_STEP_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_PAUSES = ("checkpoint", "evaluation", "grow", "migrate", "rebalance", "repack")
"""Events of which the first, too, is an increase: they are there from the start."""
_PAUSE_SECONDS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


def _every_address() -> str:
    """The address for all of this machine: of IPv4 and, unless it is switched off, of IPv6."""
    try:
        with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True):
            return "::"
    except (OSError, ValueError):
        return "0.0.0.0"


class PrometheusWriter:
    """Serves ``/metrics`` on a port of all addresses, from ``registry``."""

    def __init__(self, port: int) -> None:
        self.registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self._step = Gauge("ballast_trainer_step", "Optimizer steps done.", registry=self.registry)
        self._seconds = Histogram(
            "ballast_trainer_step_seconds",
            "Seconds of a step.",
            buckets=_STEP_SECONDS,
            registry=self.registry,
        )
        self._events = Counter(
            "ballast_trainer_events", "What happened besides steps.", ["event"], registry=self.registry
        )
        self._metrics = Gauge(
            "ballast_trainer_validation_metric",
            "The model's own metrics on the validation data, of the newest evaluation.",
            ["name"],
            registry=self.registry,
        )
        self._layers = Gauge(
            "ballast_trainer_layers", "Layers that a rank holds.", ["rank"], registry=self.registry
        )
        self._ranks: set[str] = set()
        self._pauses = Histogram(
            "ballast_trainer_pause_seconds",
            "How long training paused.",
            ["event"],
            buckets=_PAUSE_SECONDS,
            registry=self.registry,
        )
        for event in _PAUSES:
            self._events.labels(event)
            self._pauses.labels(event)
        try:
            self._server, self._thread = start_http_server(port, _every_address(), registry=self.registry)
        except OSError as error:
            reason = f"{port}: {error}. To fix: another port; on one machine each job needs one of its own"
            raise ConfigurationError("metrics.port", reason) from error

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Set the gauges."""
        self._step.set(step)
        for name, value in values.items():
            if name == "step_seconds":
                self._seconds.observe(value)
            elif name in _GAUGES:
                self._gauge(name).set(value)

    def event(self, name: str, step: int, fields: Mapping[str, Any]) -> None:
        """Count the event, and the seconds of its pause; set the user's figures of an evaluation.

        An event of another partition sets the layers of each rank.
        """
        self._events.labels(name).inc()
        if name != "cutRefused" and "stages" in fields:
            self._set_layers(fields["stages"])
        for metric, value in fields.get("metrics", {}).items():
            if value is not None:
                self._metrics.labels(metric).set(value)
        if "pause_ms" in fields:
            self._pauses.labels(name).observe(fields["pause_ms"] / 1000)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _set_layers(self, stages: Sequence[Mapping[str, int]]) -> None:
        held: collections.Counter[str] = collections.Counter()
        for stage in stages:
            held[str(stage["rank"])] += stage["endLayer"] - stage["firstLayer"]
        # Ranks that are gone are dropped last: a scrape meanwhile misses none of those that stay.
        for rank, layers in held.items():
            self._layers.labels(rank).set(layers)
        for rank in self._ranks - held.keys():
            self._layers.remove(rank)
        self._ranks = set(held)

    def _gauge(self, name: str) -> Gauge:
        # Created with its first value: an unknown figure is absent, not 0.
        if name not in self._gauges:
            self._gauges[name] = Gauge(f"ballast_trainer_{name}", _GAUGES[name], registry=self.registry)
        return self._gauges[name]
