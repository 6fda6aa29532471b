"""A tensor group with a late rank: what resizing, migration and SEMI's split win, and what they cost.

Four tensor ranks over gloo train a byte-level GPT; the matrix products of one of them are 2, 4 or 8
times slower (chi).  Everything slow is emulated: a product sleeps until a multiple of its own thread's CPU
seconds has passed, as the paper's stragglers do (Wang et al., arXiv 2401.11469, V-A).  Of each case two
runs are made by the trainer itself:

- accuracy: many steps with the seconds only counted, not slept, so that the same decisions are made
  from them; then the checkpoint's parts are put together and the whole model, with nothing left out,
  predicts the next byte of other windows of the text.  The same counted seconds give a step's time that
  a busy machine does not disturb: between any two collectives the slowest rank's, communication left out;
- wall time (--wall): a few steps with the sleeping; the median of those after the group has decided.
  Only an idle machine shows it.

    python benchmarks/trainer/stragglers.py [--steps 200] [--chi 2 --chi 4 --chi 8] [--wall] [--collectives]
    python benchmarks/trainer/stragglers.py --dim 128 --layers 3 --steps 600 --chi 8    (accuracy)

Speed-ups are over plain tensor parallelism with the same straggler, accuracy is less plain's.  The paper's
(8 V100, ViT-1B, chi = 8): 3.5 times at 1.3 % (Pri), 2.1 times at 0.3 % (PriDiffE).
"""

import argparse
import dataclasses
import json
import logging
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from pathlib import Path

import torch
from ballast_policies.contract.messages import Rank
from ballast_policies.contract.plan import Directive, Plan
from ballast_trainer.channel.base import StandaloneChannel
from ballast_trainer.checkpoints.checkpoints import Checkpoints
from ballast_trainer.checkpoints.manifest import Manifest
from ballast_trainer.data.corpus import text_batch
from ballast_trainer.distributed.process_group import World, reach_store, serve_store
from ballast_trainer.distributed.stopping import StopSignal
from ballast_trainer.gpu_emulation import EMULATED_STRAGGLER_ENV, EmulatedSpeed
from ballast_trainer.launch import ValidatedJob, train
from ballast_trainer.layers.layer import LayerSet
from ballast_trainer.loop.rank_launch import RankLaunch
from ballast_trainer.tensor_parallel import straggler_mitigation
from tensor_group.collectives import TABLE_I, table_one
from tensor_group.recorded import SETTLED, TIMED_STEPS, Recorder, Segments, slowest_between_collectives
from tensor_group.shape import BASE_SLOWDOWN, BATCH, CONTEXT, HEADS, LATE, RANKS

RESIZE = {"policy": "resize"}
POLICIES = {
    "plain": {"policy": "none"},
    "ZERO random": {**RESIZE, "selection": "random"},
    "ZERO priority": RESIZE,
    "ZERO priority, differentiated": {**RESIZE, "differentiated": True},
    "migration": {"policy": "migrate"},
    "SEMI": {"policy": "semi", "differentiated": True},
}
PAPER = {"ZERO priority": "3.5x at 1.3 %", "ZERO priority, differentiated": "2.1x at 0.3 % (PriDiffE)"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Size of the model and the run."""

    dim: int
    layers: int
    steps: int


def job_of(stragglers, steps, folder, size):
    return ValidatedJob.from_mapping(
        {
            "totalSteps": steps,
            "model": {
                "name": "gpt",
                "layers": size.layers,
                "args": {"dim": size.dim, "heads": HEADS, "context": CONTEXT, "dropout": 0.0},
            },
            "pipeline": {"microbatches": 1, "globalBatchSize": BATCH},
            "parallelism": {
                "tensor": RANKS,
                "stragglers": {"tolerance": 0.3, "epochSteps": 20, **stragglers},
            },
            "training": {"learningRate": 3e-3},
            "rebalance": {"enabled": False},
            "checkpoint": {"path": str(folder), "everySteps": 100000, "keep": 1},
        }
    )


def accuracy_of(job):
    """Share of next bytes that the whole model predicts, on windows that it was not trained on."""
    world = World(epoch=1, rank=0, size=1, processes=("local",), device=torch.device("cpu"))
    layers = LayerSet(job.model, job.config.training, world.device, lambda _, module: module)
    layers.hold(layers.make(index) for index in range(job.model.layer_count))
    path = job.config.checkpoint.path
    of = Manifest(step=0, layer_count=job.model.layer_count, seed=0, files={})
    saved = Checkpoints(path, keep=1, job=of)
    saved.load(world, layers, saved.newest(world))
    right = total = 0
    with torch.no_grad():
        for number in range(16):
            value, target = text_batch(987, number, 64, CONTEXT)
            for layer in layers:
                value = layer.module.eval()(value)
            right += int((value.argmax(-1) == target).sum())
            total += target.numel()
    return right / total


def run_case(rank, store, number, stragglers, chi, steps, folder, size, segments, *, sleeping):
    members = tuple(
        Rank(rank=r, pod=f"rank-{r}", address="127.0.0.1", gpu_type="local") for r in range(RANKS)
    )
    plan = Plan(job="local", epoch=1, launch=number, directive=Directive.RUN, ranks=members)
    os.environ["BALLAST_EMULATED_SLOWDOWN"] = json.dumps({"default": BASE_SLOWDOWN})
    os.environ[EMULATED_STRAGGLER_ENV] = str(chi if rank == LATE else 1)
    pad = EmulatedSpeed.pad
    if not sleeping:
        EmulatedSpeed.pad = lambda self, began, cpu_seconds: None
    segments.counts = not sleeping
    straggler_mitigation.step_clock = time.perf_counter if sleeping else segments.passed
    recorder, job = Recorder(), job_of(stragglers, steps, folder, size)
    try:
        train(
            job,
            RankLaunch(
                plan=plan,
                process=f"rank-{rank}",
                channel=StandaloneChannel(plan),
                reporter=recorder,
                stop=StopSignal(),
                store=store,
            ),
        )
    finally:
        EmulatedSpeed.pad = pad
    return recorder, job


def mean_share(recorder, kind, steps):
    """Share of the late rank's work, over the steps: decisions follow what is measured."""
    decided = [event for event in recorder.events if event["event"] == "workload"]
    ends = [event["step"] for event in decided[1:]] + [steps]
    parts = (event[kind][LATE] * (end - event["step"]) for event, end in zip(decided, ends, strict=False))
    return sum(parts) / steps


def one_policy(rank, store, number, name, chi, size, wall, segments):
    steps = size.steps
    with tempfile.TemporaryDirectory() as parent:
        folders = [store_path(store, f"{number}-{kind}", parent, rank) for kind in ("time", "accuracy")]
        timed = None
        if wall:
            timed, _ = run_case(
                rank,
                store,
                2 * number,
                POLICIES[name],
                chi,
                TIMED_STEPS,
                folders[0],
                size,
                segments,
                sleeping=True,
            )
        segments.steps = []
        learnt, job = run_case(
            rank,
            store,
            2 * number + 1,
            POLICIES[name],
            chi,
            steps,
            folders[1],
            size,
            segments,
            sleeping=False,
        )
        store.set(f"segments-{number}-{rank}", json.dumps(segments.steps))
        row = None
        if rank == 0:
            rows = [json.loads(store.get(f"segments-{number}-{r}")) for r in range(RANKS)]
            row = {
                "chi": chi,
                "policy": name,
                "step_seconds": slowest_between_collectives(rows),
                "wall_seconds": timed
                and statistics.median(step["step_seconds"] for step in timed.steps[SETTLED:]),
                "loss": statistics.mean(s["loss"] for s in learnt.steps[-20:]),
                "accuracy": accuracy_of(job),
                "left_out": mean_share(learnt, "left_out", steps),
                "migrated": mean_share(learnt, "migrated", steps),
            }
        store.add(f"done-{number}", 1)
        while store.add(f"done-{number}", 0) < RANKS:
            time.sleep(0.01)
    return row


def store_path(store, key, parent, rank):
    """A folder of rank 0's that all ranks know."""
    if rank == 0:
        store.set(f"folder-{key}", f"{parent}/{key}")
    return Path(store.get(f"folder-{key}").decode())


def rank_main(rank, port, chis, size, wall, out):
    segments = Segments()
    segments.watch()
    torch.set_num_threads(1)
    logging.getLogger("ballast_trainer").setLevel(logging.ERROR)
    store = serve_store("127.0.0.1", port, 600) if rank == 0 else reach_store("127.0.0.1", port, 600)
    cases = [("plain", 1.0), *((name, chi) for chi in chis for name in POLICIES)] if chis else []
    rows = []
    for number, (name, chi) in enumerate(cases, start=1):
        row = one_policy(rank, store, number, name, chi, size, wall, segments)
        if rank == 0:
            rows.append(row)
            print_row(row, rows)
    table = table_one(rank, store, size.dim)
    if rank == 0:
        Path(out).write_text(json.dumps({"cases": rows, "table_1": table}))
    store.add("left", 1)
    while rank == 0 and store.add("left", 0) < RANKS:
        time.sleep(0.01)


def print_row(row, rows):
    plain = next(r for r in rows if r["policy"] == "plain" and r["chi"] == row["chi"])
    row["speed_up"] = plain["step_seconds"] / row["step_seconds"]
    row["accuracy_difference"] = row["accuracy"] - plain["accuracy"]
    row["at_most"] = plain["step_seconds"] / rows[0]["step_seconds"]
    walled = (
        f", by the wall {plain['wall_seconds'] / row['wall_seconds']:4.2f}" if row["wall_seconds"] else ""
    )
    paper = PAPER.get(row["policy"], "") if row["chi"] == 8 else ""
    print(
        f"chi {row['chi']:.0f}  {row['policy']:30} {1000 * row['step_seconds']:7.1f} ms  "
        f"speed-up {row['speed_up']:4.2f} (of {row['at_most']:4.2f}{walled})  out {row['left_out']:4.0%}  "
        f"migrated {row['migrated']:4.0%}  loss {row['loss']:.3f}  accuracy {row['accuracy']:.2%} "
        f"({row['accuracy_difference']:+.2%})  {'paper ' + paper if paper else ''}",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200, help="of the accuracy runs")
    parser.add_argument(
        "--dim", type=int, default=256, help="width of the model; small ones are mostly overhead"
    )
    parser.add_argument("--layers", type=int, default=4, help="embedding and head among them")
    parser.add_argument("--chi", type=float, action="append", help="slow-downs of the late rank's products")
    parser.add_argument("--wall", action="store_true", help="also a few steps by the wall clock")
    parser.add_argument("--collectives", action="store_true", help="only the two ways of migrating (Table I)")
    options = parser.parse_args()
    chis = [] if options.collectives else options.chi or [2.0, 4.0, 8.0]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        size = Size(dim=options.dim, layers=options.layers, steps=options.steps)
        arguments = (port, chis, size, options.wall, str(out))
        ranks = [context.Process(target=rank_main, args=(rank, *arguments)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        result = json.loads(out.read_text())
    ours = result["table_1"]
    for name, seconds in TABLE_I.items():
        paper = [round(value / seconds[0], 2) for value in seconds]
        print(f"Table I, one straggler, gamma 0 to 1: {name:17} paper's epoch {paper}", end="")
        for what, values in ours[name].items():
            print(f", our {what} {[round(value / values[0], 2) for value in values]}", end="")
        print()
    print(json.dumps({"benchmark": "trainer_stragglers", "emulated": True, "ranks": RANKS, **result}))


if __name__ == "__main__":
    main()
