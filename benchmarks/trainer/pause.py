"""Pauses of training: a live rebalance and a repack against a restart from a checkpoint.

One configuration (examples/trainer/freezing.yaml, four ranks over gloo) is run twice:

- live: layers freeze, the trainer moves layers and gives ranks back; the pauses are those that it
  reports, each from the last step's end to the rebuilt pipeline being ready;
- restart: the same change of partition the old way. SIGTERM, all ranks save and leave, the command
  is started again and resumes; the pause is from the last step line to the first new one, less one step.

    python benchmarks/trainer/pause.py

Each live pause is also printed in steps: over the median step before it.  Beside these, ``changes`` has
the pauses of changes that plans ask for, of a model that does not change: rebalances of four ranks, a
repack to three, and a growth to four again, with rank 0's milliseconds by phase (docs/trainer-reshaping.md).
``--changes`` prints these alone.

    python benchmarks/trainer/pause.py --own-devices

does rebalances that plans ask for where each rank has a device of its own: layers sleep in place of
computing (``calibrated.py``), with as many weights as the example's, so that ranks do not wait for each
other's processor.

The targets: a restart at least 30 times as long as each live pause, and a re-split of at most a tenth
of a step.

    python benchmarks/trainer/pause.py --moves

runs the examples of all six dynamic models with their four ranks instead, and prints the steps at which
layers moved, and each pause in steps; ``--case NAME`` runs one of them. ``--record FOLDER`` writes their load
curves there, with no moves, on two ranks and two microbatches a step; ``tests/trainer/cli/load_curves`` has
some.
"""

import argparse
import collections
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import calibrated
import numpy as np
import yaml
from ballast_policies.contract.messages import Stage
from ballast_policies.contract.plan import Directive
from ballast_trainer.channel.base import DirectoryChannel
from harness import Gang, local_plan

RANKS = 4
ROUNDS = 5
"""Changes of each kind that plans ask for."""
EVEN, UNEVEN, FEWER = (0, 3, 7, 10, 14), (0, 5, 8, 11, 14), (0, 5, 10, 14)
"""Partitions of the example's 14 layers, the first as a job of four ranks begins; four layers move."""
LAYER_WEIGHTS = 12 * 128 * 128
"""Weights of a block of the example's model."""
LAYER_SECONDS = 0.0013
"""Seconds of a microbatch's forward in a sleeping layer: a step takes about as long as the example's."""
LIMIT_SECONDS = 120.0
"""Limit for a change to be made."""
EXAMPLES = Path(__file__).parents[2] / "examples/trainer"
CASES = (
    "early-exit",
    "freezing",
    "mixture-of-depths",
    "mixture-of-experts",
    "pruning",
    "sparse-attention",
)
RECORDED_EVERY = 4
"""Steps between two rows of a load curve."""


def start(*options, example="freezing", ranks=RANKS):
    file = str(EXAMPLES / f"{example}.yaml")
    command = [sys.executable, "-m", "ballast_trainer", "run", "--config", file, "--log", "json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, "--ranks", str(ranks), *options],
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


def live_pauses(process):
    """(milliseconds, steps) of each, by kind; and the steps after which layers moved."""
    pauses, moved = {"rebalance": [], "repack": []}, []
    recent = collections.deque(maxlen=8)
    for _, line in lines(process):
        if "event" not in line:
            recent.append(line["step_seconds"])
        if line.get("event") in pauses:
            step_ms = 1000 * statistics.median(recent)
            pauses[line["event"]].append((line["pause_ms"], line["pause_ms"] / step_ms))
            moved.append(line["step"])
    return pauses, moved


def moves(cases):
    """Steps after which the layers of each example moved, and how many steps each pause took."""
    found = {}
    for case in cases:
        pauses, moved = live_pauses(start("--set", "repack.enabled=false", example=case))
        found[case] = {
            "moves": moved,
            "pause_steps": [round(steps, 2) for _, steps in pauses["rebalance"]],
        }
    return {"benchmark": "trainer_moves", "ranks": RANKS, "cases": found, "target_moves": 3}


def record(folder, cases):
    """Write the load curve of each example, of runs in which nothing moves."""
    never = ("rebalance.minGain=0.99", f"rebalance.everySteps={RECORDED_EVERY}", "repack.enabled=false")
    options = [part for value in (*never, "pipeline.microbatches=2") for part in ("--set", value)]
    for case in cases:
        rows = [
            json.dumps({key: line[key] for key in ("event", "step", "seconds", "coming", "measured")})
            for _, line in lines(start(*options, example=case, ranks=2))
            if line.get("event") == "loads"
        ]
        (folder / f"{case}.jsonl").write_text("\n".join(rows) + "\n")


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


def stages_at(bounds):
    return tuple(
        Stage(rank=rank, first_layer=first, end_layer=end)
        for rank, (first, end) in enumerate(itertools.pairwise(bounds))
    )


def asked_changes():
    """Pauses in steps and milliseconds, by kind, and phases, of changes that plans ask for."""
    found = {"rebalance": [], "repack": [], "grow": []}
    config = yaml.safe_load((EXAMPLES / "freezing.yaml").read_text())
    config = {key: value for key, value in config.items() if key not in ("dynamics", "repack")}
    config |= {"totalSteps": 100_000, "rebalance": {"enabled": False}}
    with tempfile.TemporaryDirectory() as name:
        made, folder = Gang(Path(name)), Path(name) / "channel"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        channel, epochs = DirectoryChannel(folder), itertools.count(2)
        plan = local_plan([f"job-1-{rank}" for rank in range(RANKS)], network=71)
        channel.publish(plan)
        for pod in plan.pods:
            made.start_pod(pod, folder, {"OMP_NUM_THREADS": "1"})
        made.wait_for_step(8, plan.pods[0])

        def change(kind, pods, bounds, directive):
            nonlocal plan
            steps = [line["step_seconds"] for line in made.lines(plan.pods[0]) if "event" not in line]
            asked = local_plan(pods, network=71)
            asked = asked.replace(epoch=next(epochs), directive=directive, stages=stages_at(bounds))
            known = len(made.events("migrate", plan.pods[0]))
            channel.publish(asked)
            for pod in set(pods).difference(plan.pods):
                made.start_pod(pod, folder, {"OMP_NUM_THREADS": "1"})
            plan = asked
            deadline = time.monotonic() + LIMIT_SECONDS
            while len(made.events("migrate", plan.pods[0])) == known:
                time.sleep(0.05)
                if made.processes[plan.pods[0]].exitcode is not None or time.monotonic() > deadline:
                    made.close()
                    raise SystemExit(f"no {kind}:\n{made.errors()}")
            moved = made.events("migrate", plan.pods[0])[-1]
            found[kind].append((moved["pause_ms"], statistics.median(steps[-8:]), moved["phases_ms"]))
            made.wait_for_step(moved["step"] + 6, plan.pods[0])

        pods = plan.pods
        for number in range(ROUNDS):
            change("rebalance", pods, UNEVEN, Directive.RUN)
            change("repack", pods[:3], FEWER, Directive.SHRINK)
            # A pod that was released does not come again.
            pods = (*pods[:3], f"job-1-{RANKS + number}")
            change("grow", pods, EVEN, Directive.GROW)
        made.close()
    result = {}
    for kind, pauses in found.items():
        median = sorted(pauses, key=lambda pause: pause[0])[len(pauses) // 2]
        result[kind] = {
            "pause_ms": [round(ms, 1) for ms, _, _ in pauses],
            "pause_steps": [round(ms / 1000 / step, 3) for ms, step, _ in pauses],
            "median_phases_ms": median[2],
        }
    return result


def own_devices():
    """Pauses in steps and milliseconds, and the median one's phases, of ranks whose layers sleep."""
    moves, layers, microbatches = 2 * ROUNDS, EVEN[-1], 8
    cuts = [UNEVEN if number % 2 == 0 else EVEN for number in range(moves)]
    ran = calibrated.run(
        calibrated.Job(
            loads=np.zeros((8 * moves, layers, 2)),
            model={
                "name": "calibrated:steady_model",
                "args": {"layers": layers, "numbers": LAYER_WEIGHTS, "forward_seconds": LAYER_SECONDS},
            },
            ranks=RANKS,
            bounds=EVEN,
            microbatches=microbatches,
            # Each as soon as the one before is in force.
            replans=tuple((0, RANKS, cut) for cut in cuts),
        )
    )
    step_ms = 1000 * statistics.median(ran.step_seconds().values())
    # The first move meets cuts that never ran.
    moved = sorted(ran.events("migrate")[1:], key=lambda event: event["pause_ms"])
    return {
        "layers": calibrated.SAYS,
        "step_ms": round(step_ms, 1),
        "pause_ms": [round(event["pause_ms"], 1) for event in moved],
        "pause_steps": [round(event["pause_ms"] / step_ms, 3) for event in moved],
        "bytes": moved[0]["bytes"],
        "median_phases_ms": moved[len(moved) // 2]["phases_ms"],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--moves", action="store_true", help="run all examples; print when layers move")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="write the examples' load curves")
    parser.add_argument("--case", choices=CASES, action="append", help="this example alone; may be repeated")
    parser.add_argument("--changes", action="store_true", help="the changes that plans ask for, alone")
    parser.add_argument("--own-devices", action="store_true", help="rebalances of ranks that sleep, alone")
    arguments = parser.parse_args()
    cases = arguments.case or CASES
    if arguments.record:
        record(arguments.record, cases)
    elif arguments.own_devices:
        print(json.dumps(own_devices()))
    elif arguments.changes:
        print(json.dumps(asked_changes()))
    elif arguments.moves:
        print(json.dumps(moves(cases)))
    else:
        print(json.dumps(compare()))


def compare():
    """Live pauses beside that of a restart."""
    pauses, _ = live_pauses(start("--set", "rebalance.minGain=0.02"))
    restart = restart_pause()
    result = {"benchmark": "trainer_pause", "ranks": RANKS, "restart_ms": round(restart)}
    for name, values in pauses.items():
        result[f"{name}_ms"] = [round(ms, 1) for ms, _ in values]
        result[f"{name}_steps"] = [round(steps, 2) for _, steps in values]
        result[f"{name}_times_shorter"] = round(restart / max(values)[0], 1) if values else None
    result["changes"] = asked_changes()
    result["own_devices"] = own_devices()
    result["target_times_shorter"] = 30
    result["target_rebalance_steps"] = 0.1
    return result


if __name__ == "__main__":
    main()
