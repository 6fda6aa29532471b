"""lab/docs/spot-figures.md: chapter 6 of the dissertation beside our figures from the same logs.

python lab/benchmarks/prices/weeks.py > lab/benchmarks/prices/weeks.json     # minutes
python lab/benchmarks/prices/gavel_cost.py > lab/benchmarks/prices/gavel_cost.json  # seconds
python lab/benchmarks/prices/deadlines.py --data FOLDER > lab/benchmarks/prices/deadlines.json  # minutes
python lab/benchmarks/prices/page.py                                     # the page, seconds
"""

import dataclasses
import functools
import json
import math
from collections.abc import Iterable
from pathlib import Path
from string import Template

import numpy as np
from ballast_lab.prices.logs.folder import excerpt
from ballast_lab.prices.market import Market
from ballast_lab.spot.engine import replay
from ballast_lab.spot.settings import SpotJob, SpotSettings
from ballast_policies.prices.hazard import Hazard
from ballast_policies.throughput.gavel_file import built_in_table
from ballast_policies.throughput.table import JobType

ROOT = Path(__file__).parents[3]
GAVEL_COST = Path(__file__).with_name("gavel_cost.json")
WEEKS = Path(__file__).with_name("weeks.json")
DEADLINES = Path(__file__).with_name("deadlines.json")
WORDS = Path(__file__).with_name("page.md")
PAGE = ROOT / "lab" / "docs" / "spot-figures.md"
GOOGLE = {"k80": 0.45, "p100": 1.46, "v100": 2.48}
MODELS = {
    "Transformer": ("Transformer (batch size 256)", (3.3, 3.3, 1.0, 0.8)),
    "A3C": ("A3C", (1.2, 2.2, 0.4, 0.4)),
    "CycleGAN": ("CycleGAN", (4.5, 9.3, 1.4, 1.7)),
    "ResNet-18": ("ResNet-18 (batch size 128)", (4.0, 6.8, 1.2, 1.2)),
    "ResNet-50": ("ResNet-50 (batch size 128)", (3.7, 9.6, 1.1, 1.8)),
}
DISCOUNTS = {
    ("aws", "k80"): 2.7, ("aws", "v100"): 3.3,
    ("gcp", "k80"): 3.4, ("gcp", "p100"): 3.4, ("gcp", "v100"): 3.3,
    ("azure", "k80"): 7.3, ("azure", "p100"): 8.0, ("azure", "v100"): 5.1,
}  # fmt: skip


FIRST = 1582502400.0 + 3600.0
"""24 February 2020, 1:00 UTC: the first hour for which all logs have a price."""
DAYS = 20
REGION = {"aws": "us-east-1", "gcp": "us-west1", "azure": "us_east"}


def table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = list(headings)
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


@functools.cache
def market() -> Market:
    return excerpt()


def cost_normalised() -> str:
    speeds, rows = built_in_table(), []
    for model, (name, said) in MODELS.items():
        rate = {kind: speeds.alone(JobType(name=name), kind) for kind in GOOGLE}
        ours = [rate[kind] / rate["k80"] for kind in ("p100", "v100")]
        ours += [rate[kind] / rate["k80"] * GOOGLE["k80"] / GOOGLE[kind] for kind in ("p100", "v100")]
        rows.append([model, name, *(f"{a:.1f}/{b:.1f}" for a, b in zip(said, ours, strict=True))])
    return table(("model", "row", "P100", "V100", "P100 per dollar", "V100 per dollar"), rows)


def discounts() -> str:
    rows = []
    for (cloud, kind), said in DISCOUNTS.items():
        found = [
            (market().on_demand[on_demand] / float(np.nanmin(series.usd)), offer.zone)
            for offer, series in market().spot.items()
            for on_demand in market().on_demand
            if (offer.cloud, offer.gpu_type, offer.gpus) == (cloud, kind, 1)
            and offer.region == REGION[cloud]
            and (on_demand.cloud, on_demand.instance) == (cloud, offer.instance)
            and not np.isnan(series.usd).all()
        ]
        best, zone = max(found)
        rows.append([cloud, kind, f"{said:.1f}", f"{best:.1f}", zone])
    return table(("cloud", "GPU", "dissertation", "ours", "where"), rows)


def lifetimes() -> str:
    rows = []
    for pool, log in sorted(market().availability.items()):
        hazard = Hazard(preemptions=log.preemptions, hours=log.up_seconds / 3600.0)
        low, high = (hazard.quantile_per_hour(p) for p in (0.025, 0.975))
        span = f"({1 / high:.1f} to {1 / low:.1f})" if log.preemptions else f"(over {1 / high:.0f})"
        longest = max((span.end - span.start for span in log.spans), default=0.0) / 3600.0
        rows.append(
            [
                pool.cloud, pool.zone, f"{pool.gpus}x{pool.gpu_type}", f"{log.preemptions}",
                f"{hazard.hours:.0f}", f"{1.0 / hazard.per_hour:.1f} {span}",
                f"{longest:.1f}", f"{hazard.hours * 3600 / (log.end - log.start):.0%}",
            ]
        )  # fmt: skip
    headings = (
        "cloud",
        "zone",
        "machine",
        "preemptions",
        "hours seen",
        "mean hours to one, range",
        "longest, h",
        "there",
    )
    return table(headings, rows)


@dataclasses.dataclass(frozen=True)
class Moving:
    """Four V100-days of one model from one moment on, in USD; ``best``: with all prices known beforehand."""

    v100: float
    gpu: float
    cloud: float
    moved: float
    best: float
    moves: int


def moving(model: str, start: float) -> Moving:
    """Figure 6.5: the cheapest single choices, moving as prices change, and the least that it could cost."""
    speeds = built_in_table()
    rate = {kind: speeds.alone(JobType(name=MODELS[model][0]), kind) for kind in GOOGLE}
    steps = 4 * 86400.0 * rate["v100"]
    speed = {kind: value for kind, value in rate.items() if value > 0}
    job = SpotJob(name=model, arrival=0.0, steps=steps, gpus=1, speeds=speed)
    aws = {o for o in market().spot if (o.cloud, o.region, o.gpus) == ("aws", "us-east-1", 1)}
    both = {o: s for o, s in market().spot.items() if o.cloud != "gcp" and o.gpus == 1}
    fixed = {o: s.usd_between(start, start + steps / speed[o.gpu_type]) for o, s in both.items() if
             o.gpu_type in speed and not np.isnan(s.at(np.array([start]))).any()
             and not np.isnan(s.usd).any()}  # fmt: skip
    at_start = min(fixed, key=lambda o: float(both[o].at(np.array([start]))[0]) / speed[o.gpu_type])
    sold = dataclasses.replace(market(), spot=both, availability={})
    (found,) = replay(sold, [job], SpotSettings(policy="min-cost", start=start)).outcomes
    return Moving(
        v100=min(usd for o, usd in fixed.items() if o in aws and o.gpu_type == "v100"),
        gpu=min(usd for o, usd in fixed.items() if o in aws),
        cloud=fixed[at_start],
        moved=found.usd,
        best=found.oracle_usd,
        moves=found.moves,
    )


def dynamic() -> str:
    """The first week, as in the dissertation."""
    rows = []
    for model in MODELS:
        one = moving(model, FIRST)
        rows.append(
            [model, f"{one.v100:.2f}", f"{one.v100 / one.gpu:.2f}", f"{one.v100 / one.cloud:.2f}",
             f"{one.v100 / one.moved:.2f}", f"{one.cloud / one.moved:.2f}", f"{one.cloud / one.best:.2f}",
             f"{one.moves}"]
        )  # fmt: skip
    headings = ("model", "1 x V100, USD", "GPU type", "multi-cloud", "dynamic", "dynamic over multi-cloud")
    return table((*headings, "at best", "moves"), rows)


def dynamic_starts() -> str:
    """The same from other days on."""
    rows = []
    for model in MODELS:
        found = [moving(model, FIRST + 86400.0 * day) for day in range(DAYS)]
        gains, best = [one.cloud / one.moved for one in found], [one.cloud / one.best for one in found]
        over = math.fsum(one.moved for one in found) / math.fsum(one.best for one in found)
        rows.append(
            [model, f"{sum(gains) / DAYS:.2f}", f"{max(gains):.2f}", f"{sum(best) / DAYS:.2f}",
             f"{max(best):.2f}", f"{over:.3f}", f"{max(one.moves for one in found)}"]
        )  # fmt: skip
    return table(
        (
            f"{DAYS} starts",
            "mean gain",
            "most",
            "mean at best",
            "most at best",
            "cost over the best",
            "most moves",
        ),
        rows,
    )


def gavel_cost() -> str:
    rows = [["dissertation", "1.4", "about 35 %", "1.2", "0"]]
    rows += [
        [
            f"batch size {found['batch_size']}",
            f"{found['cheaper_without_slos']:.2f}",
            f"{found['min-cost']['missed']:.0%}",
            f"{found['cheaper_with_slos']:.2f}",
            f"{found['min-cost-slo']['missed']:.0%}",
        ]
        for found in json.loads(GAVEL_COST.read_text())
    ]
    headings = ("ResNet-50", "`min-cost`", "deadlines missed", "`min-cost-slo`", "deadlines missed")
    return table(headings, rows)


def weeks() -> str:
    if not WEEKS.exists():
        return "Not run for this page yet: the command prints cost over both bounds and the deadlines kept.\n"
    found = json.loads(WEEKS.read_text())
    rows = [
        ["cost over the lower bound with the future known", "at most 1.10", f"{found['over_oracle']:.3f}"],
        *(
            [f"of jobs with {kind} time until their deadline", "", f"{value:.3f}"]
            for kind, value in found.get("over_oracle_by_slack", {}).items()
            if value is not None
        ),
        ["cost over on demand only, worst week", "at most 1", f"{found['of_on_demand_worst_week']:.3f}"],
        ["cost over on demand only, worst job", "", f"{found['of_on_demand_worst_job']:.3f}"],
        [
            "feasible deadlines kept",
            "at least 99 %",
            f"{found['deadlines_met']:.2%} of {found['deadlines_feasible']}",
        ],
        ["steps done twice", "under 1 %", f"{found['steps_done_twice']:.3%}"],
        ["preemptions, moves a job", "", f"{found['preemptions_per_job']:.1f}, {found['moves_per_job']:.1f}"],
    ]
    return table((f"{found['weeks']} weeks, {found['jobs']} jobs", "aim", "ours"), rows)


def skynomad() -> str:
    found = json.loads(DEADLINES.read_text())["skynomad"]
    rows = [
        [
            each["cell"],
            f"{each['hours']:.1f}",
            f"{each['checkpoint_gb']:.0f}",
            f"{each['theirs']:.3f}",
            f"{each['ours']:.3f}" + (" (above)" if each["ours"] > each["theirs"] + 5e-4 else ""),
        ]
        for each in found
    ]
    means = [f"{math.fsum(each[kind] for each in found) / len(found):.3f}" for kind in ("theirs", "ours")]
    rows.append(["mean", "", "", *means])
    late = sum(each["late"] for each in found)
    return table(("cell", "hours of work", "checkpoint, GB", "SkyNomad", "ours"), rows) + (
        f"\n{late} deadlines were missed.\n"
    )


def cant_be_late() -> str:
    found = json.loads(DEADLINES.read_text())["cant_be_late"]
    kinds = ("uniform", "greedy", "ours")
    rows = [
        [
            each["series"],
            f"{each['deadline_hours']:.0f}",
            f"{each['startup_hours']:.2f}",
            *(f"{each[kind][0]:.3f}" for kind in kinds),
            str(each["ours"][1]),
        ]
        for each in found
    ]
    means = [f"{math.fsum(each[kind][0] for each in found) / len(found):.3f}" for kind in kinds]
    rows.append(["mean", "", "", *means, ""])
    headings = ("zone", "due after, h", "start-up, h", "uniform progress", "greedy", "ours", "late")
    return table(headings, rows)


def main() -> None:
    words = Template(WORDS.read_text(encoding="utf-8"))
    page = words.substitute(
        cost_normalised=cost_normalised(),
        discounts=discounts(),
        lifetimes=lifetimes(),
        dynamic=dynamic(),
        dynamic_starts=dynamic_starts(),
        gavel_cost=gavel_cost(),
        weeks=weeks(),
        skynomad=skynomad(),
        cant_be_late=cant_be_late(),
    )
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
