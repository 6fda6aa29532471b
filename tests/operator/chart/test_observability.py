"""Dashboards and alerts: they ask for metrics that the operator has, and each alert says what to do."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ballast_operator.generated import generated_files
from ballast_operator.generated.dashboards import DASHBOARDS, dashboard_files
from ballast_operator.metrics import Metrics

ROOT = Path(__file__).parents[3]
ALERTS = yaml.safe_load((ROOT / "charts/ballast/files/alerts.yaml").read_text())
EXPRESSIONS = [
    *(
        pytest.param(query.expression, id=f"{dashboard.uid}-{panel.title}-{query.legend}")
        for dashboard in DASHBOARDS
        for panel in dashboard.panels
        for query in panel.queries
    ),
    *(pytest.param(alert["expr"], id=alert["alert"]) for alert in ALERTS),
]
SCRAPED_LABELS = {"namespace"}
"""Added by Prometheus when it scrapes."""


def series() -> dict[str, set[str]]:
    """Name of each time series that the operator exposes -> its labels."""
    found: dict[str, set[str]] = {}
    for collector in Metrics().registry._collector_to_names:
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
    """Those that the operator exposes."""
    known = series()
    names = set(re.findall(r"\bballast_[a-z_]+", expression))
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
    """A section in the runbooks."""
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    assert alert["annotations"].keys() == {"summary", "description"}
    runbooks = (ROOT / "docs" / "runbooks.md").read_text()
    assert f"\n## {alert['alert']}\n" in runbooks


def test_every_runbook_has_its_alert() -> None:
    """No section outlives its alert."""
    sections = re.findall(r"^## (\w+)$", (ROOT / "docs" / "runbooks.md").read_text(), re.MULTILINE)
    assert sections == [alert["alert"] for alert in ALERTS]


@pytest.mark.parametrize(("name", "text"), dashboard_files().items(), ids=dashboard_files().keys())
def test_a_dashboard_is_complete(name: str, text: str) -> None:
    """A fixed uid, no hard-coded data source; every panel has title, text, unit and an expression."""
    dashboard = json.loads(text)
    assert name == f"{dashboard['uid']}.json"
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


def test_every_metric_is_shown_or_alerted() -> None:
    """What is measured is looked at somewhere."""
    text = " ".join(str(param.values[0]) for param in EXPRESSIONS)
    unseen = [name for name in series() if name not in text and not name.endswith(("_sum", "_count"))]
    assert unseen == []


@pytest.mark.slow
def test_the_committed_dashboards_and_alerts_are_up_to_date() -> None:
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
        "charts/ballast/files/dashboards",
    )
    present = {str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).iterdir()}
    assert present <= generated_files().keys()
