"""``ballast plan``: layers to stages to ranks, from a profile and a description of a cluster."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from ballast_policies.planning import PlanningError
from ballast_policies.planning.pipeline_plan import PipelinePlan, plan_pipeline
from ballast_policies.planning.planners import plan_pipedream
from ballast_policies.planning.planners.amp import anneal
from ballast_policies.planning.schedules import (
    SCHEDULES,
    ScheduleError,
    chrome_trace,
    optimal_active_minibatches,
    schedule_csv,
    schedule_svg,
    timeline,
)

from ballast_operator.cli.plan_input import ClusterInput, ProfileInput, read_cluster, read_profile

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
OUT = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("profile_file", metavar="PROFILE", type=FILE)
@click.argument("cluster_file", metavar="CLUSTER", type=FILE)
@click.option(
    "--planner",
    type=click.Choice(["pipeline", "pipedream", "amp"]),
    default="pipeline",
    show_default=True,
    help="pipeline: one rank a GPU; pipedream: replicated stages; amp: tensor x data x pipeline.",
)
@click.option("--schedule", type=click.Choice(list(SCHEDULES)), default="1F1B", show_default=True)
@click.option("--microbatches", type=click.IntRange(1), default=8, show_default=True, help="Of a step.")
@click.option("--chunks", type=click.IntRange(1), default=1, show_default=True, help="Stages a rank.")
@click.option("--batch-size", type=click.IntRange(1), help="amp: samples of a step; default --microbatches.")
@click.option("--evaluations", type=click.IntRange(1), default=200, show_default=True, help="amp: to try.")
@click.option("--seed", type=int, default=0, show_default=True, help="amp: of its search.")
@click.option("--sweep", is_flag=True, help="pipeline: also plan with fewer GPUs, fastest first.")
@click.option("--trace", type=OUT, help="pipeline: write the simulated step for chrome://tracing.")
@click.option("--picture", type=OUT, help="pipeline: write the simulated step as SVG.")
@click.option("--csv", "csv_file", type=OUT, help="pipeline: write the schedule as torch reads it.")
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def plan(
    profile_file: Path,
    cluster_file: Path,
    planner: str,
    schedule: str,
    microbatches: int,
    chunks: int,
    batch_size: int | None,
    evaluations: int,
    seed: int,
    sweep: bool,
    trace: Path | None,
    picture: Path | None,
    csv_file: Path | None,
    output: str,
) -> None:
    """Plan a pipeline: layers to stages to ranks, and what a step will take.

    PROFILE has the layers' seconds and bytes (or is a job's report), CLUSTER the GPUs and links;
    both are YAML or JSON. All times are predictions: nothing is run. See docs/planning.md.
    """
    layers, cluster = read_profile(profile_file), read_cluster(cluster_file)
    try:
        if planner == "pipedream":
            answer, text = _pipedream(layers, cluster, microbatches)
        elif planner == "amp":
            samples = batch_size or microbatches
            answer, text = _amp(layers, cluster, microbatches, samples, evaluations, seed)
        else:
            found = _pipeline(layers, cluster, schedule, microbatches, chunks, cluster.total)
            answer, text = _pipeline_answer(found), _pipeline_text(found, layers)
            if sweep:
                answer["sweep"], table = _sweep(layers, cluster, schedule, microbatches, chunks)
                text += table
            _write(trace, lambda: chrome_trace(found.trace))
            _write(picture, lambda: schedule_svg(found.trace))
            _write(csv_file, lambda: schedule_csv(found.schedule))
    except (PlanningError, ScheduleError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(json.dumps({"planner": planner, **answer}) if output == "json" else text)


def _pipeline(
    layers: ProfileInput, cluster: ClusterInput, schedule: str, microbatches: int, chunks: int, gpus: int
) -> PipelinePlan:
    return plan_pipeline(
        layers.profile(microbatches),
        cluster.kinds(gpus),
        microbatches=microbatches,
        schedule=schedule,
        chunks=chunks,
        bandwidth=cluster.pipeline_bandwidth(gpus),
    )


def _pipeline_answer(found: PipelinePlan) -> dict[str, Any]:
    return {
        "schedule": found.schedule.name,
        "microbatches": found.schedule.microbatches,
        "stepSeconds": found.step_seconds,
        "evenStepSeconds": found.even_step_seconds,
        "imbalance": found.imbalance,
        "bubble": {
            "idle": found.bubble.idle,
            "inherent": found.bubble.inherent,
            "dynamic": found.bubble.dynamic,
        },
        "inFlight": list(found.facts.in_flight),
        "weightVersions": list(found.facts.versions_held),
        "transfers": found.facts.transfers,
        "stages": [
            {
                "stage": stage.stage,
                "rank": stage.rank,
                "gpuType": stage.gpu_type,
                "firstLayer": stage.first_layer,
                "endLayer": stage.end_layer,
                "seconds": stage.seconds,
                "bytes": stage.bytes,
            }
            for stage in found.stages
        ],
    }


def _pipeline_text(found: PipelinePlan, layers: ProfileInput) -> str:
    lines = [f"{'stage':>5} {'rank':>4}  {'GPU':<10} {'layers':>9} {'s/step':>10} {'GB':>8}"]
    lines += [
        f"{stage.stage:>5} {stage.rank:>4}  {stage.gpu_type:<10} "
        f"{stage.first_layer:>4}-{stage.end_layer - 1:<4} {stage.seconds:>10.4g} {stage.bytes / 1e9:>8.3g}"
        for stage in found.stages
    ]
    gain = found.even_step_seconds / found.step_seconds
    lines += [
        "",
        f"{found.schedule.name}, {found.schedule.microbatches} microbatches: "
        f"{found.step_seconds:.4g} s a step (simulated), {gain:.2f} x the even split's speed",
        f"idle {found.bubble.idle:.1%}: {found.bubble.inherent:.1%} the schedule's own, "
        f"{found.bubble.dynamic:.1%} imbalance; at most {max(found.facts.in_flight)} microbatches in flight, "
        f"{max(found.facts.versions_held)} weight versions",
        "",
        timeline(found.trace),
    ]
    if layers.assumed_split:
        lines.append("\nForward and backward were not measured apart: a third and two thirds are assumed.")
    return "\n".join(lines)


def _sweep(
    layers: ProfileInput, cluster: ClusterInput, schedule: str, microbatches: int, chunks: int
) -> tuple[list[dict[str, Any]], str]:
    rows: list[dict[str, Any]] = []
    for gpus in range(1, cluster.total + 1):
        try:
            found = _pipeline(layers, cluster, schedule, microbatches, chunks, gpus)
        except (PlanningError, ScheduleError) as error:
            rows.append({"gpus": gpus, "stepSeconds": None, "reason": str(error)})
        else:
            rows.append({"gpus": gpus, "stepSeconds": found.step_seconds, "idle": found.bubble.idle})
    table = ["", "", f"{'GPUs':>4} {'s/step':>10} {'idle':>7}"]
    table += [
        f"{row['gpus']:>4} {row['reason']}"
        if row["stepSeconds"] is None
        else f"{row['gpus']:>4} {row['stepSeconds']:>10.4g} {row['idle']:>7.1%}"
        for row in rows
    ]
    return rows, "\n".join(table)


def _pipedream(layers: ProfileInput, cluster: ClusterInput, microbatches: int) -> tuple[dict[str, Any], str]:
    if len({gpu.speed for gpu in cluster.gpus}) > 1:
        raise PlanningError(
            "pipedream plans equal GPUs. To fix: use --planner pipeline or amp for mixed ones"
        )
    each = layers.each_layer(microbatches)
    found = plan_pipedream(
        [(layer.forward_seconds + layer.backward_seconds) / cluster.gpus[0].speed for layer in each],
        [layer.weight_bytes for layer in each],
        [layer.output_bytes for layer in each],
        cluster.levels(),
    )
    active = optimal_active_minibatches(cluster.total, found.stages[0].replicas)
    answer = {
        "configuration": found.configuration,
        "secondsPerMicrobatch": found.seconds_per_microbatch,
        "activeMinibatches": active,
        "stages": [
            {"firstLayer": stage.first_layer, "endLayer": stage.end_layer, "replicas": stage.replicas}
            for stage in found.stages
        ],
    }
    lines = [f"{'layers':>9} {'replicas':>8}"]
    lines += [f"{s.first_layer:>4}-{s.end_layer - 1:<4} {s.replicas:>8}" for s in found.stages]
    lines.append(
        f"\n{found.configuration}: {found.seconds_per_microbatch:.4g} s a microbatch (predicted), "
        f"{active} in flight for each replica of the input stage"
    )
    return answer, "\n".join(lines)


def _amp(
    layers: ProfileInput,
    cluster: ClusterInput,
    microbatches: int,
    samples: int,
    evaluations: int,
    seed: int,
) -> tuple[dict[str, Any], str]:
    search = anneal(
        layers.costs(microbatches), cluster.grid(), batch_size=samples, evaluations=evaluations, seed=seed
    )
    best = search.plans[:5]
    answer = {
        "batchSize": samples,
        "evaluations": len(search.best_so_far),
        "strategies": [
            {
                "stepSeconds": seconds,
                "tensor": strategy.tensor,
                "data": strategy.data,
                "pipeline": strategy.pipeline,
                "microbatchSize": strategy.microbatch_size,
                "layers": list(strategy.partition.bounds),
                "placement": strategy.placement,
            }
            for seconds, strategy in best
        ],
    }
    lines = [f"{'s/step':>10} {'tensor':>6} {'data':>5} {'pipeline':>8} {'microbatch':>10}  layers"]
    lines += [
        f"{seconds:>10.4g} {s.tensor:>6} {s.data:>5} {s.pipeline:>8} {s.microbatch_size:>10}  "
        f"{' '.join(map(str, s.partition.bounds))}"
        for seconds, s in best
    ]
    lines.append(f"\nBest of {len(search.best_so_far)} strategies, predicted by AMP's cost model.")
    return answer, "\n".join(lines)


def _write(path: Path | None, content: Callable[[], str]) -> None:
    if path is not None:
        path.write_text(content())
