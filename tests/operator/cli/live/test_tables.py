"""`ballast top` and `ballast cost` in a terminal: names and figures are there at 40 columns, however long."""

import io

import pytest
from ballast_operator.cli.live.cost import CostTables, amount
from ballast_operator.cli.live.top import Tables
from ballast_operator.cli.text_table import averages_table
from ballast_operator.report.costs import Costs, JobCost, PoolCostLine, TeamCost
from ballast_operator.report.overview import JobLine, Overview, PoolLine
from rich.console import Console

LONG = "a-job-with-the-longest-name-that-is-allowed-48-c"
NAMESPACE = "a-namespace-with-the-longest-name-that-kubernetes-allows-63-char"[:63]
GPU_TYPE = "nvidia-a100-sxm4-80gb-with-a-label-of-sixty-three-characters-xx"
WHY = "waits for 64 GPUs of one pool: 12 of 1024 free, kept for another job with a long name " * 3


def job(**fields: object) -> JobLine:
    known: dict = {
        "namespace": NAMESPACE,
        "job": LONG,
        "state": "Succeeded",
        "gpu_type": GPU_TYPE,
        "gpus": 1024,
        "step": 1_000_000,
        "total_steps": 1_000_000,
        "steps_per_second": 1234.567,
        "loss": 12.3456,
        "imbalance": 1.5,
        "emulated": True,
        "restarts": 1000,
        "repacks": 2,
        "cost": 1234567.89,
        "why": WHY,
    }
    return JobLine(**{**known, **fields})


def test_without_a_cluster_policy_the_tables_say_why_nothing_runs():
    """The pools are empty then, and a table without rows tells nothing."""
    text = printed(Overview(policies=(), pools=(), jobs=()), 80)
    assert text.startswith("No job gets GPUs: there is no ClusterPolicy. To fix: create one")


def printed(seen: Overview | CostTables, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(Tables(seen) if isinstance(seen, Overview) else seen)
    return console.file.getvalue()


def cells(text: str) -> str:
    """The text without frames, spaces and line breaks: what was broken over lines is whole again."""
    rows = [[part.strip() for part in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]
    width = max(len(row) for row in rows)
    return "|".join("".join(row[column] for row in rows if len(row) > column) for column in range(width))


@pytest.mark.parametrize("width", [40, 63, 80, 100, 139, 140, 200])
def test_nothing_is_cut_off_however_long_the_names(width):
    """No line is longer than the terminal, no ellipsis, and each name and figure can be read."""
    pools = (PoolLine(pool="p" * 63, gpu_type=GPU_TYPE, nodes=5000, gpus=40_000, held=39_999),)
    text = printed(Overview(policies=("default: " + WHY,), pools=pools, jobs=(job(),)), width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text
    found = cells(text).replace(" ", "")
    for whole in (
        "p" * 63,
        GPU_TYPE,
        f"{NAMESPACE}/{LONG}",
        "39999 of 40000",
        "1000000 / 1000000",
        "1234.57*",
    ):
        assert whole.replace(" ", "") in found
    for whole in ("12.346", "150%", "1000", "1234567.89", "Succeeded"):
        assert whole.replace(" ", "") in found
    assert WHY.replace(" ", "") in found


def test_a_short_job_is_one_row_in_a_wide_terminal():
    """Scripts of the eye: state, place, progress and reason in one line."""
    line = job(namespace="team", job="one", gpu_type="v100", gpus=4, why="its share is 57 %")
    text = printed(Overview(policies=(), pools=(), jobs=(line,)), 180)
    (row,) = [row for row in text.splitlines() if "team/one" in row]
    assert "4 x v100" in row and "its share is 57 %" in row


@pytest.mark.parametrize("width", [80, 180])
def test_of_more_jobs_than_fit_those_that_hold_gpus_are_laid_out(width):
    """A terminal shows no others; the title says how many there are."""
    jobs = tuple(job(job=f"job-{number:04}", gpus=number // 4995, why="") for number in range(5000))
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(Tables(Overview(policies=(), pools=(), jobs=jobs), most=7))
    text = console.file.getvalue()
    assert "7 of 5000" in text
    shown = [number for number in range(5000) if f"job-{number:04}" in cells(text)]
    assert shown == [0, 1, *range(4995, 5000)]


def test_brackets_in_messages_are_text():
    """A message is never taken for the markup of the terminal library."""
    text = printed(
        Overview(policies=("p: spec.nodePools[0] [/red]",), pools=(), jobs=(job(why="see [bold]x[/nope]"),)),
        80,
    )
    assert "spec.nodePools[0] [/red]" in text
    assert "see [bold]x[/nope]" in text


def test_a_title_is_text_too():
    """A workload's name may be anything that its file says."""
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(averages_table("[/red] \x1b[2J", ()))
    assert "[/red] \N{REPLACEMENT CHARACTER}[2J" in console.file.getvalue()


def test_escape_sequences_in_messages_are_not_printed():
    """A trainer cannot clear the administrator's screen."""
    assert "\x1b" not in printed(Overview(policies=("p: \x1b[2J",), pools=(), jobs=(job(why="\x1b[2J"),)), 80)


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


@pytest.mark.parametrize("width", [40, 63, 80, 100, 139, 140, 200])
def test_no_cost_is_cut_off(width: int):
    """No line is longer than the terminal, no ellipsis, and each heading and amount can be read."""
    text = printed(CostTables(COSTS, None), width)
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
    text = printed(CostTables(COSTS, by), 80)
    assert [name for name in ("Jobs", "Teams", "Pools") if f"{name}" in text] == [f"{by.title()}s"]


def test_nothing_is_not_negative():
    """Sums of amounts leave remainders of rounding."""
    assert (amount(-1e-9), amount(-0.004), amount(-0.006), amount(None)) == ("0.00", "0.00", "-0.01", "-")
    assert "-0.00" not in printed(CostTables(COSTS, None), 80)
