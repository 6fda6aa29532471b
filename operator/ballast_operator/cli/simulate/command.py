"""``ballast simulate``: a trace or a generated workload on a cluster of values."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ballast_operator.cli.laboratory import from_lab
from ballast_operator.cli.option_names import with_option
from ballast_operator.cli.own_modules import import_from_here
from ballast_operator.cli.simulate.elastic import elastic_options, simulate_elastic
from ballast_operator.cli.simulate.input import (
    OPTIONS,
    WorkloadOptions,
    overload_warning,
    read_amounts,
    table_of,
    window_of,
)
from ballast_operator.cli.simulate.progress import progress_bar
from ballast_operator.cli.simulate.spot import (
    ONLY_HERE,
    is_folder_of_prices,
    spot_options,
)

if TYPE_CHECKING:
    from ballast_policies.simulator.elastic.workload_file import Sizes
    from ballast_policies.simulator.result import Result

COMMANDLINE = click.core.ParameterSource.COMMANDLINE


@click.command()
@click.option(
    "--policy",
    required=True,
    metavar="NAME",
    help="A policy, as in ClusterPolicy.spec.objective; with --elastic (without --rules ballast): "
    "completion-time or sia; with --prices FOLDER: min-cost, min-cost-slo, max-throughput-per-dollar or "
    "on-demand.",
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    help="A trace in Gavel's format, or the name of a built-in one.",
)
@click.option("--generate", type=click.Choice(["single", "multiple"]), help="Jobs on one GPU, or on 1 to 8.")
@click.option("--rate", type=float, metavar="JOBS_PER_HOUR", help="With --generate: mean arrival rate.")
@click.option("--static", "static_jobs", type=int, metavar="N", help="N generated jobs that all arrive at 0.")
@click.option("--weights", is_flag=True, help="Generated jobs: 20 % have weight 5.")
@click.option(
    "--deadlines", is_flag=True, help="Generated jobs: each has a deadline (1.2, 2 or 10 x its V100 time)."
)
@click.option(
    "--job-table",
    type=click.Choice(["gavel", "published"]),
    default="gavel",
    show_default=True,
    help="Generated jobs: the order of the types as in Gavel's code, or as for its published curves.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed is the same workload.")
@click.option("--cluster", metavar="TYPE=N,...", help="GPUs, as v100=36,p100=36,k80=36.")
@click.option(
    "--prices",
    metavar="TYPE=USD,...|FOLDER",
    help="USD per GPU hour; default: on-demand list prices of 2020. Or a folder of price and availability "
    "logs of AWS, Google Cloud and Azure to replay (excerpt: four weeks that come with Ballast).",
)
@click.option(
    "--throughputs",
    metavar="FILE|NAME",
    default="simulation",
    show_default=True,
    help="Throughputs in Gavel's format, or a built-in table: simulation, physical_cluster.",
)
@click.option(
    "--gpus-per-node",
    metavar="TYPE=N,...",
    help="GPUs of a node: gangs that do not fit one, or are spread, run at the table's unconsolidated "
    "speed. Default: placement has no influence, as in Gavel's simulator.",
)
@click.option("--agnostic", is_flag=True, help="The policy takes all GPU types for equally fast.")
@click.option("--space-sharing", is_flag=True, help="The policy may put two jobs on the same GPUs.")
@click.option("--ideal", is_flag=True, help="No rounds: every job has exactly its shares at every moment.")
@click.option(
    "--round",
    "round_seconds",
    type=float,
    help="Seconds of a round. [default: 360; with --elastic and without --rules ballast 60]",
)
@click.option(
    "--rules",
    type=click.Choice(["gavel", "published", "ballast", "whole-rounds"]),
    default="gavel",
    show_default=True,
    help="How shares become rounds: as Gavel's simulator (published: with the solver of its published "
    "curves), or as the operator (whole-rounds: decided once a round, for large clusters).",
)
@click.option(
    "--launch-seconds",
    type=float,
    default=0.0,
    show_default=True,
    help="With --rules ballast: from a gang's grant to its first step.",
)
@click.option(
    "--stop-seconds",
    type=float,
    default=0.0,
    show_default=True,
    help="With --rules ballast: so much later where the gang before it has to save and leave.",
)
@click.option(
    "--notice-seconds",
    type=float,
    default=0.0,
    show_default=True,
    help="With --rules ballast: how long a gang that a round stops still trains.",
)
@click.option(
    "--min-run-seconds",
    type=float,
    default=0.0,
    show_default=True,
    help="With --rules ballast: a gang that has started is not stopped for others before it ran this long.",
)
@click.option(
    "--max-moves-per-hour",
    type=int,
    help="With --rules ballast: limit on running gangs stopped or moved in an hour.",
)
@click.option(
    "--measure", metavar="FIRST:END", help="Average over these jobs, in order of arrival, as 4000:5000."
)
@click.option("--jobs", "per_job", is_flag=True, help="A row for each job.")
@click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE.png|html", help="Draw the run."
)
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
@elastic_options
@spot_options
def simulate(
    *,
    policy: str,
    elastic: Path | None,
    workload: str | None,
    sizes: "Sizes",
    cluster: str | None,
    prices: str | None,
    throughputs: str,
    gpus_per_node: str | None,
    agnostic: bool,
    space_sharing: bool,
    ideal: bool,
    round_seconds: float | None,
    rules: str,
    launch_seconds: float,
    stop_seconds: float,
    notice_seconds: float,
    min_run_seconds: float,
    max_moves_per_hour: int | None,
    pause_seconds: float,
    growth_seconds: float,
    end_seconds: float,
    measure: str | None,
    per_job: bool,
    plot: Path | None,
    output: str,
    start: str | None,
    checkpoint_seconds: float | None,
    hysteresis: float | None,
    oracle: bool,
    **which_jobs: Any,
) -> None:
    """Run jobs on a simulated cluster under a policy, with the operator's own policies and rounds.

    For example: ballast simulate --policy makespan --static 100 --cluster v100=36,p100=36,k80=36
    """
    from ballast_policies.allocation.problem import ProblemError
    from ballast_policies.simulator import engine, settings
    from ballast_policies.simulator.workloads.workload import WorkloadError
    from ballast_policies.throughput.table import ThroughputError

    context = click.get_current_context()
    given = {name for name in context.params if context.get_parameter_source(name) == COMMANDLINE}
    if prices is not None and is_folder_of_prices(prices):
        others = {name: value for name, value in context.params.items() if name not in which_jobs}
        simulate_spot = from_lab("prices", "--prices FOLDER")
        simulate_spot(prices, policy=policy, which_jobs=which_jobs, given=given, others=others)
        return
    if misplaced := [name for name in ONLY_HERE if name in given]:
        option = "--" + misplaced[0].replace("_", "-")
        raise click.UsageError(f"{option}: only with --prices FOLDER, a replay of price logs")
    if elastic is not None:
        simulate_elastic(
            elastic,
            policy=policy,
            workload=workload,
            sizes=sizes,
            round_seconds=round_seconds,
            output=output,
            per_job=per_job,
            others=dict(context.params),
        )
        return
    for name in ("workload", "pause_seconds", "growth_seconds", "end_seconds"):
        if name in given:
            raise click.UsageError(f"--{name.replace('_', '-')}: only with --elastic")
    if cluster is None:
        raise click.UsageError("Missing option '--cluster'. To fix: --cluster v100=36,p100=36,k80=36")
    if plot is not None:
        _check_plot(plot)
    import_from_here(policy)
    jobs = WorkloadOptions(**which_jobs)
    try:
        table = table_of(throughputs)
        arrivals = jobs.workload(table)
        chosen = settings.SimulationSettings(
            policy=policy,
            agnostic=agnostic,
            space_sharing=space_sharing,
            ideal=ideal,
            round_seconds=360.0 if round_seconds is None else round_seconds,
            rules=settings.RULES.get(rules) or from_lab(rules, f"--rules {rules}", instead="--rules ballast"),
            seed=jobs.seed,
            measure=window_of(measure),
            record_timeline=plot is not None,
            launch_seconds=launch_seconds,
            stop_seconds=stop_seconds,
            notice_seconds=notice_seconds,
            min_run_seconds=min_run_seconds,
            max_moves_per_hour=max_moves_per_hour,
        )
        amounts = {} if prices is None else {"prices": read_amounts(prices, "--prices", float)}
        node_sizes = {} if gpus_per_node is None else read_amounts(gpus_per_node, "--gpus-per-node", int)
        machines = settings.SimulatedCluster(
            gpus=read_amounts(cluster, "--cluster", int), gpus_per_node=node_sizes, **amounts
        )
        if jobs.rate is not None:
            warning = overload_warning(
                arrivals, machines.gpus, table, rate=jobs.rate, space_sharing=space_sharing
            )
            if warning is not None:
                click.echo(warning, err=True)
        with progress_bar(output) as progress:
            result = engine.simulate(arrivals, machines, table, chosen, progress=progress)
    except (ProblemError, WorkloadError, ThroughputError, settings.SettingsError) as error:
        raise click.UsageError(with_option(str(error), OPTIONS)) from error
    if plot is not None:
        _plot(result, plot)
    if output == "json":
        click.echo(json.dumps(result.to_json(per_job=per_job), indent=2))
    else:
        _print(result, per_job=per_job)


def _print(result: "Result", *, per_job: bool) -> None:
    from rich.console import Console

    from ballast_operator.cli.simulate.text import per_job_table, summary_table

    console = Console()
    console.print(summary_table(result))
    if per_job:
        console.print(per_job_table(result))


def _check_plot(path: Path) -> None:
    """Before a long run: a file that cannot be drawn is a usage error."""
    from ballast_policies.simulator.plot import FORMATS

    if path.suffix not in FORMATS:
        raise click.UsageError(f"--plot: {path.name} ends neither in .png nor in .html")
    if not path.parent.is_dir():
        raise click.UsageError(f"--plot: there is no folder {path.parent}. To fix: make it")


def _plot(result: "Result", path: Path) -> None:
    from ballast_policies.simulator import plot

    try:
        plot.draw(result, path)
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"--plot {path.name} needs the Python package {error.name!r}. "
            "To fix: pip install 'ballast-operator[plot]', or name a file that ends in .html"
        ) from error
    except OSError as error:
        raise click.ClickException(f"--plot: {path} cannot be written: {error.strerror}") from error
