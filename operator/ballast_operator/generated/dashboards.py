"""Grafana dashboards over metrics of operator and trainers, as JSON that the chart puts into a ConfigMap."""

import dataclasses
import json
from typing import Any

HERE = '{namespace=~"$namespace"}'
"""Series of the operators that are looked at."""

OF_JOB = '{namespace=~"$namespace", ballast_dev_job="$job"}'
"""Series of the trainer of one job; the chart's PodMonitor adds the label of the job's name."""


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
    """One dashboard, ``of_job`` or of operators; ``uid`` never changes, so that links and stars survive."""

    uid: str
    title: str
    panels: tuple[Panel, ...]
    of_job: bool = False


def one(expression: str, legend: str) -> tuple[Query, ...]:
    """A single query."""
    return (Query(expression=expression, legend=legend),)


def rate(counter: str, by: str, of: str = HERE) -> str:
    """The counter's increase a second, summed over replicas."""
    return f"sum by ({by}) (rate({counter}{of}[$__rate_interval]))"


def quantiles(histogram: str, by: str = "", of: str = HERE) -> tuple[Query, ...]:
    """The histogram's median and 99th percentile."""
    labels, legend = (f"le, {by}", f" {{{{{by}}}}}") if by else ("le", "")
    return tuple(
        Query(
            expression=f"histogram_quantile({q}, {rate(f'{histogram}_bucket', labels, of)})",
            legend=name + legend,
        )
        for q, name in ((0.5, "median"), (0.99, "99 %"))
    )


_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 3
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}

COSTS = Dashboard(
    uid="ballast-costs",
    title="Ballast / Costs",
    panels=(
        Panel(
            title="Cost, by pool",
            description="What the pools' GPUs have cost, held or idle, in the currency of pricePerGpuHour.",
            unit="short",
            stacked=True,
            queries=one(f"max by (pool) (ballast_pool_cost{HERE})", "{{pool}}"),
        ),
        Panel(
            title="Cost, by team",
            description="What the teams' jobs have cost, deleted jobs included.",
            unit="short",
            stacked=True,
            queries=one(f"max by (team) (ballast_team_cost{HERE})", "{{team}}"),
        ),
        Panel(
            title="Budget used",
            description="Cost of all time / budget, of teams whose budget is for all time.",
            unit="percentunit",
            queries=one(
                f"max by (team) (ballast_team_cost{HERE})"
                ' / max by (team) (ballast_team_budget{namespace=~"$namespace", period="Total"})',
                "{{team}}",
            ),
        ),
        Panel(
            title="Waste",
            description="Idle GPUs; start-ups and lost steps of the jobs that are not deleted.",
            unit="short",
            stacked=True,
            queries=one(f"max by (kind) (ballast_wasted_cost{HERE})", "{{kind}}"),
        ),
        Panel(
            title="Goodput",
            description="The productive part of the GPU time of jobs that are not deleted, by pool.",
            unit="percentunit",
            queries=one(f"max by (pool) (ballast_goodput{HERE})", "{{pool}}"),
        ),
        Panel(
            title="What GPUs were held for",
            description="GPU seconds a second, of the jobs that are not deleted: productive, or what not.",
            unit="short",
            stacked=True,
            queries=one(f"max by (use) (deriv(ballast_gpu_seconds{HERE}[10m]))", "{{use}}"),
        ),
        Panel(
            title="Idle, by pool",
            description="Part of a pool's cost in which no job held its GPUs.",
            unit="percentunit",
            queries=one(
                f"max by (pool) (ballast_pool_idle_cost{HERE}) / max by (pool) (ballast_pool_cost{HERE})",
                "{{pool}}",
            ),
        ),
        Panel(
            title="Prices",
            description="Price of a GPU hour that counts.",
            unit="short",
            queries=one(f"max by (pool) (ballast_pool_price_per_gpu_hour{HERE})", "{{pool}}"),
        ),
        Panel(
            title="Age of prices",
            description="Since when the last good price of a price feed holds.",
            unit="s",
            queries=one(f"max by (pool) (ballast_price_age_seconds{HERE})", "{{pool}}"),
        ),
        Panel(
            title="Jobs kept off spot machines",
            description="By spec.spot of the ClusterPolicy.",
            unit="short",
            queries=one(f"max (ballast_jobs_kept_off_spot{HERE})", "jobs"),
        ),
    ),
)

GPUS = Dashboard(
    uid="ballast-gpus",
    title="Ballast / GPUs and jobs",
    panels=(
        Panel(
            title="GPUs in use",
            description="GPUs that gangs hold, of those usable for training.",
            unit="percentunit",
            kind="stat",
            queries=one(
                f"sum(max by (pool) (ballast_gpus_allocated{HERE}))"
                f" / sum(max by (pool) (ballast_gpus_capacity{HERE}))",
                "in use",
            ),
        ),
        Panel(
            title="Jobs waiting",
            description="Jobs that want GPUs and have none.",
            unit="short",
            kind="stat",
            queries=one('max(ballast_jobs{namespace=~"$namespace", state="Waiting"})', "waiting"),
        ),
        Panel(
            title="Effective throughput",
            description="Sum over running jobs of steps/s / the job's steps/s on the fastest GPU type.",
            unit="short",
            kind="stat",
            queries=one(f"max(ballast_effective_throughput{HERE})", "jobs' worth of the fastest type"),
        ),
        Panel(
            title="GPUs held, by pool",
            description="GPUs that gangs hold.",
            unit="short",
            stacked=True,
            queries=one(f"max by (pool, gpu_type) (ballast_gpus_allocated{HERE})", "{{pool}} ({{gpu_type}})"),
        ),
        Panel(
            title="GPUs with two jobs, by pool",
            description="GPUs that two jobs share, in pools with sharing; each counts once as held.",
            unit="short",
            queries=one(f"max by (pool) (ballast_gpus_shared{HERE})", "{{pool}}"),
        ),
        Panel(
            title="GPUs free, by pool",
            description="GPUs usable for training that no job holds.",
            unit="short",
            stacked=True,
            queries=one(
                f"max by (pool) (ballast_gpus_capacity{HERE}) - max by (pool) (ballast_gpus_allocated{HERE})",
                "{{pool}}",
            ),
        ),
        Panel(
            title="Jobs by state",
            description="Training jobs.",
            unit="short",
            stacked=True,
            queries=one(f"max by (state) (ballast_jobs{HERE})", "{{state}}"),
        ),
        Panel(
            title="Waiting jobs by reason",
            description="Jobs that hold no GPUs, by the reason of their condition Admitted.",
            unit="short",
            stacked=True,
            queries=one(f"max by (reason) (ballast_jobs_waiting{HERE})", "{{reason}}"),
        ),
        Panel(
            title="GPUs handed back and taken",
            description="By pipelines that shrank or grew while they trained, an hour.",
            unit="short",
            queries=(
                Query(
                    expression=f"sum(increase(ballast_released_gpus_total{HERE}[1h]))", legend="handed back"
                ),
                Query(expression=f"sum(increase(ballast_grown_gpus_total{HERE}[1h]))", legend="taken"),
                Query(expression=f"sum(increase(ballast_repacks_total{HERE}[1h]))", legend="repacks an hour"),
            ),
        ),
        Panel(
            title="Launches",
            description="Gangs launched an hour, by pool.",
            unit="short",
            queries=one(f"sum by (pool) (increase(ballast_launches_total{HERE}[1h]))", "{{pool}}"),
        ),
        Panel(
            title="Gangs that ended early",
            description="An hour, by cause. UserError and Hung count toward a job's backoffLimit.",
            unit="short",
            queries=one(f"sum by (cause) (increase(ballast_restarts_total{HERE}[1h]))", "{{cause}}"),
        ),
    ),
)

ALLOCATOR = Dashboard(
    uid="ballast-allocator",
    title="Ballast / Allocator",
    panels=(
        Panel(
            title="Time to solve",
            description="Time to solve an allocation, by policy.",
            unit="s",
            queries=quantiles("ballast_solve_seconds", "policy"),
        ),
        Panel(
            title="Time of a decision",
            description="Time of one decision, by part: read, prepare, solve, conclude, all.",
            unit="s",
            queries=quantiles("ballast_decision_seconds", "part"),
        ),
        Panel(
            title="Solves by the fallback",
            description="An hour, by reason: the greedy fallback decided, not the policy.",
            unit="short",
            queries=one(f"sum by (reason) (increase(ballast_solve_fallbacks_total{HERE}[1h]))", "{{reason}}"),
        ),
        Panel(
            title="Rounds",
            description="Rounds decided an hour.",
            unit="short",
            queries=one(f"sum(increase(ballast_rounds_total{HERE}[1h]))", "rounds"),
        ),
    ),
)

OPERATOR = Dashboard(
    uid="ballast-operator",
    title="Ballast / Operator",
    panels=(
        Panel(
            title="Leaders",
            description="Replicas that lead: 1, or 0 for seconds while leadership changes hands.",
            unit="short",
            kind="stat",
            queries=one(f"sum(ballast_leader{HERE})", "leaders"),
        ),
        Panel(
            title="Waiting",
            description="How long the operator has waited, by what it waits for; Leader: a standby replica.",
            unit="s",
            queries=one(f"max by (reason) (ballast_operator_waiting_seconds{HERE})", "{{reason}}"),
        ),
        Panel(
            title="Watches behind",
            description="How long the watch of a kind has been behind the API server.",
            unit="s",
            queries=one(f"max by (kind) (ballast_watch_lag_seconds{HERE})", "{{kind}}"),
        ),
        Panel(
            title="Writes a minute and job",
            description="Writes to the API server in the last minute / jobs that are not finished.",
            unit="short",
            queries=one(f"max(ballast_api_writes_per_job{HERE})", "writes"),
        ),
        Panel(
            title="Jobs due",
            description="Jobs that wait to be looked at now; above 0 for long: the operator is behind.",
            unit="short",
            queries=one(f"max(ballast_queue_due{HERE})", "jobs"),
        ),
        Panel(
            title="Time of a reconcile",
            description="Time of one reconcile of a job.",
            unit="s",
            queries=quantiles("ballast_reconcile_seconds"),
        ),
        Panel(
            title="Reconciles that did not finish",
            description="A second, by reason. Conflicts are ordinary; the next pass resolves them.",
            unit="short",
            queries=one(rate("ballast_reconcile_errors_total", "reason"), "{{reason}}"),
        ),
        Panel(
            title="Writes to the API server",
            description="A second, by verb and kind.",
            unit="short",
            stacked=True,
            queries=one(rate("ballast_api_writes_total", "verb, kind"), "{{verb}} {{kind}}"),
        ),
        Panel(
            title="History not written",
            description="Writes of history that failed, and rows that were dropped, a second.",
            unit="short",
            queries=(
                *one(f"sum(rate(ballast_history_failures_total{HERE}[$__rate_interval]))", "failed"),
                *one(f"sum(rate(ballast_history_dropped_total{HERE}[$__rate_interval]))", "dropped"),
            ),
        ),
    ),
)


def figure(name: str, legend: str) -> Query:
    """A gauge of a job's trainer; after a restart another pod has it."""
    return Query(expression=f"max(ballast_trainer_{name}{OF_JOB})", legend=legend)


JOB = Dashboard(
    uid="ballast-job",
    title="Ballast / Job",
    of_job=True,
    panels=(
        Panel(
            title="Loss",
            description="Of the newest step, and on the validation data.",
            unit="short",
            queries=(figure("loss", "training"), figure("validation_loss", "validation")),
        ),
        Panel(
            title="The model's own metrics",
            description="On the validation data.",
            unit="short",
            queries=one(f"max by (name) (ballast_trainer_validation_metric{OF_JOB})", "{{name}}"),
        ),
        Panel(
            title="Step",
            description="Optimizer steps done.",
            unit="short",
            kind="stat",
            queries=(figure("step", "step"),),
        ),
        Panel(
            title="Speed",
            description="Steps a second, pauses included.",
            unit="short",
            queries=one(
                f"sum(rate(ballast_trainer_step_seconds_count{OF_JOB}[$__rate_interval]))", "steps/s"
            ),
        ),
        Panel(
            title="Time of a step",
            description="Without pauses.",
            unit="s",
            queries=quantiles("ballast_trainer_step_seconds", of=OF_JOB),
        ),
        Panel(
            title="Operations a second",
            description="Of the configured model's matrix products, of each rank.",
            unit="short",
            queries=(figure("flops_per_second", "of a rank"),),
        ),
        Panel(
            title="Bubble",
            description="Idle part of the ranks' time, and what the schedule and uneven stages add to it.",
            unit="percentunit",
            queries=(
                figure("bubble", "all"),
                figure("bubble_schedule", "schedule"),
                figure("bubble_imbalance", "uneven stages"),
            ),
        ),
        Panel(
            title="Imbalance",
            description="Busiest rank / the mean of the ranks, less 1.",
            unit="percentunit",
            queries=(figure("imbalance", "imbalance"),),
        ),
        Panel(
            title="Layers by rank",
            description="They move when the pipeline is rebalanced, shrinks or grows.",
            unit="short",
            stacked=True,
            queries=one(f"max by (rank) (ballast_trainer_layers{OF_JOB})", "rank {{rank}}"),
        ),
        Panel(
            title="Ranks",
            description="Ranks that hold layers, and the layers on the rank that holds most.",
            unit="short",
            queries=(figure("ranks", "ranks"), figure("most_layers", "most layers")),
        ),
        Panel(
            title="Goodput and part of peak",
            description="Part of the time since the launch in which steps ran; part of the GPUs' peak.",
            unit="percentunit",
            queries=(figure("goodput", "goodput"), figure("part_of_peak", "part of peak")),
        ),
        Panel(
            title="Pauses",
            description="How long training paused, by what for.",
            unit="s",
            queries=quantiles("ballast_trainer_pause_seconds", "event", OF_JOB),
        ),
        Panel(
            title="Emulated slow-down",
            description="Without data on real devices.",
            unit="short",
            queries=(figure("emulated", "times"),),
        ),
        Panel(
            title="Events",
            description="An hour: checkpoints, rebalances, repacks...",
            unit="short",
            queries=one(f"sum by (event) (increase(ballast_trainer_events_total{OF_JOB}[1h]))", "{{event}}"),
        ),
    ),
)

DASHBOARDS = (GPUS, COSTS, ALLOCATOR, OPERATOR, JOB)


def dashboard_files() -> dict[str, str]:
    """File name -> JSON."""
    return {f"{d.uid}.json": json.dumps(_dashboard(d), indent=1) + "\n" for d in DASHBOARDS}


def _dashboard(dashboard: Dashboard) -> dict[str, Any]:
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["ballast"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [_DATASOURCE, *(_JOB_VARIABLES if dashboard.of_job else (_NAMESPACE,))]},
        "panels": [_panel(panel, index) for index, panel in enumerate(dashboard.panels)],
    }


_DATASOURCE = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
_NAMESPACE = {
    "name": "namespace",
    "label": "Operator's namespace",
    "type": "query",
    "datasource": _SOURCE,
    "query": "label_values(ballast_leader, namespace)",
    "refresh": 2,
    "includeAll": True,
    "allValue": ".*",
    "current": {"text": "All", "value": "$__all"},
}
_JOB_VARIABLES = (
    _NAMESPACE | {"label": "Job's namespace", "query": "label_values(ballast_trainer_step, namespace)"},
    {
        "name": "job",
        "label": "Job",
        "type": "query",
        "datasource": _SOURCE,
        "query": 'label_values(ballast_trainer_step{namespace=~"$namespace"}, ballast_dev_job)',
        "refresh": 2,
    },
)


def _panel(panel: Panel, index: int) -> dict[str, Any]:
    row, column = divmod(index, _COLUMNS)
    custom = {"fillOpacity": 30, "stacking": {"mode": "normal"}} if panel.stacked else {}
    return {
        "id": index + 1,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": _SOURCE,
                "expr": query.expression,
                "legendFormat": query.legend,
            }
            for number, query in enumerate(panel.queries)
        ],
    }
