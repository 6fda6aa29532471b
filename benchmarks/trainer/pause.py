"""How long training stands still: a live rebalance and a repack against a restart from a checkpoint.

One configuration (examples/trainer/freezing.yaml, four ranks over gloo) is run twice:

- live: layers freeze, the trainer moves layers and gives ranks back; the pauses are those that it
  reports, each from the last step's end to the rebuilt pipeline being ready;
- restart: the same change of partition the old way. SIGTERM, all ranks save and leave, the command
  is started again and resumes; the pause is from the last step line to the first new one, less one step.

    python benchmarks/trainer/pause.py

Each live pause is also printed in steps: over the median step before it.

The targets: a restart at least 30 times as long as each live pause, and a re-split of at most one step.
"""

import collections
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RANKS = 4
EXAMPLE = Path(__file__).parents[2] / "examples/trainer/freezing.yaml"


def start(*options):
    command = [sys.executable, "-m", "ballast_trainer", "run", "--config", str(EXAMPLE), "--log", "json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, "--ranks", str(RANKS), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )


def lines(process):
    """JSON lines with the time at which each was read."""
    for line in process.stdout:
        if line.startswith("{"):
            yield time.perf_counter(), json.loads(line)


def live_pauses():
    """(milliseconds, steps) of each, by kind."""
    pauses = {"rebalance": [], "repack": []}
    recent = collections.deque(maxlen=8)
    for _, line in lines(start("--set", "rebalance.minGain=0.02")):
        if "event" not in line:
            recent.append(line["step_seconds"])
        if line.get("event") in pauses:
            step_ms = 1000 * statistics.median(recent)
            pauses[line["event"]].append((line["pause_ms"], line["pause_ms"] / step_ms))
    return pauses


def restart_pause():
    with tempfile.TemporaryDirectory() as folder:
        options = ["--set", f"checkpoint.path={folder}", "--set", "repack.enabled=false"]
        first = start(*options, "--set", "totalSteps=10000")
        last = step_seconds = None
        for at, line in lines(first):
            if "event" not in line:
                last, step_seconds = at, line["step_seconds"]
                if line["step"] == 25:
                    os.kill(first.pid, signal.SIGTERM)
        first.wait()
        again = start(*options, "--set", "totalSteps=60")
        resumed = next(at for at, line in lines(again) if "event" not in line)
        again.terminate()
        again.communicate()
        return (resumed - last - step_seconds) * 1000


def main():
    pauses = live_pauses()
    restart = restart_pause()
    result = {"benchmark": "trainer_pause", "ranks": RANKS, "restart_ms": round(restart)}
    for name, values in pauses.items():
        result[f"{name}_ms"] = [round(ms, 1) for ms, _ in values]
        result[f"{name}_steps"] = [round(steps, 2) for _, steps in values]
        result[f"{name}_times_shorter"] = round(restart / max(values)[0], 1) if values else None
    result["target_times_shorter"] = 30
    result["target_rebalance_steps"] = 1
    print(json.dumps(result))


if __name__ == "__main__":
    main()
