"""The recipes of CONTRIBUTING.md, followed."""

import re
import types

import pytest
from ballast_operator.api.conditions import JobCondition, JobReason
from ballast_operator.metrics import Metrics
from ballast_operator.steps.context import with_condition
from ballast_policies.allocation.policies import max_min_fairness
from ballast_policies.allocation.policies.isolated import isolated_shares, on_own_columns
from ballast_policies.allocation.policy import Policy
from ballast_policies.allocation.problem import Job, Problem
from ballast_policies.allocation.registry import POLICIES, allocate
from ballast_policies.contract.job.dynamics import DynamicConfig
from ballast_policies.planning.dynamics import DYNAMICS, DynamicCase
from ballast_policies.planning.schedules.builders.synchronous import gpipe
from ballast_policies.planning.schedules.registry import SCHEDULES, ScheduleKind
from ballast_policies.planning.schedules.validate import validate
from prometheus_client import Counter, generate_latest

from tests.docs.blocks import ROOT
from tests.operator.views.builders import NOW, a_plan, a_spec, a_view

NAMES = {
    "Counter": Counter,
    "DynamicCase": DynamicCase,
    "JobCondition": JobCondition,
    "JobReason": JobReason,
    "Policy": Policy,
    "ScheduleKind": ScheduleKind,
    "gpipe": gpipe,
    "isolated_shares": isolated_shares,
    "max_min_fairness": max_min_fairness,
    "on_own_columns": on_own_columns,
    "with_condition": with_condition,
}
"""What the recipes' code uses, as the files have it that it is written into."""

RECIPES = dict(
    re.findall(
        r"^### (A .*?)\n(.*?)(?=^###? |\Z)", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE | re.DOTALL
    )
)


def code(title):
    """The Python of a recipe."""
    (block,) = re.findall(r"```python\n(.*?)```", RECIPES[title], re.DOTALL)
    return "\n".join(line.removeprefix("   ") for line in block.splitlines())


def row(title):
    names = {**NAMES}
    exec(code(title), names)
    return names["row"]


@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_is_short_and_names_files_that_exist(title):
    """Under ten lines beside the code; every path of the repository is there."""
    text = re.sub(r"```python.*?```", "", RECIPES[title], flags=re.DOTALL)
    assert len([line for line in text.splitlines() if line.strip()]) < 10
    paths = re.findall(r"`((?:policies|operator|trainer-image|tests|docs|examples)/[^`]*)`", text)
    assert paths
    assert [path for path in paths if "NAME" not in path and not (ROOT / path).exists()] == []


def test_files_that_decisions_name_exist():
    folders = "benchmarks|charts|client|docs|examples|lab|localcluster|operator|policies|tests|trainer-image"
    missing = [
        f"{page.name}: {path}"
        for page in sorted((ROOT / "docs/decisions").glob("*.md"))
        for path in re.findall(rf"`((?:{folders})/[\w./-]+)`", page.read_text())
        if not (ROOT / path).exists()
    ]
    assert missing == []


def test_a_policy_by_the_recipe_solves(monkeypatch):
    """After one row, `allocate` knows its name."""
    monkeypatch.setitem(POLICIES.builtin, "half", row("A policy"))
    jobs = tuple(Job(name=name, throughput={"v100": 2.0, "k80": 1.0}) for name in "ab")
    problem = Problem(gpu_types=("v100", "k80"), capacity={"v100": 1, "k80": 1}, jobs=jobs)
    found = allocate("half", problem)
    assert found.allocation["a"] == pytest.approx({"v100": 0.25, "k80": 0.25})


def test_a_schedule_by_the_recipe_is_valid(monkeypatch):
    """After one row, it can be found, built and validated."""
    monkeypatch.setitem(SCHEDULES.builtin, "Mine", row("A schedule"))
    validate(SCHEDULES["Mine"].build(4, 8, 1))


def test_a_dynamic_case_by_the_recipe_is_built(monkeypatch):
    """After one row, the trainer builds it for any model."""
    from ballast_trainer.dynamics.registry import build_dynamics

    monkeypatch.setitem(DYNAMICS.builtin, "mine", row("A dynamic case"))
    config = DynamicConfig(kind="mine", start_step=1, end_step=5, target=0.5)
    (built,) = build_dynamics([config], layer_count=4, family="any")
    assert type(built).__name__ == "Freezing"


def test_a_condition_by_the_recipe_is_in_the_status():
    """With the context's time."""
    view = a_view(pods=("p-0",), plan=a_plan(("p-0",)), spec=a_spec())
    names = {**NAMES, "context": types.SimpleNamespace(view=view, now=NOW), "status": view.status}
    exec(code("A condition"), names)
    assert names["status"].is_true(JobCondition.GROWN)


def test_a_metric_by_the_recipe_is_exposed():
    """On the registry that /metrics shows."""
    metrics = Metrics()
    exec(code("A metric"), {**NAMES, "self": metrics, "r": metrics.registry})
    metrics.evictions.labels("a").inc()
    assert b'ballast_evictions_total{pool="a"} 1.0' in generate_latest(metrics.registry)


def test_every_metric_is_documented():
    """docs/operator.md names each series of the operator."""
    page = (ROOT / "docs/operator.md").read_text()
    exposed = re.findall(r"^# TYPE (\S+)", generate_latest(Metrics().registry).decode(), re.MULTILINE)
    series = {name.removesuffix("_created") for name in exposed}
    assert [name for name in sorted(series) if f"`{name}" not in page] == []
