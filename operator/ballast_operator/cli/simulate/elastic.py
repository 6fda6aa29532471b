"""``ballast simulate --elastic``: jobs that run on any of their configurations."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from ballast_operator.cli.laboratory import lab_is_missing
from ballast_operator.cli.option_names import Number
from ballast_operator.cli.simulate.input import all_of, progress_bar, refuse, seconds

if TYPE_CHECKING:
    from ballast_policies.simulator.elastic import ElasticResult, OperatorRules
    from ballast_policies.simulator.elastic_file import Sizes

NOT_WITH_ELASTIC = (
    *("cluster", "prices", "gpus_per_node", "agnostic", "space_sharing", "ideal", "measure", "plot"),
    *("trace", "generate", "rate", "static_jobs", "weights", "deadlines", "job_table", "seed", "throughputs"),
    *("launch_seconds", "stop_seconds", "notice_seconds"),
)
"""Options that have no meaning for elastic jobs."""

ONLY_WITH_RULES = (
    *("min_run_seconds", "max_moves_per_hour"),
    *("pause_seconds", "growth_seconds", "end_seconds"),
)
"""Options that need ``--rules ballast``."""


def _sizes(_context: click.Context, _option: click.Parameter, value: str) -> "Sizes":
    """The value as ``read_workload`` takes it."""
    if value in ("stated", "all", "requested"):
        return cast("Sizes", value)
    if value.isdecimal() and value.isascii() and len(value) < 10 and int(value) >= 1:
        return int(value)
    raise click.BadParameter(f"{value!r} is not stated, all, requested or a number of GPUs from 1 on")


elastic_options = all_of(
    click.option(
        "--elastic",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        help="A file of elastic jobs with their speeds by GPU type and number, and their cluster.",
    ),
    click.option("--workload", metavar="NAME", help="With --elastic: which of the file's workloads."),
    click.option(
        "--sizes",
        metavar="stated|all|requested|N",
        callback=_sizes,
        default="stated",
        show_default=True,
        help="With --elastic: numbers of GPUs that a job may have: those that the file's cluster states, "
        "all with a speed, the requested one, or N for all jobs (or the nearest to these).",
    ),
    click.option(
        "--until",
        type=Number(min=0, min_open=True),
        metavar="SECONDS",
        help="With --elastic: nothing is simulated from then on; averages are of the jobs that have ended.",
    ),
    seconds(
        "--end-seconds", "With --elastic --rules ballast: from a job's last step until its GPUs are free."
    ),
    seconds(
        "--growth-seconds",
        "With --elastic --rules ballast: from the decision that a gang grows until it has its GPUs.",
    ),
    seconds(
        "--pause-seconds",
        "With --elastic --rules ballast: pause of training when a gang changes its size live.",
        default=1.0,
    ),
)
"""The options of elastic jobs."""


def simulate_elastic(options: Mapping[str, Any], *, given: Mapping[str, str]) -> None:
    """Run one workload of the file and print it.

    Args:
        options: of ``ballast simulate``.
        given: those that stand on the command line, as they are called there.

    Raises:
        UsageError: the file or an option cannot be used.
    """
    from ballast_policies.allocation.problem import ProblemError
    from ballast_policies.contract.errors import ContractError
    from ballast_policies.contract.limits import FILE
    from ballast_policies.elastic.completion_time import ELASTIC_POLICIES
    from ballast_policies.registry import RegistryError
    from ballast_policies.simulator.clock import SimulationError
    from ballast_policies.simulator.elastic import simulate, simulate_rules
    from ballast_policies.simulator.elastic_file import read_workload

    path, policy, round_seconds = options["elastic"], options["policy"], options["round_seconds"]
    why = "not with --elastic, whose file has cluster and jobs. To fix: leave it out"
    refuse(given, NOT_WITH_ELASTIC, why)
    rules = _rules(policy, round_seconds, options, given)
    if rules is None and policy == "sia" and policy not in ELASTIC_POLICIES:
        raise lab_is_missing("--policy sia", instead="--policy completion-time")
    if rules is None and policy not in ELASTIC_POLICIES:
        raise click.UsageError(
            f"--policy: {policy!r} chooses no sizes. To fix: one of {', '.join(sorted(ELASTIC_POLICIES))}; "
            "or --rules ballast, the operator's rules, with any of its policies"
        )
    length = 60.0 if round_seconds is None else round_seconds
    if not 0 < length < float("inf"):
        raise click.UsageError(f"--round: {length:g} s must be above 0")
    try:
        chosen = read_workload(FILE.read(path), workload=options["workload"], sizes=options["sizes"])
    except (OSError, ContractError) as error:
        raise click.UsageError(f"--elastic: {path}: {error}") from error
    try:
        until = options["until"] or math.inf
        with progress_bar(options["output"]) as progress:
            if rules is not None:
                result = simulate_rules(chosen, rules, until=until, progress=progress)
            else:
                result = simulate(chosen, policy=policy, round_seconds=length, until=until, progress=progress)
    except (SimulationError, ProblemError, RegistryError) as error:
        raise click.ClickException(str(error)) from error
    if options["output"] == "json":
        click.echo(json.dumps(result.to_json(per_job=options["per_job"]), indent=2))
    else:
        _print(result, per_job=options["per_job"])


def _rules(
    policy: str, round_seconds: float | None, options: Mapping[str, Any], given: Mapping[str, str]
) -> "OperatorRules | None":
    """The operator's rules; None: ``--rules`` was left out."""
    from ballast_policies.allocation.policy import SpaceSharing
    from ballast_policies.allocation.problem import ProblemError
    from ballast_policies.allocation.registry import find_policy
    from ballast_policies.simulator.elastic import OperatorRules

    if options["rules"] in ("published", "whole-rounds"):
        raise click.UsageError(f"--rules {options['rules']}: not with --elastic. To fix: --rules ballast")
    if options["rules"] != "ballast":
        refuse(given, ONLY_WITH_RULES, "with --elastic only together with --rules ballast")
        return None
    try:
        row = find_policy(policy)
    except ProblemError as error:
        raise click.UsageError(f"--policy: {error}") from error
    if row.space_sharing is SpaceSharing.ALWAYS:
        raise click.UsageError(f"--policy: {policy} always shares GPUs; the operator's rounds do not")
    own = {name: options[name] for name in ONLY_WITH_RULES}
    try:
        return OperatorRules(
            objective=policy, round_seconds=360.0 if round_seconds is None else round_seconds, **own
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _print(result: "ElasticResult", *, per_job: bool) -> None:
    from ballast_policies.simulator.result import HOUR
    from rich.console import Console

    from ballast_operator.cli.text_table import averages_table, text_table

    console = Console()
    averages = (
        ("jobs that ended", f"{len(result.finished)} of {len(result.jobs)}"),
        ("average completion time", f"{result.average_completion_time:,.0f} s"),
        ("  of each job alone on its best configuration", f"{result.average_alone:,.0f} s"),
        ("  99 % are done within", f"{result.percentile(99):,.0f} s"),
        ("makespan", f"{result.makespan:,.0f} s"),
        ("restarts a job", f"{result.restarts_per_job:.2f}"),
        ("utilisation", f"{result.utilisation:.1%}"),
        (f"decisions, in rounds of {result.round_seconds:g} s", f"{result.decisions}"),
    )
    console.print(averages_table(f"{result.workload}: {result.policy}", averages))
    if per_job:
        headings = ("job", "arrival s", "done after s", "alone s", "restarts", "GPU hours")
        rows = [
            (
                job.name,
                f"{job.arrival:,.0f}",
                f"{job.completion_time:,.0f}",
                f"{job.alone:,.0f}",
                f"{job.restarts}",
                f"{job.gpu_seconds / HOUR:.2f}",
            )
            for job in result.finished
        ]
        console.print(text_table("jobs", headings, rows, breaks=headings))
