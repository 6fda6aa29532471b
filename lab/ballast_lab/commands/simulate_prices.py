"""``ballast simulate --prices FOLDER``: jobs in clouds whose prices change, replayed from logs."""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from ballast_operator.cli.option_names import with_option
from ballast_operator.cli.simulate import input as workload_input
from ballast_operator.cli.simulate.input import (
    EXCERPT,
    ONLY_ELASTIC,
    WorkloadOptions,
    progress_bar,
    read_amounts,
    refuse,
    table_of,
    window_of,
)

if TYPE_CHECKING:
    from ballast_policies.simulator.workloads import Workload
    from ballast_policies.throughput.table import ThroughputTable
    from rich.table import Table

    from ballast_lab.prices.market import Market
    from ballast_lab.spot.result import SpotResult
    from ballast_lab.spot.settings import SpotJob

NOT_WITH_PRICES = (
    *("elastic", "gpus_per_node", "agnostic", "space_sharing", "ideal", "weights", "plot"),
    *("rules", "stop_seconds", "min_run_seconds", "max_moves_per_hour"),
    *ONLY_ELASTIC,
)
"""Options that have no meaning in a replay of prices."""

OPTIONS = {**workload_input.OPTIONS, "review_seconds": "--round"}


def simulate_spot(options: Mapping[str, Any], *, given: Mapping[str, str]) -> None:
    """Replay and print the result.

    Args:
        options: of ``ballast simulate``.
        given: those that stand on the command line, as they are called there.

    Raises:
        UsageError: the logs or an option cannot be used.
    """
    from ballast_policies.prices.offers import PriceLogError, seconds_of
    from ballast_policies.simulator.settings import SettingsError
    from ballast_policies.simulator.workloads import WorkloadError
    from ballast_policies.throughput.table import ThroughputError

    from ballast_lab.prices.logs.folder import excerpt, read_market
    from ballast_lab.spot.engine import replay
    from ballast_lab.spot.settings import SpotSettings

    prices = options["prices"]
    refuse(given, NOT_WITH_PRICES, "not with --prices FOLDER, which replays prices. To fix: leave it out")
    jobs = WorkloadOptions.of(options)
    chosen: dict[str, Any] = {
        name: options[name] for name in ("checkpoint_seconds", "hysteresis") if options[name] is not None
    }
    chosen |= {name: options[name] for name in ("launch_seconds", "notice_seconds") if name in given}
    if options["round_seconds"] is not None:
        chosen["review_seconds"] = options["round_seconds"]
    if options["cluster"] is not None:
        chosen["quota"] = read_amounts(options["cluster"], "--cluster", int)
    try:
        if options["start"] is not None:
            chosen["start"] = seconds_of(options["start"], where="--start")
        settings = SpotSettings(policy=options["policy"], seed=jobs.seed, oracle=options["oracle"], **chosen)
        table = table_of(options["throughputs"])
        market = excerpt() if prices == EXCERPT and not Path(prices).is_dir() else read_market(Path(prices))
        workload = _jobs(jobs.workload(table), table, market, options["measure"])
        with progress_bar(options["output"]) as progress:
            result = replay(market, workload, settings, progress=progress)
    except PriceLogError as error:
        raise click.UsageError(f"--prices: {error}") from error
    except (SettingsError, WorkloadError, ThroughputError) as error:
        raise click.UsageError(with_option(str(error), OPTIONS)) from error
    if options["output"] == "json":
        click.echo(json.dumps(result.to_json(per_job=options["per_job"]), indent=2))
    else:
        print_result(result, per_job=options["per_job"])


def _jobs(
    workload: "Workload", table: "ThroughputTable", market: "Market", measure: str | None
) -> "list[SpotJob]":
    from ballast_policies.simulator.settings import check_window, refuse_window

    from ballast_lab.spot.jobs import spot_job

    window = window_of(measure)
    if workload.endless and window is None:
        raise click.UsageError("--generate without an end. To fix: --measure 0:100, the first hundred jobs")
    first, end = (0, None) if window is None else window
    if window is not None:
        check_window(window)
    jobs = list(itertools.islice(workload.jobs, end))
    if window is not None and len(jobs) < window[1]:
        raise refuse_window(window, workload, len(jobs))
    types = {offer.gpu_type for offer in market.spot}
    return [
        spot_job(job, f"job-{number}", table, types) for number, job in enumerate(jobs[first:], start=first)
    ]


def print_result(result: "SpotResult", *, per_job: bool) -> None:
    """The result as tables."""
    from ballast_operator.cli.text_table import averages_table
    from rich.console import Console

    console = Console()
    found = result.to_json(per_job=False)
    deadlines = found["deadlines"]

    def usd(value: float | None) -> str:
        return "-" if value is None else f"{value:,.2f} USD"

    rows = (
        ("jobs", f"{found['jobs_measured']}"),
        ("cost", usd(found["cost_usd"])),
        ("  on demand only", usd(found["on_demand_usd"])),
        ("  at least, with the future known", usd(found["oracle_usd"])),
        ("  of it start-ups", usd(found["startup_usd"])),
        ("preemptions, moves by choice", f"{found['preemptions']}, {found['moves']}"),
        ("steps done twice", f"{found['steps_done_twice_part']:.3%}"),
        ("deadlines kept", f"{deadlines['met']} of {deadlines['jobs']} ({deadlines['feasible']} feasible)"),
        ("average completion time", f"{found['average_jct_hours']:.2f} h"),
    )
    console.print(averages_table(f"{found['policy']}, {found['start']} to {found['end']}", rows))
    for sentence in (*found["outliers"][:5], *found["ignored"][:5]):
        console.print(f"left out: {sentence}", style="yellow", highlight=False, markup=False)
    if per_job:
        console.print(_rows(result))


def _rows(result: "SpotResult") -> "Table":
    from ballast_operator.cli.text_table import text_table

    headings = ("job", "h", "USD", "on demand", "future known", "preemptions", "moves", "deadline")
    rows = [
        (
            each.job.name,
            f"{(each.finish - each.arrival) / 3600:.2f}",
            f"{each.usd:.2f}",
            f"{each.on_demand.usd:.2f}",
            f"{each.oracle_usd:.2f}",
            f"{each.preemptions}",
            f"{each.moves}",
            {None: "-", True: "kept", False: "missed"}[each.in_time],
        )
        for each in result.outcomes
    ]
    return text_table("jobs", headings, rows, breaks=headings)
