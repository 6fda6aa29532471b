"""One job over a fast and a slow pool: the stages of its launch against even stages.

Four real ranks of the trainer, two on fast and two on slow GPUs, whose layers sleep
(``benchmarks/trainer/calibrated.py``): a layer takes as long on a slow GPU as its speed says. So the
speeds of the GPUs are stated, and all else is real: processes, gloo, the schedule, the steps. The stages are
those of the first plan of a gang in two pools (``launch_partition`` with the parts'
speeds), before anything is measured: all layers count as alike. Layers stay where
they are. The measured step is the fastest of ``--steps``, since other programs on the machine only add time.

    python benchmarks/operator/mixed_pools.py [--slow 0.5] [--microbatches 16] [--steps 5] [--output json]

The target is 1.3 times the speed of even stages, where a slow GPU has half the speed of a fast one.
"""

import itertools
import json
import sys
from pathlib import Path

import click
import numpy as np
from ballast_policies.planning.launch import LaunchRanks, first_stages, launch_partition
from ballast_policies.planning.memory.measured_layers import MeasuredLayers, PipelineForm
from ballast_policies.planning.step_time import predict_step_seconds

sys.path.append(str(Path(__file__).resolve().parents[1] / "trainer"))

import calibrated

LAYERS, FAST, SLOW = 24, 2, 2
FORWARD_SECONDS = 0.004
"""Forward of a layer and a microbatch on a fast GPU; its backward takes twice that."""


def bounds_of(stages):
    return (0, *(stage.end_layer for stage in stages))


def seconds_of(bounds, speeds):
    """Seconds of each layer's forward and backward on the GPU that has it, shape (L, 2)."""
    found = np.empty((LAYERS, 2))
    for (first, end), speed in zip(itertools.pairwise(bounds), speeds, strict=True):
        found[first:end] = FORWARD_SECONDS / speed, 2 * FORWARD_SECONDS / speed
    return found


def measured(bounds, speeds, microbatches, steps):
    loads = np.repeat(seconds_of(bounds, speeds)[None], steps, axis=0)
    job = calibrated.Job(loads=loads, ranks=len(speeds), bounds=bounds, microbatches=microbatches)
    return min(calibrated.run(job).step_seconds().values())


def predicted(bounds, speeds, microbatches):
    seconds = seconds_of(bounds, speeds).sum(axis=1) * microbatches
    loads = [seconds[first:end].sum() for first, end in itertools.pairwise(bounds)]
    return predict_step_seconds(loads, microbatches)


@click.command(help=__doc__)
@click.option("--slow", default=0.5, show_default=True, help="Speed of a slow GPU over that of a fast one.")
@click.option("--microbatches", default=16, show_default=True)
@click.option("--steps", default=5, show_default=True)
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def main(slow, microbatches, steps, output):
    speeds = (1.0,) * FAST + (slow,) * SLOW
    placement = tuple(range(len(speeds)))
    even = first_stages(LAYERS, placement)
    form = PipelineForm(schedule="1F1B", positions=len(speeds), microbatches=microbatches)
    suited = launch_partition(even, MeasuredLayers(), form, LaunchRanks(placement=placement, speeds=speeds))
    rows = {}
    for name, stages in (("even", even), ("suited", suited)):
        bounds = bounds_of(stages)
        rows[name] = {
            "layers": [end - first for first, end in itertools.pairwise(bounds)],
            "predicted_seconds": round(predicted(bounds, speeds, microbatches), 4),
            "measured_seconds": round(measured(bounds, speeds, microbatches, steps), 4),
        }
        if output == "text":
            row = rows[name]
            click.echo(
                f"{name:<7} layers {row['layers']!s:<16} predicted {row['predicted_seconds']:.3f} s  "
                f"measured {row['measured_seconds']:.3f} s"
            )
    ratios = {
        kind: round(rows["even"][f"{kind}_seconds"] / rows["suited"][f"{kind}_seconds"], 3)
        for kind in ("predicted", "measured")
    }
    summary = {
        "benchmark": "mixed_pools",
        "layers": calibrated.SAYS,
        "slow_speed": slow,
        "microbatches": microbatches,
        "times_as_fast_predicted": ratios["predicted"],
        "times_as_fast": ratios["measured"],
        "target": 1.3,
    }
    click.echo(json.dumps({**summary, "stages": rows} if output == "json" else summary))


if __name__ == "__main__":
    main()
