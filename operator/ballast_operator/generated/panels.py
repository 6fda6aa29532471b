"""Panels of Grafana dashboards, and the PromQL that they share.

Gauges are taken as the maximum over replicas (only the leader counts), counters as the sum.
"""

import dataclasses

HERE = '{namespace=~"$namespace"}'
"""Series of the operators that are looked at."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One PromQL expression and its legend."""

    expression: str
    legend: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel.

    Attributes:
        unit: Grafana's word for the unit (``short``, ``s``, ``percentunit``, ``bool``...).
        kind: ``timeseries`` or ``stat``.
        stacked: areas on top of each other.
    """

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: str = "timeseries"
    stacked: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """One dashboard; ``uid`` never changes, so that links and stars survive."""

    uid: str
    title: str
    panels: tuple[Panel, ...]


def one(expression: str, legend: str) -> tuple[Query, ...]:
    """A single query."""
    return (Query(expression=expression, legend=legend),)


def rate(counter: str, by: str) -> str:
    """The counter's increase a second, summed over replicas."""
    return f"sum by ({by}) (rate({counter}{HERE}[$__rate_interval]))"


def quantiles(histogram: str, by: str = "") -> tuple[Query, ...]:
    """The histogram's median and 99th percentile."""
    labels, legend = (f"le, {by}", f" {{{{{by}}}}}") if by else ("le", "")
    return tuple(
        Query(
            expression=f"histogram_quantile({q}, {rate(f'{histogram}_bucket', labels)})",
            legend=name + legend,
        )
        for q, name in ((0.5, "median"), (0.99, "99 %"))
    )
