"""Dashboards and alerts: they ask for metrics that the operator has, and each alert says what to do."""

import functools
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ballast_operator.metrics import Metrics
from ballast_operator.waits import WaitReason
from ballast_trainer.reporting.prometheus import _GAUGES, PrometheusWriter
from prometheus_client import CollectorRegistry

from scripts.generated_files import chart_readme, generated_files
from tests.support.ports import free_port
from tests.support.prometheus import needs_prometheus
from tests.support.waiting import WAIT_SECONDS

ROOT = Path(__file__).parents[3]
ALERTS = yaml.safe_load((ROOT / "charts/ballast/files/alerts.yaml").read_text())
FILES = sorted((ROOT / "charts/ballast/files/dashboards").iterdir())
DASHBOARDS: list[dict[str, Any]] = [json.loads(file.read_text()) for file in FILES]
EXPRESSIONS = [
    *(
        pytest.param(query["expr"], id=f"{dashboard['uid']}-{panel['title']}-{query['legendFormat']}")
        for dashboard in DASHBOARDS
        for panel in dashboard["panels"]
        for query in panel["targets"]
    ),
    *(pytest.param(alert["expr"], id=alert["alert"]) for alert in ALERTS),
]
SCRAPED_LABELS = {"namespace", "ballast_dev_job"}
"""Added by Prometheus when it scrapes: the job's by the chart's PodMonitor."""

SLOW = "ballast_reconcile_seconds_bucket"
FREE = {
    'ballast_gpus_capacity{pool="a",gpu_type="v100"}': "8x120",
    'ballast_gpus_allocated{pool="a",gpu_type="v100"}': "6x120",
}
WAITING = 'ballast_jobs{state="Waiting"}'
Series = dict[str, str]
"""Time series -> its values, one a minute, as promtool's unit tests have them."""


def of_release(namespace: str, free: int, *, waiting: int = 0) -> Series:
    """What a release with eight GPUs says, of which ``free`` are, in a pool that others have by name, too."""
    pool = f'namespace="{namespace}",pool="a",gpu_type="v100"'
    return {
        f"ballast_gpus_capacity{{{pool}}}": "8x120",
        f"ballast_gpus_allocated{{{pool}}}": f"{8 - free}x120",
        f'ballast_jobs{{namespace="{namespace}",state="Waiting"}}': f"{waiting}x120",
    }


CASES: dict[str, tuple[list[Series], list[Series]]] = {
    "BallastNoLeader": (
        [
            {'ballast_leader{pod="a"}': "0x120", 'ballast_leader{pod="b"}': "0x120"},
            # Two releases, each with the jobs of one namespace: the leader of one is none of the other's.
            {'ballast_leader{namespace="one"}': "0x120", 'ballast_leader{namespace="two"}': "1x120"},
            {},
        ],
        [
            {'ballast_leader{pod="a"}': "0x120", 'ballast_leader{pod="b"}': "1x120"},
            {'ballast_leader{pod="a"}': "1x60 0x3 1x60"},
        ],
    ),
    "BallastOperatorWaits": (
        [{'ballast_operator_waiting_seconds{reason="ApiServer"}': "301x120"}],
        [
            {'ballast_operator_waiting_seconds{reason="ApiServer"}': "300x120"},
            {'ballast_operator_waiting_seconds{reason="Leader"}': "9000x120"},
        ],
    ),
    "BallastWatchBehind": (
        [{'ballast_watch_lag_seconds{kind="Pod"}': "61x120"}],
        [{'ballast_watch_lag_seconds{kind="Pod"}': "60x60 300x3 60x60"}],
    ),
    "BallastSolverFallsBack": (
        [{'ballast_solve_fallbacks_total{reason="FallbackAfterTimeout"}': "0x30 4x90"}],
        [{'ballast_solve_fallbacks_total{reason="FallbackAfterTimeout"}': "0x30 2x90"}],
    ),
    "BallastReconcileErrors": (
        [{'ballast_reconcile_errors_total{reason="Bug"}': "0+7x120"}],
        [{'ballast_reconcile_errors_total{reason="Bug"}': "0+5x120"}],
    ),
    "BallastWritesRefused": (
        [{'ballast_writes_refused_total{kind="TrainingJob"}': "0x30 4x90"}],
        [
            {'ballast_writes_refused_total{kind="TrainingJob"}': "0x30 2x90"},
            {'ballast_writes_refused_total{kind="Pod"}': "0+1x120"},
        ],
    ),
    "BallastJobsFailing": ([{"ballast_jobs_failing": "1x120"}], [{"ballast_jobs_failing": "0x30 2x8 0x80"}]),
    "BallastTasksRestart": (
        [{'ballast_task_restarts_total{task="allocator"}': "0x30 4x90"}],
        [
            {
                'ballast_task_restarts_total{task="allocator"}': "0x30 2x90",
                'ballast_task_restarts_total{task="gauges"}': "0x30 2x90",
            }
        ],
    ),
    "BallastReconcileSlow": (
        [
            {
                f'{SLOW}{{le="3"}}': "0+98x120",
                f'{SLOW}{{le="10"}}': "0+100x120",
                f'{SLOW}{{le="+Inf"}}': "0+100x120",
            }
        ],
        [
            {
                f'{SLOW}{{le="1"}}': "0+50x120",
                f'{SLOW}{{le="3"}}': "0+100x120",
                f'{SLOW}{{le="+Inf"}}': "0+100x120",
            }
        ],
    ),
    "BallastGpusIdleWhileJobsWait": (
        [
            {**FREE, WAITING: "1x120"},
            {**of_release("one", 0), **of_release("two", 1, waiting=1)},
        ],
        [
            {**of_release("one", 1), **of_release("two", 0, waiting=1)},
            {**FREE, WAITING: "0x120"},
            {**FREE, WAITING: "1x55 0x60"},
            {**FREE, 'ballast_gpus_allocated{pool="a",gpu_type="v100"}': "8x120", WAITING: "1x120"},
        ],
    ),
    "BallastJobsRestart": (
        [{'ballast_restarts_total{cause="NodeLost"}': "0x30 11x90"}],
        [
            {'ballast_restarts_total{cause="NodeLost"}': "0x30 9x90"},
            {'ballast_restarts_total{cause="Preempted"}': "0+1x120"},
        ],
    ),
    "BallastWritesTooMuch": (
        [{"ballast_api_writes_per_job": "61x120"}],
        [{"ballast_api_writes_per_job": "60x60 90x12 60x60"}],
    ),
}
"""Alert -> what makes it fire, and what does not, within two hours."""


def of_trainer() -> CollectorRegistry:
    """What a trainer serves once everything has happened."""
    writer = PrometheusWriter(free_port())
    writer.close()
    writer.scalars(7, {"step_seconds": 0.5, **dict.fromkeys(_GAUGES, 1.0)})
    stages = [{"rank": 0, "firstLayer": 0, "endLayer": 5}, {"rank": 1, "firstLayer": 5, "endLayer": 8}]
    writer.event("rebalance", 7, {"pause_ms": 25.0, "stages": stages})
    writer.event("evaluation", 7, {"metrics": {"accuracy": 0.5}})
    return writer.registry


@functools.cache
def series() -> dict[str, set[str]]:
    """Name of each time series that the operator or a trainer exposes -> its labels."""
    found: dict[str, set[str]] = {}
    collectors = [*Metrics().registry._collector_to_names, *of_trainer()._collector_to_names]
    for collector in collectors:
        kind, name, labels = collector._type, collector._name, set(collector._labelnames)
        if kind == "counter":
            found[f"{name}_total"] = labels
        elif kind == "histogram":
            found |= {f"{name}_bucket": labels | {"le"}, f"{name}_sum": labels, f"{name}_count": labels}
        else:
            found[name] = labels
    return found


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_names_series_and_labels_that_exist(expression: str) -> None:
    """Those that the operator or a trainer exposes."""
    known = series()
    names = set(re.findall(r"\bballast_[a-z_]+", expression)) - SCRAPED_LABELS
    assert names
    assert names <= known.keys()
    labels = set().union(*(known[name] for name in names)) | SCRAPED_LABELS
    grouped = {
        part.strip() for group in re.findall(r"\bby \(([^)]*)\)", expression) for part in group.split(",")
    }
    matched = set(re.findall(r"[{,]\s*([a-z_]+)\s*(?:=~|!~|!=|=)", expression))
    assert grouped | matched <= labels
    assert expression.count("(") == expression.count(")")


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_has_severity_summary_and_runbook(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    assert alert["annotations"].keys() == {"summary", "description"}
    runbooks = (ROOT / "docs" / "runbooks.md").read_text()
    assert f"\n## {alert['alert']}\n" in runbooks


def test_every_runbook_has_its_alert() -> None:
    sections = re.findall(r"^## (\w+)$", (ROOT / "docs" / "runbooks.md").read_text(), re.MULTILINE)
    assert sections == [alert["alert"] for alert in ALERTS]


@pytest.mark.parametrize(
    ("alert", "reasons"),
    [
        ("BallastOperatorWaits", {*WaitReason}),
        ("BallastReconcileErrors", {"Conflict", "NotFound", "Unavailable", "Rejected", "Bug", "Report"}),
    ],
)
def test_a_runbook_has_every_reason(alert: str, reasons: set[str]) -> None:
    """Every value that the label ``reason`` of the alert's metric may have."""
    runbooks = (ROOT / "docs" / "runbooks.md").read_text()
    section = runbooks.partition(f"\n## {alert}\n")[2].partition("\n## ")[0]
    assert reasons <= set(re.findall(r"`(\w+)`", section))


def test_the_trainers_page_has_every_metric() -> None:
    page = (ROOT / "docs" / "trainer.md").read_text()
    assert [name for name in _GAUGES if f"`_{name}`" not in page] == []


def unit_test(alert: str, number: int, series: Series, fires: bool) -> dict[str, Any]:
    """One of promtool's."""
    expression = (
        f'count by (alertname) (count_over_time(ALERTS{{alertname="{alert}",alertstate="firing"}}[2h]))'
    )
    fired = {"labels": f'{{alertname="{alert}"}}', "value": 1}
    return {
        "name": f"{alert} {'fires' if fires else 'does not fire'} ({number})",
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {"expr": expression, "eval_time": "2h", "exp_samples": [fired] if fires else []}
        ],
    }


def panel_test(title: str, series: Series, shown: float) -> dict[str, Any]:
    """One of promtool's: the panel's value an hour after the first of ``series``."""
    (panel,) = (each for board in DASHBOARDS for each in board["panels"] if each["title"] == title)
    expression = panel["targets"][0]["expr"].replace("$namespace", ".*")
    return {
        "name": title,
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {"expr": f"sum({expression})", "eval_time": "1h", "exp_samples": [{"value": shown}]}
        ],
    }


PANELS = [
    ("What GPUs were held for", {'ballast_gpu_seconds{use="productive"}': "0+60x120"}, 1.0),
    # Jobs are deleted, and their time with them.
    ("What GPUs were held for", {'ballast_gpu_seconds{use="productive"}': "9000+60x56 0+60x60"}, 0.0),
]


@pytest.mark.slow
@needs_prometheus
def test_each_alert_fires_when_it_should_and_only_then(chart: Any, tmp_path: Path) -> None:
    """By promtool, on the rules that the chart installs; each case has series that the operator exposes.

    A panel has no value that cannot be.
    """
    from tests.operator.chart.test_chart import render

    assert CASES.keys() == {alert["alert"] for alert in ALERTS}
    known = series()
    for name in {name for fires, quiet in CASES.values() for case in (*fires, *quiet) for name in case}:
        assert set(re.findall(r"(\w+)=", name)) <= known[name.partition("{")[0]] | {"namespace", "pod"}
    rules = render(chart, {"metrics": {"prometheusRule": {"enabled": True}}})
    (spec,) = (item["spec"] for item in rules if item["kind"] == "PrometheusRule")
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(spec))
    tests = [
        unit_test(alert, number, case, cases is fires)
        for alert, (fires, quiet) in CASES.items()
        for cases in (fires, quiet)
        for number, case in enumerate(cases)
    ]
    tests += [panel_test(*panel) for panel in PANELS]
    tested = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(tested))
    for words in (("check", "rules", "rules.yaml"), ("test", "rules", "tests.yaml")):
        ran = subprocess.run(
            ["promtool", *words],
            check=False,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_dashboard_is_complete(file: Path) -> None:
    """A fixed uid, no hard-coded data source; every panel has title, text, unit and an expression."""
    text = file.read_text()
    dashboard = json.loads(text)
    assert file.name == f"{dashboard['uid']}.json"
    assert len(text) < 256 * 1024
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert set(re.findall(r"\$\{?([a-z]+)\}?", text)) <= variables
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids) > 0
    for panel in dashboard["panels"]:
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["title"] and panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["targets"]


async def test_a_dashboard_leads_to_its_screen_of_the_page() -> None:
    """The job's to that job; each address is one that the page has."""
    from tests.operator.page.test_page import looked_at, text_of
    from tests.operator.page.world import World, runs

    world = World()
    world.policy()
    world.job("team", "one", runs())
    screens = {}
    async with looked_at(world) as client:
        for dashboard in DASHBOARDS:
            (link,) = dashboard["links"]
            assert link["url"].startswith("${page}/")
            path = link["url"].removeprefix("${page}")
            path = path.replace("${namespace}", "team").replace("${job}", "one")
            screens[dashboard["uid"]] = await text_of(client, path)
    assert len(set(screens.values())) == len(screens)
    assert "<bdi>team/one</bdi></h1>" in screens["ballast-job"]
    assert 'href="/jobs/team/one"' in screens["ballast-operator"]


def test_every_metric_is_shown_or_alerted() -> None:
    """What is measured is looked at somewhere."""
    text = " ".join(str(param.values[0]) for param in EXPRESSIONS)
    unseen = [name for name in series() if name not in text and not name.endswith(("_sum", "_count"))]
    assert unseen == []


@pytest.mark.slow
def test_the_committed_generated_files_are_up_to_date() -> None:
    """What the code generates today. To fix: make generate."""
    stale = [
        name
        for name, text in generated_files().items()
        if not (ROOT / name).is_file() or (ROOT / name).read_text() != text
    ]
    assert stale == []


@pytest.mark.slow
def test_no_generated_file_is_left_over() -> None:
    """What the code makes no more is deleted."""
    folders = (
        "crds",
        "charts/ballast/files/crds",
        "charts/ballast/files/rbac",
    )
    present = {str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).iterdir()}
    assert present <= generated_files().keys()


def test_a_group_of_the_charts_values_has_its_comment_and_its_values_have_their_defaults() -> None:
    """In its README: a group's default is its values'; a flow mapping is one value."""
    page = chart_readme("# Why.\nouter:\n  # What.\n  inner: 3\n  flow: {a: 1}\nbare:\n  x: [1]\n")
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert rows == [
        "| `outer` |  | Why. |",
        "| `outer.inner` | `3` | What. |",
        '| `outer.flow` | `{"a": 1}` |  |',
        "| `bare.x` | `[1]` |  |",
    ]
