"""``ballast simulate`` of a trace or a generated workload."""

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ballast_operator.cli.laboratory import from_lab
from ballast_operator.cli.option_names import NewFile, import_from_here, with_option
from ballast_operator.cli.simulate.input import (
    OPTIONS,
    WorkloadOptions,
    all_of,
    overload_warning,
    progress_bar,
    read_amounts,
    seconds,
    table_of,
    window_of,
)

if TYPE_CHECKING:
    from ballast_policies.simulator.result import Result
    from ballast_policies.simulator.settings import SimulatedCluster
    from rich.table import Table


def summary_table(result: "Result") -> "Table":
    """Averages, one a line."""
    from ballast_policies.simulator.result import HOUR

    from ballast_operator.cli.text_table import averages_table

    kinds = [
        name
        for name, holds in (
            ("heterogeneity-agnostic", result.agnostic),
            ("space sharing", result.space_sharing),
            ("ideal", result.ideal),
        )
        if holds
    ]
    title = f"{result.workload}: {result.policy}" + (f" ({', '.join(kinds)})" if kinds else "")
    percentiles = result.completion_time_percentiles
    fairness = f"{result.finish_time_fairness:.2f} ({result.finish_time_fairness_max:.2f})"
    rows = [
        ("jobs measured", f"{result.jobs_measured}"),
        ("average completion time", f"{result.average_completion_time / HOUR:.2f} h"),
        *((f"  {p} % are done within", f"{s / HOUR:.2f} h") for p, s in percentiles.items()),
    ]
    by_weight = result.average_completion_time_by_weight
    if len(by_weight) > 1:
        rows += [(f"  average of weight {weight:g}", f"{s / HOUR:.2f} h") for weight, s in by_weight.items()]
    rows += [
        ("makespan", f"{result.makespan / HOUR:.2f} h"),
        ("utilisation", f"{result.utilisation:.1%}"),
        ("finish-time fairness, mean (largest)", fairness),
        ("cost", f"{result.cost:,.2f} USD"),
    ]
    if result.spread_fraction:
        rows.append(("GPU time of gangs spread over nodes", f"{result.spread_fraction:.1%}"))
    if result.deadlines:
        rows.append(("deadlines missed", f"{result.deadline_violations} of {result.deadlines}"))
    if not result.ideal:
        share = result.lease_extensions / max(1, result.lease_opportunities)
        rows.append(("leases extended", f"{result.lease_extensions} ({share:.0%})"))
        rows.append((f"rounds of {result.round_seconds:g} s, rules of {result.rules}", f"{result.rounds}"))
    rows.append(("allocations solved, in all", f"{result.solves} in {result.solve_seconds:.2f} s"))
    return averages_table(title, rows)


def per_job_table(result: "Result") -> "Table":
    """Lines, one a job."""
    from ballast_policies.simulator.result import HOUR

    from ballast_operator.cli.text_table import text_table

    headings = ("job", "type", "GPUs", "arrival h", "done after h", "rho", "USD", "hours on")
    rows = [
        (
            job.name,
            job.type,
            str(job.gpus),
            f"{job.arrival / HOUR:.2f}",
            "-" if job.completion_time is None else f"{job.completion_time / HOUR:.2f}",
            "-" if job.rho is None else f"{job.rho:.2f}",
            f"{job.cost:.2f}",
            ", ".join(f"{t} {s / HOUR:.1f}" for t, s in job.seconds_on.items()),
        )
        for job in result.jobs
    ]
    return text_table("jobs", headings, rows, breaks=headings, left=2)


SETTINGS = (
    "policy",
    "agnostic",
    "launch_seconds",
    "stop_seconds",
    "notice_seconds",
    "min_run_seconds",
    "max_moves_per_hour",
)
"""Options that are settings of the simulation by the same name."""


trace_options = all_of(
    click.option("--cluster", metavar="TYPE=N,...", help="GPUs, as v100=36,p100=36,k80=36."),
    click.option(
        "--prices",
        metavar="TYPE=USD,...|FOLDER",
        help="USD per GPU hour; default: on-demand list prices of 2020. Or a folder of price and "
        "availability logs of AWS, Google Cloud and Azure to replay (excerpt: four weeks that come with "
        "Ballast).",
    ),
    click.option(
        "--throughputs",
        metavar="FILE|NAME",
        default="simulation",
        show_default=True,
        help="Throughputs in Gavel's format, or a built-in table: simulation, physical_cluster.",
    ),
    click.option(
        "--gpus-per-node",
        metavar="TYPE=N,...",
        help="GPUs of a node: gangs that do not fit one, or are spread, run at the table's unconsolidated "
        "speed. Default: placement has no influence, as in Gavel's simulator.",
    ),
    click.option("--agnostic", is_flag=True, help="The policy takes all GPU types for equally fast."),
    click.option("--space-sharing", is_flag=True, help="The policy may put two jobs on the same GPUs."),
    click.option(
        "--ideal", is_flag=True, help="No rounds: every job has exactly its shares at every moment."
    ),
    seconds("--launch-seconds", "With --rules ballast: from a gang's grant to its first step."),
    seconds(
        "--stop-seconds",
        "With --rules ballast: so much later where the gang before it has to save and leave.",
    ),
    seconds("--notice-seconds", "With --rules ballast: how long a gang that a round stops still trains."),
    click.option(
        "--measure",
        metavar="FIRST:END",
        help="Average over these jobs, in order of arrival, as 4000:5000.",
    ),
    click.option(
        "--plot",
        type=NewFile(),
        metavar="FILE.png|html",
        help="Draw the run.",
    ),
)
"""The options of a simulated cluster."""


def simulate_trace(options: Mapping[str, Any]) -> None:
    """Run the workload and print the result. Raises UsageError: an option cannot be used."""
    from ballast_policies.allocation.problem import ProblemError
    from ballast_policies.simulator.settings import SettingsError
    from ballast_policies.simulator.workloads import WorkloadError
    from ballast_policies.throughput.table import ThroughputError

    if options["cluster"] is None:
        raise click.UsageError("Missing option '--cluster'. To fix: --cluster v100=36,p100=36,k80=36")
    plot, output = options["plot"], options["output"]
    if plot is not None:
        _check_plot(plot)
    import_from_here(options["policy"])
    jobs = WorkloadOptions.of(options)
    try:
        table = table_of(options["throughputs"])
        arrivals = jobs.workload(table)
        run = _simulation(options)
        machines = _cluster(options)
        if jobs.rate is not None:
            warning = overload_warning(
                arrivals, machines.gpus, table, rate=jobs.rate, space_sharing=options["space_sharing"]
            )
            if warning is not None:
                click.echo(warning, err=True)
        with progress_bar(output) as progress:
            result = run(arrivals, machines, table, progress=progress)
    except (ProblemError, WorkloadError, ThroughputError, SettingsError) as error:
        raise click.UsageError(with_option(str(error), OPTIONS)) from error
    if plot is not None:
        _plot(result, plot)
    if output == "json":
        click.echo(json.dumps(result.to_json(per_job=options["per_job"]), indent=2))
    else:
        from rich.console import Console

        console = Console()
        console.print(summary_table(result))
        if options["per_job"]:
            console.print(per_job_table(result))


def _simulation(options: Mapping[str, Any]) -> "Callable[..., Result]":
    """Simulation of a workload on a cluster by a table: the operator's decisions, or the laboratory's."""
    from ballast_policies.allocation.policy import SpaceSharing
    from ballast_policies.allocation.registry import check_shares, find_policy
    from ballast_policies.simulator.engine import simulate
    from ballast_policies.simulator.settings import SimulationSettings

    settings = {name: options[name] for name in SETTINGS}
    settings |= {
        "round_seconds": 360.0 if options["round_seconds"] is None else options["round_seconds"],
        "measure": window_of(options["measure"]),
        "record_timeline": options["plot"] is not None or options["per_job"],
    }
    rules, pairs, ideal = options["rules"], options["space_sharing"], options["ideal"]
    if pairs:
        check_shares(options["policy"])
    always_pairs = find_policy(options["policy"]).space_sharing is SpaceSharing.ALWAYS
    if rules == "ballast" and not (pairs or ideal or always_pairs):
        return functools.partial(simulate, settings=SimulationSettings(**settings))
    asked, instead = f"--rules {rules}", "--rules ballast"
    if rules == "ballast":
        asked = "--ideal" if ideal else "--space-sharing" if pairs else f"--policy {options['policy']}"
        instead = ""
    arrays = from_lab("arrays", asked, instead=instead)
    simulation: Callable[..., Result] = arrays(
        rules, space_sharing=pairs, ideal=ideal, seed=options["seed"], **settings
    )
    return simulation


def _cluster(options: Mapping[str, Any]) -> "SimulatedCluster":
    from ballast_policies.simulator.settings import SimulatedCluster

    gpus, per_node = read_amounts(options["cluster"], "--cluster", int), options["gpus_per_node"]
    stated = {} if options["prices"] is None else read_amounts(options["prices"], "--prices", float)
    for unknown in stated.keys() - gpus.keys():
        raise click.UsageError(f"--prices: {unknown} is not one of {', '.join(sorted(gpus))}")
    return SimulatedCluster(
        gpus=gpus,
        gpus_per_node={} if per_node is None else read_amounts(per_node, "--gpus-per-node", int),
        **({"prices": stated} if stated else {}),
    )


def _check_plot(path: Path) -> None:
    """Check before a long run: a file that cannot be drawn is a usage error."""
    from ballast_policies.simulator.plot import FORMATS

    if path.suffix not in FORMATS:
        raise click.UsageError(f"--plot: {path.name} ends neither in .png nor in .html")


def _plot(result: "Result", path: Path) -> None:
    from ballast_policies.simulator import plot

    try:
        plot.draw(result, path)
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"--plot {path.name} needs the Python package {error.name!r}. "
            "To fix: pip install 'ballast-operator[plot]', or name a file that ends in .html"
        ) from error
