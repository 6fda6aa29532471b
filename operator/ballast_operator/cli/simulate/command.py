"""``ballast simulate``: three programs that run jobs on values, each with options of its own.

| given | runs |
|---|---|
| ``--elastic FILE`` | elastic jobs (:mod:`.elastic`) |
| ``--prices FOLDER`` | a replay of price logs (ballast-lab) |
| neither | a trace, or a generated workload (:mod:`.trace`) |
"""

from typing import Any

import click

from ballast_operator.cli.laboratory import from_lab
from ballast_operator.cli.simulate.elastic import elastic_options, simulate_elastic
from ballast_operator.cli.simulate.input import (
    ONLY_A_REPLAY,
    ONLY_ELASTIC,
    is_folder_of_prices,
    refuse,
    seconds,
    spot_options,
    workload_options,
)
from ballast_operator.cli.simulate.trace import simulate_trace, trace_options

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
@seconds(
    "--min-run-seconds",
    "With --rules ballast: a gang is not stopped for others while it starts, or before it trained this long.",
)
@click.option(
    "--max-moves-per-hour",
    type=int,
    help="With --rules ballast: limit on running gangs stopped or moved in an hour.",
)
@click.option("--jobs", "per_job", is_flag=True, help="A row for each job.")
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
@workload_options
@trace_options
@elastic_options
@spot_options
@click.pass_context
def simulate(context: click.Context, /, **options: Any) -> None:
    """Run jobs on a simulated cluster under a policy, with the operator's own policies and rounds.

    For example: ballast simulate --policy makespan --static 100 --cluster v100=36,p100=36,k80=36
    """
    given = {
        option.name: option.opts[0]
        for option in context.command.params
        if context.get_parameter_source(option.name) == COMMANDLINE
    }
    if options["prices"] is not None and is_folder_of_prices(options["prices"]):
        from_lab("prices", "--prices FOLDER")(options, given=given)
        return
    refuse(given, ONLY_A_REPLAY, "only with --prices FOLDER, a replay of price logs")
    if options["elastic"] is not None:
        simulate_elastic(options, given=given)
        return
    refuse(given, ONLY_ELASTIC, "only with --elastic")
    simulate_trace(options)
