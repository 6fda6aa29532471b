"""The cost of many kills: ranks die at random, others go on in place, and the curve is that of one process.

Jobs of four ranks over gloo (``ballast-train run --ranks 4``, copies in memory of each step) train a small
GPT.  Whenever all four train, one drawn at random gets SIGKILL within the next fifth of a second; it is
started again and joins.  A job ends after twelve kills, three for each rank.  Printed: goodput (the part of
the time since a job's launch in which its steps ran), seconds from noticing a loss to going on, steps that
were done twice, and how far any loss is from that of one process; more than 1e-5 is an error.

    OMP_NUM_THREADS=1 python benchmarks/trainer/kills.py --kills 50
"""

import argparse
import json
import os
import random
import signal
import statistics
import tempfile
import threading
from pathlib import Path
from typing import Any

import yaml
from ballast_trainer.reporting.callback import StopTraining
from harness import Gang

from tests.support.one_process import train_here

RANKS = 4
KILLS_OF_A_RANK = 3
STEPS_BETWEEN = 10
MOST_APART = 1e-5


def strike(event: str, step: int, values: dict[str, Any], folder: str, seed: int, kills: int) -> None:
    """The callback of every rank: end this one where it is its turn, or the job after the last."""
    if event != "step":
        return
    # A rank that is back writes steps that are new.
    (Path(folder) / f"rank-{os.environ['RANK']}").write_text(str(step))
    reached = [int(path.read_text() or 0) for path in Path(folder).glob("rank-*")]
    # By number, the step of each kill so far.
    done = sorted(int(path.read_text() or step) for path in Path(folder).glob("kill-*"))
    order = [rank for rank in range(RANKS) for _ in range(KILLS_OF_A_RANK)]
    random.Random(seed).shuffle(order)
    whole = len(reached) == RANKS and min(reached) >= step - 1
    whole = whole and (not done or step >= done[-1] + STEPS_BETWEEN)
    if len(done) == kills and whole:
        raise StopTraining("all kills are done")
    if len(done) < kills and whole and os.environ["RANK"] == str(order[len(done)]):
        (Path(folder) / f"kill-{len(done)}").write_text(str(step))
        delay = random.Random(f"{seed} {len(done)}").uniform(0, 0.2)
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()


def config(folder: Path | None, **fields: Any) -> dict[str, Any]:
    """The job."""
    checkpoint = {"inMemoryEverySteps": 1}
    if folder is not None:
        checkpoint |= {"path": str(folder / "saved"), "everySteps": 50}
    return {
        "totalSteps": 1_000_000,
        "model": {"name": "gpt", "args": {"layers": 8, "dim": 32, "heads": 2, "context": 16}},
        "pipeline": {"microbatches": 4, "globalBatchSize": 8},
        "rebalance": {"enabled": False},
        # A rank that is not woken ends the job with every rank's stacks.
        "training": {"commTimeoutSeconds": 60},
        "checkpoint": checkpoint if folder is not None else {},
        **fields,
    }


def job(folder: Path, seed: int, kills: int) -> Gang:
    """A job with so many kills, ended; it must end well."""
    made = Gang(folder)
    (folder / "kills").mkdir(parents=True)
    args = {"folder": str(folder / "kills"), "seed": seed, "kills": kills}
    callback = {"name": "kills:strike", "everyRank": True, "args": args}
    (folder / "config.yaml").write_text(yaml.safe_dump(config(folder, callback=callback)))
    arguments = ["run", "--config", str(folder / "config.yaml"), "--log", "json", "--ranks", str(RANKS)]
    made.start("run", arguments, {"PYTHONPATH": str(Path(__file__).parent)})
    # However long it takes: a test would wait a minute.
    made.processes["run"].join()
    if made.exit_code("run") != 0:
        raise SystemExit(f"job {seed} has not ended well:\n{made.errors()}")
    made.close()
    return made


def main() -> None:
    """Run the jobs, and print the figures as a line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    left, number = arguments.kills, 0
    goodputs, seconds, twice, counted = [], [], 0, 0
    losses: dict[int, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        while left > 0:
            kills = min(left, RANKS * KILLS_OF_A_RANK)
            made = job(Path(name) / f"job-{number}", 1000 * arguments.seed + number, kills)
            steps = [line for line in made.lines("run") if "event" not in line]
            for line in steps:
                losses.setdefault(line["step"], []).append(line["loss"])
            lost = made.events("ranksLost", "run")
            twice += len(steps) - len({line["step"] for line in steps})
            counted += sum(len(event["lost"]) for event in lost)
            seconds += [event["seconds"] for event in lost]
            goodputs.append(steps[-1]["goodput"])
            left, number = left - kills, number + 1
    alone = train_here(config(None, totalSteps=max(losses))).losses
    apart = max(abs(loss - alone[step]) for step, found in losses.items() for loss in found)
    result = {
        "benchmark": "trainer_kills",
        "kills": arguments.kills,
        "ranks_lost": counted,
        "jobs": number,
        "steps": sum(map(len, losses.values())),
        "steps_done_twice": twice,
        "goodput": {"mean": round(statistics.fmean(goodputs), 3), "least": round(min(goodputs), 3)},
        "seconds_to_go_on": {"median": round(statistics.median(seconds), 3), "most": round(max(seconds), 3)},
        "most_apart_from_one_process": apart,
    }
    print(json.dumps(result))
    if not apart < MOST_APART:
        raise SystemExit("the curve is not that of one process")


if __name__ == "__main__":
    main()
