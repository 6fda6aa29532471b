"""The bubble of interleaved stages: (p - 1) / (v m), in the simulator and on real ranks.

Four ranks, v stages each (1: 1F1B, 2 and 4: Interleaved1F1B). Simulated without any cost but the layers',
where it must equal the formula to 1e-12; measured with layers that sleep (``calibrated.py``), where
bubble is the fastest step (other programs only add time) over the layers' own time, less 1. ``expected`` is
the simulator told what an action costs besides its layers, from the v = 1 step: more stages are more
actions, and their cost is what interleaving pays for its smaller bubble.

    python benchmarks/trainer/interleaving.py [--microbatches 8]
"""

import itertools
import json

import calibrated
import click
import numpy as np
from ballast_lab.simulated_steps import fitted_action_seconds, simulated_step_seconds
from ballast_policies.planning.partition import even_partition

RANKS, LAYERS = 4, 16
FORWARD, BACKWARD = 0.02, 0.04


def simulated(chunks, microbatches, action_seconds=0.0):
    split = even_partition(LAYERS, RANKS * chunks)
    counts = np.array([microbatches * (end - first) for first, end in itertools.pairwise(split.bounds)])
    return simulated_step_seconds(
        FORWARD * counts,
        BACKWARD * counts,
        microbatches,
        schedule="1F1B" if chunks == 1 else "Interleaved1F1B",
        chunks=chunks,
        action_seconds=action_seconds,
    )


def measured(chunks, microbatches, steps):
    loads = np.empty((steps, LAYERS, 2))
    loads[:, :, 0], loads[:, :, 1] = FORWARD, BACKWARD
    job = calibrated.Job(
        loads=loads,
        ranks=RANKS,
        bounds=even_partition(LAYERS, RANKS * chunks).bounds,
        microbatches=microbatches,
        schedule="1F1B" if chunks == 1 else "Interleaved1F1B",
        chunks=chunks,
    )
    return min(calibrated.run(job).step_seconds().values())


@click.command(help=__doc__)
@click.option("--microbatches", default=8, show_default=True)
@click.option("--steps", default=6, show_default=True)
def main(microbatches, steps):
    ideal = microbatches * (FORWARD + BACKWARD) * LAYERS / RANKS
    action, rows = 0.0, []
    for chunks in (1, 2, 4):
        seconds = measured(chunks, microbatches, steps)
        if chunks == 1:
            action = fitted_action_seconds(seconds, lambda each: simulated(1, microbatches, each))
        formula = (RANKS - 1) / (chunks * microbatches)
        alone = simulated(chunks, microbatches) / ideal - 1
        assert abs(alone - formula) <= 1e-12, (alone, formula)
        rows.append(
            {
                "stages_a_rank": chunks,
                "formula": round(formula, 4),
                "simulated": round(float(alone), 4),
                "expected": round(float(simulated(chunks, microbatches, action) / ideal - 1), 4),
                "measured": round(seconds / ideal - 1, 4),
            }
        )
    click.echo(
        json.dumps(
            {
                "benchmark": "trainer_interleaving",
                "layers": calibrated.SAYS,
                "ranks": RANKS,
                "microbatches": microbatches,
                "ideal_step_seconds": ideal,
                "action_milliseconds": round(1000 * float(action), 2),
                "bubble": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
