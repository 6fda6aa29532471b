"""The cost of many kills: ranks die at random, others go on in place, and the curve is that of one process.

Jobs of four ranks over gloo (``ballast-train run --ranks 4``, copies in memory of each step) train a small
GPT.  Whenever all four train, one drawn at random gets SIGKILL within the next fifth of a second; it is
started again and joins.  A job ends after twelve kills, three for each rank.  Printed: goodput (the part of
the time since a job's launch in which its steps ran), seconds from noticing a loss to going on, steps that
were done twice, and how far any loss is from that of one process; more than 1e-5 is an error.

Settings have more to be killed in: state that replicas or a tensor group share, layers that change and move,
a checkpoint and an evaluation every few steps, data of users.  In ``pairs`` two ranks are killed, the second
while the others still go on without the first.  Other settings are named by what the rank does when it is
killed (``DURING``).  No process of a job may be left at its end.

    OMP_NUM_THREADS=1 python benchmarks/trainer/kills.py --kills 50 [--setting sharded]
"""

import argparse
import contextlib
import functools
import importlib
import json
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from ballast_policies.contract.messages import Candidate
from ballast_trainer.cli.run import unpartitioned
from ballast_trainer.loop.candidates import Candidates
from ballast_trainer.reporting.callback import StopTraining
from harness import Gang
from torch.utils.data import IterableDataset

from tests.support.one_process import train_here
from tests.support.waiting import eventually

RANKS = 4
KILLS_OF_A_RANK = 3
"""Kills of a rank, as often as one is started again."""
STEPS_BETWEEN = 10
MOST_APART = 1e-5
FREEZING = {"criterion": "weightChange", "threshold": 0.02, "patience": 1, "thawSteps": 10}
REGRESSION = {"name": "tests.trainer.models.users_module:regression", "args": {"layers": 8}}
CHANGING: dict[str, Any] = {
    "rebalance": {"enabled": True, "everySteps": 2, "minGain": 0.0},
    "checkpoint": {"everySteps": 3},
    "evaluation": {"everySteps": 4, "batches": 2},
    "dynamics": [{"kind": "freezing", "everySteps": 5, "target": 0.7, "freezing": FREEZING}],
}
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
    "changing": CHANGING,
    "writing": CHANGING,
    "evaluating": CHANGING,
    "moving": CHANGING,
    "joining": CHANGING,
    "trying": {},
    "repacking": {"totalSteps": 60, "repack": {"enabled": True, "targetStages": 2, "everySteps": 10}},
    "exporting": {"totalSteps": 20, "export": {"path": "model.pt", "format": "torch"}},
    "workers": {
        "model": REGRESSION,
        "data": {"name": "tests.trainer.models.users_module:unequal", "args": {"samples": 40, "fewer": 0}},
        "training": {"dataloaderNumWorkers": 2},
    },
    "loader": {"model": REGRESSION, "data": {"name": "kills:Endless"}},
}
DURING = {
    "writing": "ballast_trainer.checkpoints.tensors:save",
    "evaluating": "ballast_trainer.loop.evaluating:Evaluator.evaluate",
    "moving": "ballast_trainer.loop.plan_following:move_layers",
    "joining": "ballast_trainer.loop.session:enter_grown",
    "trying": "ballast_trainer.loop.candidates:Candidates._take",
    "repacking": "ballast_trainer.loop.plan_following:shrink",
    "exporting": "ballast_trainer.loop.session:export_at_end",
}
"""The call within which a rank dies, by setting; ``joining``: once it is back after another kill."""
ONCE = ("repacking", "exporting")
"""Settings whose job has one such call, and ends by itself."""
AT_ONCE = {"pairs": 2, "joining": 2}
"""Kills that are one event."""
MOST_STEPS = 500
"""Steps between two kills."""
WAITING: list[str] = []
"""The setting, once this process waits for the call in which it dies."""
SETTING, FOLDER = "KILLS_SETTING", "KILLS_FOLDER"
"""Variables of the ranks."""


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


def kills_of_a_job(setting: str) -> int:
    """Most kills that it can have."""
    if setting in ONCE:
        return 1
    return (
        RANKS * AT_ONCE["joining"] if setting == "joining" else RANKS // column_of(setting) * KILLS_OF_A_RANK
    )


def die_within(place: str, draw: random.Random, tell: Callable[[], object] = int) -> None:
    """Have this process killed a moment after it next calls ``place``, sooner rather than later.

    ``tell`` is called before.
    """
    module, _, names = place.partition(":")
    *owners, name = names.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    whole: Callable[..., Any] = getattr(owner, name)

    def called(*arguments: Any, **named: Any) -> Any:
        tell()
        threading.Timer(0.2 * draw.random() ** 3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return whole(*arguments, **named)

    setattr(owner, name, called)


def offer_candidates() -> None:
    """Let plans have candidates, as an operator's have."""
    begin = Candidates.begin

    def offered(self: Candidates) -> None:
        run, layers = self._progress.run, (8 // RANKS,) * RANKS
        if not run.plan.candidates:
            of = [("GPipe", 0), ("1F1B", 1), ("ZeroBubbleH1", 0)]
            run.plan = run.plan.replace(
                candidates=tuple(
                    Candidate(schedule=name, layers=layers, repeated=repeated, step_seconds=1.0)
                    for name, repeated in of
                )
            )
        begin(self)

    Candidates.begin = offered  # type: ignore[method-assign]


def strike(event: str, step: int, values: dict[str, Any], folder: str, order: list[int], kills: int) -> None:
    """The callback of every rank: end this one where it is its turn, or the job after the last."""
    if event != "step":
        return
    setting = os.environ[SETTING]
    # A rank that is back writes steps that are new.
    (Path(folder) / f"rank-{os.environ['RANK']}").write_text(f"{step} {os.getpid()}")
    told = {path.name: [*map(int, path.read_text().split())] for path in Path(folder).glob("rank-*")}
    # By number, the step of each kill so far.
    done = sorted(int(path.read_text() or step) for path in Path(folder).glob("kill-*"))
    # The others may be a step apart, or about to write.
    whole = len(told) == RANKS and all(not words or abs(words[0] - step) <= 1 for words in told.values())
    whole = whole and (not done or step >= done[-1] + STEPS_BETWEEN)
    if len(done) >= kills and whole and setting not in ONCE:
        raise StopTraining("all kills are done")
    at_once = AT_ONCE.get(setting, 1)
    if step > max(done, default=0) + MOST_STEPS:
        raise RuntimeError(f"no rank was killed in {MOST_STEPS} steps: none has called {DURING.get(setting)}")
    if len(done) < kills and whole and os.environ["RANK"] == str(order[len(done)]):
        draw = random.Random(f"{order} {len(done)}")
        files = [Path(folder) / f"kill-{len(done) + number}" for number in range(at_once)]
        own = Path(folder) / f"rank-{os.environ['RANK']}"
        if setting in DURING and setting != "joining":
            if not WAITING:
                WAITING.append(setting)
                # It counts once the call has come.
                die_within(DURING[setting], draw, lambda: files[0].write_text(own.read_text().split()[0]))
            return
        for file in files:
            file.write_text(str(step))
        if setting == "joining":
            _again().touch()
        others = {f"rank-{rank}" for rank in order[len(done) + 1 : len(done) + at_once]}
        pids = [told[name][1] for name in others if told[name] and setting == "pairs"]
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


def _again() -> Path:
    return Path(os.environ[FOLDER]) / f"again-{os.environ['RANK']}"


def left_behind(folder: Path) -> list[str]:
    """Processes that can still write the output of the job of that folder."""
    found = []
    for output in Path("/proc").glob("[0-9]*/fd/1"):
        with contextlib.suppress(OSError):
            if output.readlink().parent == folder:
                found.append(output.parts[2])
    return found


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
        made[name] = value if replaced or not isinstance(value, dict) else made.get(name, {}) | value
    made |= {name: value for name, value in fields.items() if name == "totalSteps"}
    if folder is None:
        return unpartitioned({name: of for name, of in made.items() if name != "export"} | {"checkpoint": {}})
    made["checkpoint"]["path"] = str(folder / "saved")
    if "export" in made:
        made["export"]["path"] = str(folder / made["export"]["path"])
    return made


def job(setting: str, folder: Path, seed: int, kills: int) -> Gang:
    """A job with so many kills, ended; it must end well."""
    made = Gang(folder)
    (folder / "kills").mkdir(parents=True)
    order = order_of(seed, column_of(setting))
    if setting == "joining":
        order = [rank for rank in dict.fromkeys(order) for _ in range(AT_ONCE[setting])]
    args = {"folder": str(folder / "kills"), "order": order, "kills": kills}
    callback = {"name": "kills:strike", "everyRank": True, "args": args}
    (folder / "config.yaml").write_text(yaml.safe_dump(config(setting, folder, callback=callback)))
    arguments = ["run", "--config", str(folder / "config.yaml"), "--log", "json", "--ranks", str(RANKS)]
    # Of a machine that is busy for longer than a heartbeat's limit no rank is lost.
    variables = {"PYTHONPATH": str(Path(__file__).parent), "BALLAST_HANG_SECONDS": "240"}
    variables |= {SETTING: setting, FOLDER: str(folder / "kills")}
    made.start("run", arguments, variables)
    # However long it takes: a test would wait a minute.
    made.processes["run"].join()
    if made.exit_code("run") != 0:
        raise SystemExit(f"job {seed} has not ended well:\n{made.errors()}")
    made.close()
    eventually(lambda: not left_behind(folder), f"job {seed} leaves no process", made.errors)
    if setting == "exporting" and not (folder / "model.pt").exists():
        raise SystemExit(f"job {seed} has not exported its model:\n{made.errors()}")
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
            kills = min(left, kills_of_a_job(setting))
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
    if not seconds:
        raise SystemExit(f"no rank was lost: no job has called {DURING.get(setting)}")
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


if FOLDER in os.environ:  # a rank
    if os.environ[SETTING] == "trying":
        offer_candidates()
    if _again().exists():
        _again().unlink()
        die_within(DURING["joining"], random.Random(os.environ[FOLDER]))


if __name__ == "__main__":
    main()
