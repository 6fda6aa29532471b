"""`ballast cost` in a terminal: every heading, name and amount is there at 80 columns."""

import io

import pytest
from ballast_operator.cli.live.cost import CostTables, amount
from ballast_operator.report.costs import Costs, JobCost, PoolCostLine, TeamCost
from rich.console import Console

from tests.operator.cli.live.test_overview_tables import GPU_TYPE, LONG, NAMESPACE, cells

MUCH = 1_234_567.89
JOB = JobCost(
    namespace=NAMESPACE,
    job=LONG,
    team="vision",
    state="Succeeded",
    gpu_hours=MUCH,
    cost=MUCH,
    projected=None,
    startup_cost=0.25,
    lost_steps=3,
    lost_cost=0.75,
    on_demand_cost=2 * MUCH,
    type_blind_cost=None,
    by_pool={},
    data_cost=0.5,
)
TEAM = TeamCost(team="t" * 63, jobs=1000, cost=MUCH, projected=MUCH, spent=MUCH, budget=MUCH)
POOL = PoolCostLine(
    pool="p" * 63,
    gpu_type=GPU_TYPE,
    gpus=40_000,
    price=99.99,
    since="2026-01-01T00:00:00Z",
    bill=MUCH,
    jobs=MUCH,
    deleted_jobs=MUCH,
    idle=-1e-9,
    data=0.5,
)
COSTS = Costs(at="2026-01-01T00:00:00+00:00", jobs=(JOB,), teams=(TEAM,), pools=(POOL,))


def printed(width: int, by: str | None = None) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(CostTables(COSTS, by))
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 100, 139, 140, 200])
def test_nothing_is_cut_off_however_long_the_names(width: int):
    """No line is longer than the terminal, no ellipsis, and each heading and amount can be read."""
    text = printed(width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    whole = cells(text)
    for part in (f"{NAMESPACE}/{LONG}", "Succeeded", "p" * 63, "t" * 63, f"({GPU_TYPE})"):
        assert part.replace(" ", "") in whole.replace(" ", "")
    for heading in (
        "at the end",
        "lost steps",
        "saved: on-demand",
        "any type",
        "with deleted",
        "deleted jobs",
    ):
        assert heading in text
    assert text.count("1,234,567.89") >= 9


@pytest.mark.parametrize("by", ["job", "team", "pool"])
def test_by_prints_one_table_alone(by: str):
    """As it is asked for."""
    text = printed(80, by)
    assert [name for name in ("Jobs", "Teams", "Pools") if f"{name}" in text] == [f"{by.title()}s"]


def test_nothing_is_not_negative():
    """Sums of amounts leave remainders of rounding."""
    assert (amount(-1e-9), amount(-0.004), amount(-0.006), amount(None)) == ("0.00", "0.00", "-0.01", "-")
    assert "-0.00" not in printed(80)
