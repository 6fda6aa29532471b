"""The gain of keeping the outputs of frozen layers (``freezing.cacheBytes``), in one run of this file.

A GPT of 14 layers reads a dataset of a few batches again and again; from the second epoch on, half of its
layers are frozen. The same job runs with and without ``cacheBytes``, turn by turn; losses have to be
equal to 1e-5. Printed are the ratios of the two, in the epochs after the outputs were kept:

- ``cpu_ratio``: CPU seconds of all layers in a step, without over with;
- ``best_cut_ratio``: what a step takes by these seconds under the best cut of each, predicted;
- ``step_ratio``: seconds of the fastest step, each under the cut that its balancer has chosen: says something
  on a machine with a core for each rank and no other work.

    python benchmarks/trainer/freezing/cached_outputs.py [--ranks 2] [--rounds 3]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ballast_policies.planning.balancers.exact import exact_partition
from ballast_policies.planning.step_time import predict_step_seconds

BATCH, BATCHES = 16, 3
"""Samples in a step, and steps in an epoch."""
MICROBATCHES = 8
FROZEN_AT, STEPS = 4, 36
COUNTED_FROM = 20
"""The step from which steps are counted: outputs are kept and layers have moved by then."""
CACHE_BYTES = 10**9


class FewWindows:
    """The first windows of the built-in text, a dataset of ``BATCH * BATCHES`` samples."""

    def __init__(self, context):
        from ballast_trainer.data.corpus import text_batch

        self._inputs, self._targets = text_batch(0, 0, BATCH * BATCHES, context)

    def __len__(self):
        return len(self._inputs)

    def __getitem__(self, index):
        return self._inputs[index], self._targets[index]


def job(cache_bytes):
    """The configuration; None: every output is computed."""
    freezing = {"criterion": "schedule"} | ({"cacheBytes": cache_bytes} if cache_bytes else {})
    return {
        "totalSteps": STEPS,
        "model": {"name": "gpt", "layers": 14, "args": {"context": 64, "dropout": 0.0}},
        "data": {"name": "cached_outputs:FewWindows", "args": {"context": 64}},
        "pipeline": {"microbatches": MICROBATCHES, "globalBatchSize": BATCH, "schedule": "1F1B"},
        "dynamics": [{"kind": "freezing", "startStep": FROZEN_AT, "target": 0.5, "freezing": freezing}],
        "rebalance": {"everySteps": 4, "minGain": 0.02},
    }


def run(cache_bytes, ranks):
    """Losses by step, seconds of the fastest step, and the layers' CPU seconds in a step as measured last."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.yaml"
        path.write_text(json.dumps(job(cache_bytes)))
        command = [sys.executable, "-m", "ballast_trainer", "run", "--config", str(path), "--log", "json"]
        found = subprocess.run(
            [*command, "--ranks", str(ranks)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)},
        )
    rows = [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]
    steps = [row for row in rows if "event" not in row]
    late = [row for row in rows if row.get("step", 0) > COUNTED_FROM]
    seconds = min(row["step_seconds"] for row in late if "event" not in row)
    layers = [row["seconds"] for row in late if row.get("event") == "loads"][-1]
    return {row["step"]: row["loss"] for row in steps}, seconds, layers


def best_step_seconds(layers, ranks):
    """Seconds of a step under the best cut of layers of these seconds."""
    loads = exact_partition(layers, ranks).loads(layers)
    return predict_step_seconds(loads, MICROBATCHES)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="Runs of each of the two jobs.")
    arguments = parser.parse_args()
    ranks, by_cpu, by_cut, by_step = arguments.ranks, [], [], []
    for _ in range(arguments.rounds):
        computed, plain_seconds, plain_layers = run(None, ranks)
        kept, seconds, layers = run(CACHE_BYTES, ranks)
        differs = max(abs(kept[step] - computed[step]) for step in computed)
        assert kept.keys() == computed.keys() and differs < 1e-5, differs
        by_cpu.append(sum(plain_layers) / sum(layers))
        by_cut.append(best_step_seconds(plain_layers, ranks) / best_step_seconds(layers, ranks))
        by_step.append(plain_seconds / seconds)
    result = {
        "benchmark": "trainer_cached_outputs",
        "ranks": ranks,
        "cpu_ratio": [round(ratio, 2) for ratio in by_cpu],
        "best_cut_ratio": [round(ratio, 2) for ratio in by_cut],
        "step_ratio": [round(ratio, 2) for ratio in by_step],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
