"""lab/docs/spot-figures.md: chapter 6 of the dissertation beside our figures from the same logs.

python lab/benchmarks/prices/weeks.py > lab/benchmarks/prices/weeks.json     # minutes
python lab/benchmarks/prices/gavel_cost.py > lab/benchmarks/prices/gavel_cost.json  # seconds
python lab/benchmarks/prices/deadlines.py --data FOLDER > lab/benchmarks/prices/deadlines.json  # minutes
python lab/benchmarks/prices/page.py                                     # the page, seconds
"""

import dataclasses
import functools
import itertools
import json
import math
from pathlib import Path
from string import Template

import numpy as np
from ballast_lab.comparison import Comparison, Point, near, table
from ballast_lab.prices.history import PriceSeries
from ballast_lab.prices.logs.folder import excerpt
from ballast_lab.prices.market import Market
from ballast_lab.prices.offers import Offer
from ballast_lab.spot.engine import replay
from ballast_lab.spot.settings import SpotJob, SpotSettings
from ballast_policies.prices.hazard import Hazard
from ballast_policies.throughput.table import JobType, built_in_table

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
EGRESS_USD = 0.09
"""USD a GB from AWS in North America to the Internet, its list of 2020."""
TRANSFERS = (
    # What, GB, published percent of the compute cost.
    ("ResNet-50's data", 150, 9.13),
    ("ResNet-50", 0.098, 0.006),
    ("BERT-Base's data", 17, 0.98),
    ("BERT-Base", 0.408, 0.025),
)
REGION = {"aws": "us-east-1", "gcp": "us-west1", "azure": "us_east"}


@functools.cache
def market() -> Market:
    return excerpt()


def cost_normalised() -> Comparison:
    speeds, rows, points = built_in_table(), [], []
    columns = ("P100", "V100", "P100 per dollar", "V100 per dollar")
    for model, (name, said) in MODELS.items():
        rate = {kind: speeds.alone(JobType(name=name), kind) for kind in GOOGLE}
        ours = [rate[kind] / rate["k80"] for kind in ("p100", "v100")]
        ours += [rate[kind] / rate["k80"] * GOOGLE["k80"] / GOOGLE[kind] for kind in ("p100", "v100")]
        rows.append([model, name, *(f"{a:.1f}/{b:.1f}" for a, b in zip(said, ours, strict=True))])
        points += [
            near(f"{model}, {what}", *pair, 0.25) for what, *pair in zip(columns, said, ours, strict=True)
        ]
    return Comparison(tuple(points), table(("model", "row", *columns), rows))


def discounts() -> Comparison:
    rows, points = [], []
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
        points.append(near(f"{cloud} {kind}", said, best, 0.15))
        rows.append([cloud, kind, f"{said:.1f}", f"{best:.1f}", zone])
    return Comparison(tuple(points), table(("cloud", "GPU", "dissertation", "ours", "where"), rows))


def egress() -> Comparison:
    """Table 6.2: a transfer to the Internet over the least price of 160 V100-hours, in percent."""
    hours = 160 * min(
        float(np.nanmin(series.usd)) for offer, series in in_region("p3.2xlarge") if offer.gpus == 1
    )
    return Comparison(
        tuple(
            near(f"{model}, {size:g} GB", said, 100 * EGRESS_USD * size / hours, 0.15)
            for model, size, said in TRANSFERS
        )
    )


def in_region(instance: str) -> list[tuple[Offer, PriceSeries]]:
    """The spot prices of an AWS instance in the zones of us-east-1."""
    return [
        (offer, series)
        for offer, series in sorted(market().spot.items())
        if (offer.cloud, offer.region, offer.instance) == ("aws", "us-east-1", instance)
    ]


def price_changes() -> Comparison:
    """Figure 6.1: prices of AWS in us-east-1 over time."""
    hours = np.arange(FIRST, FIRST + DAYS * 86400.0, 3600.0)
    single = {offer.zone[-1]: series.at(hours) for offer, series in in_region("p2.xlarge")}
    moving_ones = [prices for prices in single.values() if np.ptp(prices) > 0]
    cheapest = np.argmin(np.vstack(list(single.values())), axis=0)
    related = [abs(np.corrcoef(a, b)[0, 1]) for a, b in itertools.combinations(moving_ones, 2)]
    still = max(float(np.ptp(series.at(hours))) for _, series in in_region("p3.16xlarge"))
    return Comparison(
        (
            Point("p3.16xlarge, USD between least and most", "none", still, low=0.0, high=0.0),
            near("p2.xlarge in us-east-1f, over on demand", 1.0, float(single["f"].min()) / 0.9, 1e-6),
            Point(
                "p2.xlarge, mean correlation of two zones",
                "not highly correlated",
                float(np.mean(related)),
                low=0.0,
                high=0.6,
            ),
            Point(
                "p2.xlarge, zones that are the cheapest at some time",
                "can change",
                len(set(cheapest)),
                low=2,
                high=len(single),
            ),
        )
    )


def across_clouds() -> Comparison:
    """Figure 6.3: the clouds that are the cheapest for some number of some GPUs, at the first hour."""
    least: dict[tuple[str, int], tuple[float, str]] = {}
    for offer, series in market().spot.items():
        usd = float(series.at(np.array([FIRST]))[0])
        if not math.isnan(usd):
            key = offer.gpu_type, offer.gpus
            least[key] = min(least.get(key, (math.inf, "")), (usd, offer.cloud))
    clouds = {cloud for _, cloud in least.values()}
    return Comparison(
        (
            Point(
                f"clouds that are the cheapest for some of {len(least)} sizes",
                "changes with the instance type",
                len(clouds),
                low=2,
                high=3,
            ),
        )
    )


def by_size() -> Comparison:
    """Figure 6.4: deviation over mean of hourly prices, mean over the zones, by GPUs of the instance."""
    hours = np.arange(FIRST, FIRST + DAYS * 86400.0, 3600.0)
    points = []
    for one, several in (
        ("p2.xlarge", ("p2.8xlarge", "p2.16xlarge")),
        ("p3.2xlarge", ("p3.8xlarge", "p3.16xlarge")),
    ):
        spread = {
            instance: float(
                np.mean(
                    [prices.std() / prices.mean() for _, s in in_region(instance) for prices in [s.at(hours)]]
                )
            )
            for instance in (one, *several)
        }
        points += [
            Point(
                f"variation of {instance} over {one}",
                "more stable",
                round(spread[instance] / spread[one], 9),
                low=0.0,
                high=0.9,
            )
            for instance in several
        ]
    return Comparison(tuple(points))


def lifetimes() -> Comparison:
    rows, hours = [], dict[str, list[float]]()
    for pool, log in sorted(market().availability.items()):
        hazard = Hazard(preemptions=log.preemptions, hours=log.up_seconds / 3600.0)
        low, high = (hazard.quantile_per_hour(p) for p in (0.025, 0.975))
        hours.setdefault(pool.cloud, []).append(1.0 / hazard.per_hour)
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
    points = (
        Point("aws: the shortest mean, h", "order of hours", min(hours["aws"]), low=1, high=24),
        Point("gcp: the longest mean, h", "at least daily", max(hours["gcp"]), low=0, high=24),
    )
    return Comparison(points, table(headings, rows))


@dataclasses.dataclass(frozen=True)
class Moving:
    """Some V100-days of one model from one moment on, in USD; ``best``: with all prices known beforehand."""

    v100: float
    gpu: float
    several: float
    cloud: float
    moved: float
    best: float
    moves: int


def moving(model: str, start: float, days: float = 4.0) -> Moving:
    """Figure 6.5: the cheapest single choices, moving as prices change, and the least that it could cost."""
    speeds = built_in_table()
    rate = {kind: speeds.alone(JobType(name=MODELS[model][0]), kind) for kind in GOOGLE}
    steps = days * 86400.0 * rate["v100"]
    speed = {kind: value for kind, value in rate.items() if value > 0}
    job = SpotJob(name=model, arrival=0.0, steps=steps, gpus=1, speeds=speed)
    aws = {o for o in market().spot if (o.cloud, o.region, o.gpus) == ("aws", "us-east-1", 1)}
    both = {o: s for o, s in market().spot.items() if o.cloud != "gcp" and o.gpus == 1}
    fixed = {o: s.usd_between(start, start + steps / speed[o.gpu_type]) for o, s in both.items() if
             o.gpu_type in speed and not np.isnan(s.at(np.array([start]))).any()
             and not np.isnan(s.usd).any()}  # fmt: skip
    larger = [
        each.usd_between(start, start + steps / speed[o.gpu_type]) / o.gpus
        for o, each in market().spot.items()
        if (o.cloud, o.region) == ("aws", "us-east-1")
        and o.gpu_type in speed
        and not np.isnan(each.usd).any()
    ]
    at_start = min(fixed, key=lambda o: float(both[o].at(np.array([start]))[0]) / speed[o.gpu_type])
    sold = dataclasses.replace(market(), spot=both, availability={})
    (found,) = replay(sold, [job], SpotSettings(policy="min-cost", start=start)).outcomes
    return Moving(
        v100=min(usd for o, usd in fixed.items() if o in aws and o.gpu_type == "v100"),
        gpu=min(usd for o, usd in fixed.items() if o in aws),
        several=min(larger),
        cloud=fixed[at_start],
        moved=found.usd,
        best=found.oracle_usd,
        moves=found.moves,
    )


def dynamic() -> Comparison:
    """The first week, as in the dissertation."""
    rows, found = [], {model: moving(model, FIRST) for model in MODELS}
    for model, one in found.items():
        rows.append(
            [model, f"{one.v100:.2f}", f"{one.v100 / one.gpu:.2f}",
             f"{one.v100 / one.several:.2f}", f"{one.v100 / one.cloud:.2f}", f"{one.v100 / one.moved:.2f}",
             f"{one.cloud / one.moved:.2f}", f"{one.cloud / one.best:.2f}", f"{one.moves}"]
        )  # fmt: skip
    headings = (
        "model",
        "1 x V100, USD",
        "GPU type",
        "multi-GPU",
        "multi-cloud",
        "dynamic",
        "dynamic over multi-cloud",
    )
    points = (
        near("the most in all", 3.5, max(one.v100 / one.moved for one in found.values()), 0.15),
        near("the most by moving", 1.4, max(one.cloud / one.moved for one in found.values()), 0.1),
        Point("switches", "fewer than 3", max(one.moves for one in found.values()), low=0, high=2),
    )
    return Comparison(points, table((*headings, "at best", "moves"), rows))


def durations() -> Comparison:
    """Figure 6.6: what moving saves, the most of the models, by V100-days of work from the first hour on."""
    gains, moves = {}, []
    for days in (0.5, 1.0, 2.0, 4.0, 8.0):
        found = [moving(model, FIRST, days) for model in MODELS]
        gains[days] = max(one.cloud / one.moved for one in found)
        moves.append(max(one.moves for one in found))
    short = max(gains[days] for days in (0.5, 1.0))
    return Comparison(
        (
            Point("up to a day", "small", short, low=0.99, high=1.1),
            near("the longest, 8 days", 1.4, gains[8.0], 0.1),
            Point("8 days over a day", "more", gains[8.0] / short, low=1.01, high=1.4),
            Point("switches", "fewer than 3", max(moves), low=0, high=2),
        )
    )


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
        f"\n\n{late} deadlines were missed."
    )


def elastic() -> str:
    found = json.loads(DEADLINES.read_text())["elastic"]
    sizes, rows = list(found[0]["usd"]), []
    for each in found:
        usd, whole = each["usd"], each["usd"][sizes[0]]
        over = {size: f"{usd[size] / each['bound_usd'][size]:.2f}" for size in sizes}
        rows.append(
            [
                f"{each['zones']}",
                f"{each['due_hours']:.1f}",
                f"{each['jobs']}",
                over[sizes[0]],
                *(f"{usd[size] / whole:.2f} ({over[size]})" for size in sizes[1:]),
                f"{sum(each['late'].values())}",
            ]
        )
    kinds = (f"{size} to 16" for size in sizes[1:])
    return table(("zones", "due after, h", "jobs", "16: over the bound", *kinds, "late"), rows)


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
        egress=egress(),
        price_changes=price_changes(),
        across_clouds=across_clouds(),
        by_size=by_size(),
        durations=durations(),
        discounts=discounts(),
        lifetimes=lifetimes(),
        dynamic=dynamic(),
        dynamic_starts=dynamic_starts(),
        gavel_cost=gavel_cost(),
        weeks=weeks(),
        skynomad=skynomad(),
        elastic=elastic(),
        cant_be_late=cant_be_late(),
    )
    PAGE.write_text(page.rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
