"""``ballast plan``: layers to stages to ranks, from a profile and a description of a cluster."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import yaml
from ballast_policies.planning.gpu_profiles import GpuProfiles
from ballast_policies.planning.partition import PlanningError
from ballast_policies.planning.planners.answers import layouts_answer
from ballast_policies.planning.planners.cost_model import CostModel
from ballast_policies.planning.planners.registry import DEFAULT_PLANNER, PLANNERS, Planner, PlanRequest
from ballast_policies.planning.profile import ProfileFile
from ballast_policies.planning.schedules.exports import chrome_trace, schedule_csv, schedule_svg
from ballast_policies.planning.schedules.registry import DEFAULT_SCHEDULE, SCHEDULES
from ballast_policies.planning.schedules.schedule import ScheduleError

from ballast_operator.cli.option_names import NewFile, with_option
from ballast_operator.cli.plan.input import (
    ClusterInput,
    GivenPlan,
    given_layout,
    known_tensor,
    read_cluster,
    read_config,
    read_given,
    read_gpu_profiles,
    read_profile,
    reduced_bytes,
    step_microbatches,
)
from ballast_operator.cli.plan.trial import try_plans

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


PICTURE_HERE = "-"
"""The value of ``--picture`` without a file: the picture is part of the output."""


class _OptionalPicture(click.Command):
    """``--picture`` takes a file or nothing; the word after it is PROFILE or CLUSTER where one is missing."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, list(args))
        except click.MissingParameter:
            here = [f"--picture={PICTURE_HERE}" if arg == "--picture" else arg for arg in args]
            if here == args:
                raise
            ctx.params.clear()
            return super().parse_args(ctx, here)


@click.command(cls=_OptionalPicture)
@click.argument("profile_file", metavar="PROFILE", type=FILE)
@click.argument("cluster_file", metavar="CLUSTER", type=FILE)
@click.option(
    "--planner",
    default=DEFAULT_PLANNER,
    show_default=True,
    metavar="NAME",
    help=f"{'; '.join(f'{name}: {row.summary}' for name, row in PLANNERS.builtin.items())}.",
)
@click.option(
    "--schedule",
    default=DEFAULT_SCHEDULE,
    show_default=True,
    metavar="NAME",
    help=f"One of {', '.join(SCHEDULES.builtin)}.",
)
@click.option("--microbatches", type=click.IntRange(1), default=8, show_default=True, help="Of a step.")
@click.option("--chunks", type=click.IntRange(1), default=1, show_default=True, help="Stages a rank.")
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    help="Samples of a step; default: --microbatches x the profile's microbatchSize.",
)
@click.option(
    "--profiles",
    "profile_paths",
    multiple=True,
    metavar="PATH",
    type=click.Path(exists=True, path_type=Path),
    help="Files or folders of layers measured by GPU type and tensor degree, for PROFILE's seconds.",
)
@click.option(
    "--given", type=FILE, help="Predict this plan (as --output json prints one) instead of planning."
)
@click.option(
    "--trial",
    type=click.IntRange(1),
    metavar="N",
    help="Run the N best plans for a few steps on this machine by ballast-train; the fastest comes first.",
)
@click.option("--config", type=FILE, help="trial: the trainer's configuration, which has the model.")
@click.option(
    "--trial-steps", type=click.IntRange(1), default=5, show_default=True, help="trial: that count."
)
@click.option("--top", type=click.IntRange(1), help="Plans to show, best first; default 1, amp: 5.")
@click.option(
    "--max-tensor",
    type=click.IntRange(1),
    help="Largest tensor-parallel degree; default: any, or 1 where its transfers are not known.",
)
@click.option(
    "--zero-stage",
    type=click.IntRange(0, 3),
    help="best, megatron, amp: what replicas share, as parallelism.zeroStage; default: 0, or the plan's.",
)
@click.option("--evaluations", type=click.IntRange(1), default=200, show_default=True, help="amp: to try.")
@click.option("--seed", type=int, default=0, show_default=True, help="amp: of its search.")
@click.option("--sweep", is_flag=True, help="pipeline: also plan with fewer GPUs, fastest first.")
@click.option("--trace", type=NewFile(), help="pipeline: write the simulated step for chrome://tracing.")
@click.option(
    "--picture",
    type=NewFile(),
    is_flag=False,
    flag_value=PICTURE_HERE,
    help="Show the step, stages x time, as text; with a file, pipeline: write it as SVG.",
)
@click.option("--csv", "csv_file", type=NewFile(), help="pipeline: write the schedule as torch reads it.")
@click.option(
    "--output",
    type=click.Choice(["text", "json", "yaml"]),
    default="text",
    show_default=True,
    help="yaml: the fields of a TrainingJob's spec that run the first plan, for kubectl patch.",
)
def plan(
    profile_file: Path,
    cluster_file: Path,
    planner: str,
    profile_paths: tuple[Path, ...],
    given: Path | None,
    trial: int | None,
    config: Path | None,
    trial_steps: int,
    sweep: bool,
    picture: Path | None,
    output: str,
    **options: Any,
) -> None:
    """Plan how a model trains: layers to stages to GPUs, and the predicted time of a step.

    PROFILE has the layers' seconds and bytes (or is a job's report), CLUSTER the GPUs and links;
    both are YAML or JSON. All times are predictions: nothing is run. See docs/planning.md.
    """
    layers, cluster = read_profile(profile_file), read_cluster(cluster_file)
    measured = read_gpu_profiles(profile_paths) if profile_paths else None
    shown = picture is not None and str(picture) == PICTURE_HERE
    drawn = None if shown else picture
    trace, csv_file = options.pop("trace"), options.pop("csv_file")
    if (trial is None) != (config is None):
        raise click.UsageError("--trial needs --config, a trainer's configuration, and nothing else does")
    options["top"] = options["top"] if trial is None else max(trial, options["top"] or 1)
    there = None if given is None else read_given(given)
    if options["zero_stage"] is None:
        options["zero_stage"] = 0 if there is None else there.job.parallelism.zero_stage
    try:
        chosen = _chosen(planner, there, measured=measured is not None)
        if options["zero_stage"] and not chosen.shards:
            names = ", ".join(PLANNERS.own(lambda row: row.shards))
            raise click.UsageError(
                f"--zero-stage: planner {planner} shares nothing. To fix: --planner {names}"
            )
        cluster = cluster if measured is None else cluster.measured_by(measured)
        if not chosen.simulates:
            drawings = {"sweep": sweep, "trace": trace, "picture": drawn, "csv": csv_file}
            _refuse_without_simulation(planner, given=there is not None, **drawings)
        request = _request(layers, cluster, measured, **options)
        found = chosen.plan(request)
        answer, text = dict(found.content), found.text
        if layers.assumed_split and chosen.simulates:
            text += "\n\nForward and backward were not measured apart: a third and two thirds are assumed."
        if listed := cluster.from_catalogue():
            answer["catalogueMemoryBytes"] = listed
            memory = ", ".join(f"{name} {size / 1e9:g} GB" for name, size in listed.items())
            text += f"\n\nMemory from the catalogue of GPUs (ballast gpus): {memory}."
        if sweep:
            answer["sweep"], table = _sweep(chosen, request, cluster)
            text += table
        if trial is not None and config is not None:
            answer["plans"], table = try_plans(answer["plans"], trial, read_config(config), trial_steps)
            answer["stepSeconds"] = answer["plans"][0]["stepSeconds"]
            text += table
        if shown:
            answer["picture"] = drawing = found.picture()
            # The pipeline planner's text has it in any case.
            text += "" if drawing in text else f"\n\n{drawing}"
    except (PlanningError, ScheduleError) as error:
        raise click.ClickException(with_option(str(error), {"planner": "--planner"})) from error
    if found.plan is not None:
        simulated = found.plan
        _write(trace, lambda: chrome_trace(simulated.trace))
        _write(drawn, lambda: schedule_svg(simulated.trace))
        _write(csv_file, lambda: schedule_csv(simulated.schedule))
    if output == "yaml":
        text = _patch({**answer, **(answer["plans"] or [{}])[0]})
    click.echo(json.dumps({"planner": planner, **answer}) if output == "json" else text)


def _chosen(name: str, given: GivenPlan | None, *, measured: bool) -> Planner:
    """The planner, or what predicts the given plan.

    Raises:
        PlanningError: there is no such planner.
        UsageError: it does not plan from layers that were measured by GPU type.
    """
    planner = PLANNERS.find(name, PlanningError)
    if given is not None:
        return dataclasses.replace(
            planner,
            simulates=False,
            shards=True,
            plan=lambda asked: layouts_answer(asked.model, [given_layout(given, asked.model)]),
        )
    if measured and not planner.measured:
        names = ", ".join(PLANNERS.own(lambda row: row.measured))
        raise click.UsageError(f"--profiles: planner {name} plans from one. To fix: --planner {names}")
    return planner


def _patch(plan: Mapping[str, Any]) -> str:
    """The spec that runs a plan, as YAML. Raises ClickException: no TrainingJob runs it."""
    if plan["refused"] is not None:
        raise click.ClickException(
            f"no TrainingJob runs this plan: {plan['refused']}. To fix: --planner best"
        )
    return yaml.safe_dump({"spec": plan["job"]}, sort_keys=False, default_flow_style=None).rstrip()


def _request(
    layers: ProfileFile,
    cluster: ClusterInput,
    measured: GpuProfiles | None,
    *,
    microbatches: int,
    batch_size: int | None,
    max_tensor: int | None,
    zero_stage: int,
    **search: Any,
) -> PlanRequest:
    """The planner's question; ``search``: fields of it as they are given."""
    count = step_microbatches(layers, microbatches, batch_size)
    profile = layers.profile(count)
    if measured is not None:
        measured.check((), profile.layers)
    return PlanRequest(
        profile=profile,
        gpus=tuple(cluster.kinds()),
        bandwidth=cluster.pipeline_bandwidth(cluster.total),
        microbatches=count,
        samples=batch_size or count * layers.microbatch_size,
        most_tensor=max_tensor or (cluster.total if measured else known_tensor(layers, cluster)),
        model=CostModel(
            profile,
            reduced_bytes(layers, count),
            layers.microbatch_size,
            cluster.devices(),
            measured=measured,
            zero_stage=zero_stage,
        ),
        **search,
    )


def _refuse_without_simulation(planner: str, *, given: bool, **options: object) -> None:
    simulating = ", ".join(PLANNERS.own(lambda row: row.simulates))
    why = f"planner {planner} simulates no step. To fix: --planner {simulating}"
    if given:
        why = "not with --given, whose plan is predicted as it is. To fix: leave it out"
    for name, value in options.items():
        if value:
            raise click.UsageError(f"--{name}: {why}")


def _sweep(planner: Planner, request: PlanRequest, cluster: ClusterInput) -> tuple[list[dict[str, Any]], str]:
    rows: list[dict[str, Any]] = []
    for gpus in range(1, cluster.total + 1):
        fewer = dataclasses.replace(
            request, gpus=tuple(cluster.kinds(gpus)), bandwidth=cluster.pipeline_bandwidth(gpus)
        )
        try:
            found = planner.plan(fewer).plan
        except (PlanningError, ScheduleError) as error:
            rows.append({"gpus": gpus, "stepSeconds": None, "reason": str(error)})
        else:
            assert found is not None
            rows.append({"gpus": gpus, "stepSeconds": found.step_seconds, "idle": found.bubble.idle})
    table = ["", "", f"{'GPUs':>4} {'s/step':>10} {'idle':>7}"]
    table += [
        f"{row['gpus']:>4} {row['reason']}"
        if row["stepSeconds"] is None
        else f"{row['gpus']:>4} {row['stepSeconds']:>10.4g} {row['idle']:>7.1%}"
        for row in rows
    ]
    return rows, "\n".join(table)


def _write(path: Path | None, content: Callable[[], str]) -> None:
    if path is not None:
        path.write_text(content())
