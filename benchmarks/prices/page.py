"""docs/spot-figures.md: chapter 6 of the dissertation beside our figures from the same logs.

python benchmarks/prices/weeks.py > benchmarks/prices/weeks.json     # minutes
python benchmarks/prices/gavel_cost.py > benchmarks/prices/gavel_cost.json  # seconds
python benchmarks/prices/page.py                                     # the page, seconds
"""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from string import Template

import numpy as np
from ballast_policies.prices.hazard import Hazard
from ballast_policies.prices.logs.folder import excerpt
from ballast_policies.prices.market import Market
from ballast_policies.simulator.spot.engine import replay
from ballast_policies.simulator.spot.settings import SpotJob, SpotSettings
from ballast_policies.throughput.table import JobType, built_in_table

ROOT = Path(__file__).parents[2]
GAVEL_COST = Path(__file__).with_name("gavel_cost.json")
WEEKS = Path(__file__).with_name("weeks.json")
WORDS = Path(__file__).with_name("page.md")
PAGE = ROOT / "docs" / "spot-figures.md"
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


REGION = {"aws": "us-east-1", "gcp": "us-west1", "azure": "us_east"}


def table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = list(headings)
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def cost_normalised() -> str:
    speeds, rows = built_in_table(), []
    for model, (name, said) in MODELS.items():
        rate = {kind: speeds.alone(JobType(name=name), kind) for kind in GOOGLE}
        ours = [rate[kind] / rate["k80"] for kind in ("p100", "v100")]
        ours += [rate[kind] / rate["k80"] * GOOGLE["k80"] / GOOGLE[kind] for kind in ("p100", "v100")]
        rows.append([model, name, *(f"{a:.1f} / {b:.1f}" for a, b in zip(said, ours, strict=True))])
    return table(("model", "row", "P100", "V100", "P100 per dollar", "V100 per dollar"), rows)


def discounts(market: Market) -> str:
    rows = []
    for (cloud, kind), said in DISCOUNTS.items():
        found = [
            (market.on_demand[on_demand] / float(np.nanmin(series.usd)), offer.zone)
            for offer, series in market.spot.items()
            for on_demand in market.on_demand
            if (offer.cloud, offer.gpu_type, offer.gpus) == (cloud, kind, 1)
            and offer.region == REGION[cloud]
            and (on_demand.cloud, on_demand.instance) == (cloud, offer.instance)
            and not np.isnan(series.usd).all()
        ]
        best, zone = max(found)
        rows.append([cloud, kind, f"{said:.1f}", f"{best:.1f}", zone])
    return table(("cloud", "GPU", "dissertation", "ours", "where"), rows)


def lifetimes(market: Market) -> str:
    rows = []
    for pool, log in sorted(market.availability.items()):
        hazard = Hazard(preemptions=log.preemptions, hours=log.up_seconds / 3600.0)
        low, high = (1 / hazard.quantile_per_hour(p) for p in (0.95, 0.05))
        span = f"({low:.1f} to {high:.1f})" if log.preemptions else f"(over {low:.0f})"
        longest = max((span.end - span.start for span in log.spans), default=0.0) / 3600.0
        rows.append(
            [
                pool.cloud, pool.zone, f"{pool.gpus} x {pool.gpu_type}", f"{log.preemptions}",
                f"{hazard.hours:.0f}", f"{hazard.mean_hours_to_preemption:.1f} {span}",
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


def dynamic(market: Market) -> str:
    """Four V100-days (figure 6.5): the cheapest single choices, and moving as prices change."""
    quiet = dataclasses.replace(market, availability={})
    start, speeds, rows = 1582502400.0 + 3600.0, built_in_table(), []
    for model, (name, _) in MODELS.items():
        rate = {kind: speeds.alone(JobType(name=name), kind) for kind in GOOGLE}
        steps = 4 * 86400.0 * rate["v100"]
        speed = {kind: value for kind, value in rate.items() if value > 0}
        job = SpotJob(name=model, arrival=0.0, steps=steps, gpus=1, speeds=speed)
        aws = {o: s for o, s in quiet.spot.items() if (o.cloud, o.region, o.gpus) == ("aws", "us-east-1", 1)}
        both = {o: s for o, s in quiet.spot.items() if o.cloud != "gcp" and o.gpus == 1}
        fixed = {o: s.usd_between(start, start + steps / speed[o.gpu_type]) for o, s in both.items() if
                 o.gpu_type in speed and not np.isnan(s.at(np.array([start]))).any()
                 and not np.isnan(s.usd).any()}  # fmt: skip
        v100 = min(usd for o, usd in fixed.items() if o in aws and o.gpu_type == "v100")
        gpu = min(usd for o, usd in fixed.items() if o in aws)
        at_start = min(fixed, key=lambda o: float(both[o].at(np.array([start]))[0]) / speed[o.gpu_type])
        cloud = fixed[at_start]
        sold = dataclasses.replace(quiet, spot=both)
        (moved,) = replay(sold, [job], SpotSettings(policy="min-cost", start=start, oracle=False)).outcomes
        rows.append(
            [model, f"{v100:.2f}", f"{v100 / gpu:.2f}", f"{v100 / cloud:.2f}", f"{v100 / moved.usd:.2f}",
             f"{cloud / moved.usd:.2f}", f"{moved.moves}"]
        )  # fmt: skip
    return table(
        ("model", "1 x V100, USD", "GPU type", "multi-cloud", "dynamic", "dynamic over multi-cloud", "moves"),
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


def main() -> None:
    market = excerpt()
    words = Template(WORDS.read_text(encoding="utf-8"))
    page = words.substitute(
        cost_normalised=cost_normalised(),
        discounts=discounts(market),
        lifetimes=lifetimes(market),
        dynamic=dynamic(market),
        gavel_cost=gavel_cost(),
        weeks=weeks(),
    )
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
