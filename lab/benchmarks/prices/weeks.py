"""A hundred weeks in the clouds of 2020, against on-demand machines and against knowing the future.

    python lab/benchmarks/prices/weeks.py [--weeks 100] [--prices FOLDER]

Each week begins at another moment of the logs and has twenty jobs of Gavel's 26 types, with its durations and
deadlines, arriving over three days.  Without ``--prices`` the logs are those that come with Ballast.
"""

import argparse
import json
import math
import random
from pathlib import Path
from typing import Any

from ballast_lab.prices.logs.folder import excerpt, read_market
from ballast_lab.prices.market import Market
from ballast_lab.spot.engine import replay
from ballast_lab.spot.jobs import spot_job
from ballast_lab.spot.result import JobOutcome, SpotResult
from ballast_lab.spot.settings import SpotJob, SpotSettings
from ballast_policies.simulator.workloads import Generated
from ballast_policies.throughput.table import built_in_table

JOBS = 20
JOBS_PER_HOUR = 20 / 72


def week(market: Market, seed: int, *, policy: str = "min-cost-slo") -> SpotResult:
    """One of the weeks."""
    table = built_in_table()
    drawn = Generated(table=table, jobs_per_hour=JOBS_PER_HOUR, seed=seed, deadlines=True)
    workload = drawn.workload()
    types = {offer.gpu_type for offer in market.spot}
    jobs: list[SpotJob] = []
    for number, job in enumerate(workload.jobs):
        if number >= JOBS:
            break
        jobs.append(spot_job(job, f"job-{number}", table, types))
    draws = random.Random(seed)
    start = market.start + draws.random() * max(0.0, market.end - market.start - 7 * 86400.0)
    return replay(market, jobs, SpotSettings(policy=policy, start=start, seed=seed))


SLACK = ("tight", "some", "much")
"""Deadlines of at most 1.5 times the time alone on the fastest GPUs, of at most 5 times, and later ones."""


def slack(job: SpotJob) -> str:
    """Class of :data:`SLACK` that the job has."""
    alone = job.steps / max(job.speeds.values())
    times = (job.deadline_seconds or math.inf) / alone
    return SLACK[0 if times <= 1.5 else 1 if times <= 5 else 2]


def over_oracle(outcomes: list[JobOutcome]) -> float | None:
    """Cost of these jobs over the bound; None: there are none."""
    bound = math.fsum(each.oracle_usd for each in outcomes)
    return math.fsum(each.usd for each in outcomes) / bound if bound > 0 else None


def summary(results: list[SpotResult]) -> dict[str, Any]:
    """The figures of all weeks."""
    jobs = [each for result in results for each in result.outcomes]
    feasible = [each for each in jobs if each.in_time is not None and each.on_demand.feasible]
    return {
        "weeks": len(results),
        "jobs": len(jobs),
        "cost_usd": math.fsum(result.usd for result in results),
        "over_oracle": math.fsum(result.usd for result in results)
        / math.fsum(result.oracle_usd for result in results),
        "over_oracle_by_slack": {
            kind: over_oracle([each for each in jobs if slack(each.job) == kind]) for kind in SLACK
        },
        "startup_part": math.fsum(each.startup_usd for each in jobs) / math.fsum(each.usd for each in jobs),
        "over_oracle_worst_week": max(result.usd / result.oracle_usd for result in results),
        "of_on_demand": math.fsum(result.usd for result in results)
        / math.fsum(result.on_demand_usd for result in results),
        "of_on_demand_worst_week": max(result.usd / result.on_demand_usd for result in results),
        "of_on_demand_worst_job": max(each.usd / each.on_demand.usd for each in jobs),
        "deadlines_feasible": len(feasible),
        "deadlines_met": sum(bool(each.in_time) for each in feasible) / max(1, len(feasible)),
        "steps_done_twice": math.fsum(each.lost_steps / each.job.steps for each in jobs) / len(jobs),
        "preemptions_per_job": sum(each.preemptions for each in jobs) / len(jobs),
        "moves_per_job": sum(each.moves for each in jobs) / len(jobs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--weeks", type=int, default=100)
    parser.add_argument("--prices", type=Path)
    parser.add_argument("--policy", default="min-cost-slo")
    options = parser.parse_args()
    market = excerpt() if options.prices is None else read_market(options.prices)
    results = [week(market, seed, policy=options.policy) for seed in range(options.weeks)]
    print(json.dumps(summary(results), indent=2))


if __name__ == "__main__":
    main()
