"""Gavel's published figures as settings of ours: which curves, where, and what was published there."""

import dataclasses
import json
from pathlib import Path

from ballast_lab.arrays.rules import ArraySettings
from ballast_lab.commands.simulate_arrays import RULES
from ballast_lab.gavel import job_table
from ballast_policies.simulator.settings import SimulatedCluster
from ballast_policies.simulator.workloads import Generated, Workload, read_trace
from ballast_policies.throughput.table import ThroughputTable, built_in_table

PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text())
SIMULATED = SimulatedCluster(gpus={"v100": 36, "p100": 36, "k80": 36})
PHYSICAL = SimulatedCluster(gpus={"v100": 8, "p100": 16, "k80": 24})
MEASURED = (4000, 5000)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """One published curve and the settings of ours that stand for it."""

    key: str
    label: str
    policy: str
    agnostic: bool = False
    space_sharing: bool = False


AGNOSTIC = "heterogeneity-agnostic"

LAS = (
    Curve(key="max_min_fairness", label=f"LAS, {AGNOSTIC}", policy="max-min-fairness", agnostic=True),
    Curve(key="gandiva", label="Gandiva", policy="gandiva", space_sharing=True),
    Curve(key="allox", label="AlloX", policy="allox"),
    Curve(key="max_min_fairness_perf", label="LAS, aware", policy="max-min-fairness"),
    Curve(
        key="max_min_fairness_packed",
        label="LAS, aware, space sharing",
        policy="max-min-fairness",
        space_sharing=True,
    ),
)
FTF = (
    Curve(
        key="finish_time_fairness",
        label=f"FTF, {AGNOSTIC}",
        policy="finish-time-fairness",
        agnostic=True,
    ),
    Curve(key="finish_time_fairness_perf", label="FTF, aware", policy="finish-time-fairness"),
)
FIFO = (
    Curve(key="fifo", label=f"FIFO, {AGNOSTIC}", policy="fifo", agnostic=True),
    Curve(key="fifo_perf", label="FIFO, aware", policy="fifo"),
    Curve(key="fifo_packed", label="FIFO, aware, space sharing", policy="fifo", space_sharing=True),
)
PRIORITIES = (
    Curve(key="LAS", label=f"LAS, {AGNOSTIC}", policy="max-min-fairness", agnostic=True),
    Curve(key="Gavel", label="LAS, aware", policy="max-min-fairness"),
)
MAKESPAN = (
    Curve(key="FIFO", label=f"FIFO, {AGNOSTIC}", policy="fifo", agnostic=True),
    Curve(key="Gandiva", label="Gandiva", policy="gandiva", space_sharing=True),
    Curve(key="Gavel", label="makespan, aware", policy="makespan"),
    Curve(key="Gavel w/ SS", label="makespan, space sharing", policy="makespan", space_sharing=True),
)
PHYSICAL_CURVES = (
    Curve(key="max_min_fairness_perf", label="LAS, aware", policy="max-min-fairness"),
    Curve(key="max_min_fairness", label=f"LAS, {AGNOSTIC}", policy="max-min-fairness", agnostic=True),
    Curve(key="min_total_duration_perf", label="makespan, aware", policy="makespan"),
    Curve(key="gandiva", label="Gandiva", policy="gandiva", space_sharing=True),
)
ISOLATED = Curve(key="isolated", label="isolated", policy="isolated", agnostic=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure or table: curves over rates (jobs/h), numbers of jobs, or traces.

    Attributes:
        title: what it shows.
        curves: its curves.
        source: key of the published values, the first level of ``published.json``.
        what: value compared.
        several_gpus: gangs in the workload.
        seeds: those of the published values.
    """

    title: str
    curves: tuple[Curve, ...]
    source: str
    what: str = "jct_hours"
    several_gpus: bool = False
    weights: bool = False
    seeds: tuple[int, ...] = (0,)


SINGLE, MULTIPLE = "continuous_single_avg_jct_hours", "continuous_multiple_avg_jct_hours"
FIGURES = {
    "physical": Figure(title="Physical-cluster traces", curves=PHYSICAL_CURVES, source="physical"),
    "5.9": Figure(title="LAS, jobs on one GPU", curves=LAS, source=SINGLE),
    "5.10": Figure(title="LAS, gangs of 1 to 8", curves=LAS, source=MULTIPLE, several_gpus=True),
    "5.11": Figure(
        title="Finish-time fairness, gangs of 1 to 8", curves=FTF, source=MULTIPLE, several_gpus=True
    ),
    "5.11-rho": Figure(
        title="Finish-time fairness (rho), gangs of 1 to 8",
        curves=FTF,
        source="continuous_multiple_avg_ftf",
        what="rho",
        several_gpus=True,
    ),
    "fifo-single": Figure(title="FIFO, jobs on one GPU", curves=FIFO, source=SINGLE),
    "fifo-multiple": Figure(title="FIFO, gangs of 1 to 8", curves=FIFO, source=MULTIPLE, several_gpus=True),
    "priorities": Figure(
        title="LAS with priorities, gangs of 1 to 8",
        curves=PRIORITIES,
        source="priorities_multiple_avg_jct_hours",
        what="jct_hours_by_weight",
        several_gpus=True,
        weights=True,
        seeds=(0, 1, 2),
    ),
    "makespan": Figure(
        title="Makespan, gangs of 1 to 8",
        curves=MAKESPAN,
        source="static_multiple_makespan_hours",
        what="makespan_hours",
        several_gpus=True,
        seeds=(0, 1, 2),
    ),
}
PHYSICAL_PUBLISHED = {
    "max_min_fairness_perf": ("max_min_fairness", "jct_hours", 3.98),
    "max_min_fairness": ("max_min_fairness", "jct_hours", 4.95),
    "min_total_duration_perf": ("minimize_makespan", "makespan_hours", 17.52),
    "gandiva": ("minimize_makespan", "makespan_hours", 20.93),
}
"""Gavel's own simulator on its own traces, rerun with HiGHS: trace, what, hours."""


def published(figure: str, curve: str, at: float, what: str = "") -> float | None:
    """The published value, where there is one; ``what``: ``high`` or ``low`` of the priorities."""
    source = PUBLISHED.get(FIGURES[figure].source, {})
    if figure == "physical":
        return PHYSICAL_PUBLISHED[curve][2]
    if figure == "priorities":
        return source[f"{curve} ({what})"].get(f"{at:.1f}")
    if figure == "makespan":
        return source[curve].get(f"{at:.1f}")
    return source.get(f"{at:.2f}", {}).get(curve)


def workload_of(
    figure: str, curve: Curve, at: float, seed: int
) -> tuple[Workload, SimulatedCluster, ThroughputTable]:
    """Workload, cluster and table of a point: ``at`` is a rate in jobs/h, or a number of jobs."""
    chosen, table = FIGURES[figure], built_in_table()
    if figure == "physical":
        trace = PHYSICAL_PUBLISHED[curve.key][0]
        return read_trace(Path(trace)), PHYSICAL, built_in_table("physical_cluster")
    if figure == "makespan":
        drawn = Generated(table=table, count=int(at), seed=seed, job_table=job_table.PUBLISHED)
        return drawn.workload(), SIMULATED, table
    jobs = Generated(
        table=table,
        jobs_per_hour=at,
        seed=seed,
        several_gpus=chosen.several_gpus,
        weights=chosen.weights,
        job_table=job_table.PUBLISHED,
    ).workload()
    return jobs, SIMULATED, table


def settings_of(
    figure: str, curve: Curve, seed: int, *, rules: str | None, measured: tuple[int, int]
) -> ArraySettings:
    """The settings for a point; ``rules`` None: those with which the values were published."""
    return ArraySettings(
        policy=curve.policy,
        agnostic=curve.agnostic,
        space_sharing=curve.space_sharing,
        rules=RULES[rules or ("gavel" if figure == "physical" else "published")],
        seed=seed,
        measure=None if figure in ("physical", "makespan") else measured,
    )
