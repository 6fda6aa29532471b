"""``ballast-train profile``: what the layers of a job cost, measured without a pipeline."""

import json
import sys
from pathlib import Path
from typing import Any

import click

from ballast_trainer.ending import describe, end, reason_of


def layer_rows(config: dict[str, Any], *, steps: int, at_step: int) -> dict[str, Any]:
    """Seconds and bytes of each layer for one microbatch, in the form that ``ballast plan`` takes.

    Args:
        config: the job.
        steps: how many to measure; the median counts.
        at_step: measure with the changes as they are at this step, from the initial weights.

    Raises:
        ConfigurationError: a field cannot work.
    """
    import torch
    from ballast_policies.contract import Directive, Plan, Rank, Stage

    from ballast_trainer.dynamics.registry import build_dynamics
    from ballast_trainer.launch import Job, choose_device
    from ballast_trainer.runtime.layers import LayerSet
    from ballast_trainer.runtime.optimize import optimizer_step, squared_gradient_norm
    from ballast_trainer.runtime.process_group import World
    from ballast_trainer.runtime.profile import Meter, Profile
    from ballast_trainer.runtime.state import Training

    job = Job.from_mapping(config)
    model, recipe = job.model, job.config
    torch.set_num_threads(1)
    device = choose_device(0)
    dynamics = build_dynamics(recipe.dynamics, model.layer_count, model.family)

    def prepare(index: int, module: torch.nn.Module) -> torch.nn.Module:
        for dynamic in dynamics:
            module = dynamic.prepare(index, module)
        return module

    world = World(epoch=1, rank=0, size=1, pods=("local",), device=device)
    ranks = (Rank(rank=0, pod="local", address="127.0.0.1", gpu_type="local"),)
    training = Training(
        config=recipe,
        model=model,
        device=device,
        speed=None,
        dynamics=dynamics,
        layers=LayerSet(model, recipe.training, device, prepare),
        meter=Meter(model.layer_count, device, None),
        profile=Profile(model.layer_count),
        world=world,
        plan=Plan(job="local", epoch=1, launch=1, directive=Directive.RUN, ranks=ranks),
        stages=(Stage(rank=0, first_layer=0, end_layer=model.layer_count),),
    )
    training.layers.hold(training.layers.make(index) for index in range(model.layer_count))
    for step in range(at_step + 1):
        for dynamic in dynamics:
            dynamic.apply(step, training.layers, world)
    training.step = at_step
    training.rebuild()
    assert training.pipeline is not None
    for number in range(steps + 1):
        training.meter.start_step(at_step + number)
        training.pipeline.run(training.batch())
        for dynamic in dynamics:
            dynamic.after_backward(training.layers)
        norm = squared_gradient_norm(training.layers)
        optimizer_step(
            training.layers,
            recipe.training,
            training.meter,
            step=at_step,
            total_steps=recipe.total_steps,
            squared_norm=norm,
            loss_scale=training.loss_scale.value,
        )
        for dynamic in dynamics:
            dynamic.after_optimizer(training.layers)
        if number:
            # The first step is slower: memory is touched for the first time.
            training.profile.add(training.meter.seconds())
    costs = training.profile.costs()
    assert costs is not None
    microbatches = recipe.pipeline.microbatches
    rows = [
        {
            "name": f"layer {layer.index}",
            "forwardSeconds": costs.forward[layer.index] / microbatches,
            "backwardSeconds": costs.backward[layer.index] / microbatches,
            "heldBytes": layer.byte_count(),
            "weightBytes": sum(parameter.nbytes for parameter in layer.module.parameters()),
        }
        for layer in training.layers
    ]
    return {"microbatchSize": recipe.pipeline.global_batch_size // microbatches, "layers": rows}


@click.command()
@click.option(
    "--config", "config_path", type=click.Path(path_type=Path), required=True, help="YAML or JSON file."
)
@click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", help="Override a field.")
@click.option("--steps", type=click.IntRange(1), default=8, show_default=True, help="Steps to measure.")
@click.option(
    "--at-step", type=click.IntRange(0), default=0, show_default=True, help="Changes as of this step."
)
@click.option("--output", type=click.Choice(["text", "json"]), default="text")
def profile(config_path: Path, assignments: tuple[str, ...], steps: int, at_step: int, output: str) -> None:
    """Measure seconds and bytes of each layer, for one microbatch, on this machine."""
    from ballast_trainer.cli.config_file import read_config

    try:
        found = layer_rows(read_config(config_path, assignments), steps=steps, at_step=at_step)
    except Exception as error:
        sys.exit(end(reason_of(error), describe(error)))
    if output == "json":
        click.echo(json.dumps(found))
        return
    click.echo(f"{'layer':>10} {'forward ms':>11} {'backward ms':>12} {'held MB':>8}")
    for row in found["layers"]:
        click.echo(
            f"{row['name']:>10} {row['forwardSeconds'] * 1e3:11.3f} {row['backwardSeconds'] * 1e3:12.3f} "
            f"{row['heldBytes'] / 1e6:8.2f}"
        )
