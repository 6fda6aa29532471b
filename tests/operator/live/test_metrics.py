"""What a real operator serves as metrics: what dashboards and alerts ask for, before anything goes wrong."""

import re
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.operator.chart.test_observability import ALERTS, DASHBOARDS, of_trainer
from tests.operator.live.conftest import Life, Stage, cluster_policy
from tests.operator.live.test_policies import ENDLESS, Policy, policy
from tests.support.prometheus import Prometheus, needs_prometheus
from tests.support.waiting import WAIT_SECONDS, eventually

__all__ = ["policy"]


def scraped(life: Life) -> str:
    """The text of ``/metrics``; empty before it is served, and while the operator is started again."""
    ports = re.findall(r"/metrics on port (\d+)\s", life.said)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{ports[-1]}/metrics", timeout=WAIT_SECONDS) as answer:
            return str(answer.read().decode())
    except (IndexError, OSError):
        return ""


def missing(text: str) -> list[str]:
    """Metrics without a series, and the team whose job has cost nothing yet."""
    families = text_string_to_metric_families(text)
    found = [] if 'ballast_team_cost{team="vision"}' in text else ["the team's cost"]
    return found + [family.name for family in families if not family.samples]


@pytest.mark.api
@pytest.mark.slow
@needs_prometheus
def test_every_panel_and_alert_has_series_before_anything_went_wrong(
    stage: Stage, policy: Policy, tmp_path: Path
) -> None:
    """Evaluated by Prometheus on what an operator with one job has served, with each label that is shown."""
    price = '{"pricePerGpuHour": 2.0, "time": "2026-01-01T00:00:00Z"}'
    body = {"metadata": {"name": "prices"}, "data": {"fast": price}}
    stage.core.create_namespaced_config_map(stage.namespace, body)
    fast, slow = cluster_policy()["spec"]["nodePools"]
    fast |= {"pricePerGpuHour": 2.5, "priceFeed": {"configMap": "prices"}}
    slow |= {"sharing": {"kind": "TimeSlicing", "jobsPerGpu": 2}}
    policy.patch(nodePools=[fast, slow], budgets={"vision": {"amount": 1000, "period": "Total"}})
    label = "nvidia.com/gpu.replicas"
    stage.core.patch_node("slow-0", {"metadata": {"labels": {label: "2"}}})
    try:
        with stage.operator() as life:
            stage.add_job("one", stages=2, script=ENDLESS, entity="vision")
            text = eventually(
                lambda: (text := scraped(life)) and not missing(text) and text,
                "all series",
                lambda: missing(scraped(life)),
            )
    finally:
        stage.core.patch_node("slow-0", {"metadata": {"labels": {label: None}}})
    trainer = generate_latest(of_trainer()).decode()
    texts = [(text, {"namespace": "ballast"}), (trainer, {"namespace": "team", "ballast_dev_job": "one"})]
    asked = {alert["alert"]: (alert["expr"], str(alert["annotations"])) for alert in ALERTS} | {
        f"{dashboard['title']}: {panel['title']}: {query['legendFormat']}": (
            query["expr"],
            query["legendFormat"],
        )
        for dashboard in DASHBOARDS
        for panel in dashboard["panels"]
        for query in panel["targets"]
    }
    with Prometheus(texts, tmp_path) as prometheus:
        lacks = {name: prometheus.lacks(*words) for name, words in asked.items()}
        assert {name: lack for name, lack in lacks.items() if lack} == {}
        assert prometheus.lacks("max by (pool) (ballast_gpus_missing)", "{{pool}}") == "any series"
        assert prometheus.lacks("max by (team) (ballast_gpus_capacity)", "{{team}}") == "team"
