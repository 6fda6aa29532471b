"""The cost of many kills: ranks die at random, others go on in place, and the curve is that of one process.

Jobs of four ranks over gloo (``ballast-train run --ranks 4``, copies in memory of each step) train a small
GPT.  Whenever all four train, one drawn at random gets SIGKILL within the next fifth of a second; it is
started again and joins.  A job ends after twelve kills, three for each rank.  Printed: goodput (the part of
the time since a job's launch in which its steps ran), seconds from noticing a loss to going on, steps that
were done twice, and how far any loss is from that of one process; more than 1e-5 is an error.

Settings have more to be killed in: state that replicas or a tensor group share, layers that change and move,
a checkpoint and an evaluation every few steps, data of users.  In ``pairs`` two ranks are killed, the second
while the others still go on without the first.

    OMP_NUM_THREADS=1 python benchmarks/trainer/kills.py --kills 50 [--setting sharded]
"""

import argparse
import json
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from ballast_trainer.cli.run import unpartitioned
from ballast_trainer.reporting.callback import StopTraining
from harness import Gang
from torch.utils.data import IterableDataset

from tests.support.one_process import train_here

RANKS = 4
KILLS_OF_A_RANK = 3
"""As often as one is started again."""
STEPS_BETWEEN = 10
MOST_APART = 1e-5
FREEZING = {"criterion": "weightChange", "threshold": 0.004, "patience": 1, "thawSteps": 10}
REGRESSION = {"name": "tests.trainer.models.users_module:regression", "args": {"layers": 8}}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "pairs": {"checkpoint": {"everySteps": 5}},
    "sharded": {"parallelism": {"data": 2, "zeroStage": 3}},
    "tensor": {"parallelism": {"tensor": 2}},
    "experts": {
        "parallelism": {"data": 2},
        "dynamics": [
            {"kind": "mixtureOfExperts", "experts": {"everyBlocks": 1, "balance": "none", "parallel": True}}
        ],
        # Of Adam rounding errors would change which experts are chosen.
        "training": {"optimizer": "sgd", "learningRate": 0.05},
    },
    "compiled": {"training": {"compile": True}},
    "changing": {
        "rebalance": {"enabled": True, "everySteps": 2, "minGain": 0.0},
        "checkpoint": {"everySteps": 3},
        "evaluation": {"everySteps": 4, "batches": 2},
        "dynamics": [{"kind": "freezing", "everySteps": 5, "target": 0.7, "freezing": FREEZING}],
    },
    "workers": {
        "model": REGRESSION,
        "data": {"name": "tests.trainer.models.users_module:unequal", "args": {"samples": 40, "fewer": 0}},
        "training": {"dataloaderNumWorkers": 2},
    },
    "loader": {"model": REGRESSION, "data": {"name": "kills:Endless"}},
}


class Endless(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """A stream of samples that tells where it is."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            self.at += 1
            sample = torch.randn(16, generator=torch.Generator().manual_seed(self.at))
            yield sample, sample.sum().reshape(1)

    def state_dict(self) -> dict[str, int]:
        """Samples given so far."""
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there."""
        self.at = state["at"]


def column_of(setting: str) -> int:
    """Ranks that share a stage."""
    shared: dict[str, int] = SETTINGS[setting].get("parallelism", {})
    return shared.get("data", 1) * shared.get("tensor", 1)


def order_of(seed: int, column: int) -> list[int]:
    """Ranks to kill: whoever shares a stage with one starts again, too."""
    draw = random.Random(seed)
    firsts = [first for first in range(0, RANKS, column) for _ in range(KILLS_OF_A_RANK)]
    draw.shuffle(firsts)
    return [first + draw.randrange(column) for first in firsts]


def strike(
    event: str, step: int, values: dict[str, Any], folder: str, order: list[int], kills: int, at_once: int
) -> None:
    """The callback of every rank: end this one where it is its turn, or the job after the last."""
    if event != "step":
        return
    # A rank that is back writes steps that are new.
    (Path(folder) / f"rank-{os.environ['RANK']}").write_text(f"{step} {os.getpid()}")
    told = {path.name: [*map(int, path.read_text().split())] for path in Path(folder).glob("rank-*")}
    # By number, the step of each kill so far.
    done = sorted(int(path.read_text() or step) for path in Path(folder).glob("kill-*"))
    # The others may be a step apart, or about to write.
    whole = len(told) == RANKS and all(not words or abs(words[0] - step) <= 1 for words in told.values())
    whole = whole and (not done or step >= done[-1] + STEPS_BETWEEN)
    if len(done) >= kills and whole:
        raise StopTraining("all kills are done")
    if len(done) < kills and whole and os.environ["RANK"] == str(order[len(done)]):
        for number in range(len(done), len(done) + at_once):
            (Path(folder) / f"kill-{number}").write_text(str(step))
        draw = random.Random(f"{order} {len(done)}")
        others = {f"rank-{rank}" for rank in order[len(done) + 1 : len(done) + at_once]}
        pids = [told[name][1] for name in others if told[name]]
        timer = threading.Timer(draw.uniform(0, 0.2), kill, (pids, draw.uniform(0, 2)))
        timer.daemon = True
        timer.start()


def kill(others: list[int], seconds: float) -> None:
    """Kill other ranks, then this one, which goes on without them for so long."""
    for other in others:
        os.kill(other, signal.SIGKILL)
    if others:
        time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def config(setting: str, folder: Path | None, **fields: Any) -> dict[str, Any]:
    """The job; of one process, without a folder."""
    made: dict[str, Any] = {
        "totalSteps": 1_000_000,
        "model": {"name": "gpt", "args": {"layers": 8, "dim": 32, "heads": 2, "context": 16}},
        "pipeline": {"microbatches": 4, "globalBatchSize": 8},
        "rebalance": {"enabled": False},
        # A rank that is not woken ends the job with every rank's stacks.
        "training": {"commTimeoutSeconds": 300},
        "checkpoint": {"inMemoryEverySteps": 1, "everySteps": 50},
        **fields,
    }
    for name, value in SETTINGS[setting].items():
        replaced = name in ("model", "dynamics")
        made[name] = value if replaced else made.get(name, {}) | value
    if folder is None:
        return unpartitioned(made | {"checkpoint": {}})
    made["checkpoint"]["path"] = str(folder / "saved")
    return made


def job(setting: str, folder: Path, seed: int, kills: int) -> Gang:
    """A job with so many kills, ended; it must end well."""
    made = Gang(folder)
    (folder / "kills").mkdir(parents=True)
    order = order_of(seed, column_of(setting))
    at_once = 2 if setting == "pairs" else 1
    args = {"folder": str(folder / "kills"), "order": order, "kills": kills, "at_once": at_once}
    callback = {"name": "kills:strike", "everyRank": True, "args": args}
    (folder / "config.yaml").write_text(yaml.safe_dump(config(setting, folder, callback=callback)))
    arguments = ["run", "--config", str(folder / "config.yaml"), "--log", "json", "--ranks", str(RANKS)]
    # Of a machine that is busy for longer than a heartbeat's limit no rank is lost.
    variables = {"PYTHONPATH": str(Path(__file__).parent), "BALLAST_HANG_SECONDS": "240"}
    made.start("run", arguments, variables)
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
    parser.add_argument("--setting", choices=list(SETTINGS), default="plain")
    arguments = parser.parse_args()
    left, number, setting = arguments.kills, 0, arguments.setting
    goodputs, seconds, twice, counted = [], [], 0, 0
    losses: dict[int, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        while left > 0:
            kills = min(left, RANKS // column_of(setting) * KILLS_OF_A_RANK)
            made = job(setting, Path(name) / f"job-{number}", 1000 * arguments.seed + number, kills)
            steps = [line for line in made.lines("run") if "event" not in line]
            for line in steps:
                losses.setdefault(line["step"], []).append(line["loss"])
            lost = made.events("ranksLost", "run")
            twice += len(steps) - len({line["step"] for line in steps})
            counted += sum(len(event["lost"]) for event in lost)
            seconds += [event["seconds"] for event in lost]
            goodputs.append(steps[-1]["goodput"])
            left, number = left - kills, number + 1
    alone = train_here(config(setting, None, totalSteps=max(losses))).losses
    apart = max(abs(loss - alone[step]) for step, found in losses.items() for loss in found)
    result = {
        "benchmark": "trainer_kills",
        "setting": setting,
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
