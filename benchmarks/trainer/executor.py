"""Our executor beside torch's own schedules, and what no flush saves.

- *CPU time*: the same layers, batches and orders, carried out by our executor and by the public schedules of
  torch.distributed.pipelining, on one rank a core (at most four) over gloo, in one run and in turns of a few
  steps.  Layers are a GPT's (``--dim``), so that most of the time is theirs, or one product of few numbers
  (``--tiny``: what is left is the runtimes' own).  ``ratio`` is the median over the turns of (ours / torch's)
  CPU time of all ranks, ``interval`` its 95 % interval by bootstrap; ours seeds the layers besides.
- *No flush*: medians of a step of 1F1B, PipeDream and 2BW, as the session trains them, beside the
  simulator's.  With p ranks and m microbatches 1F1B takes (m + p - 1) / m times as long as the others.

    python benchmarks/trainer/executor.py [--turns 30] [--dim 256] [--tiny] [--no-flush] [--steps 40]

For *no flush* on a machine whose cores are busy with other things, use longer layers (``--milliseconds``).
"""

import argparse
import json
import multiprocessing
import os
import statistics
import time

import numpy as np

MICROBATCHES, LAYERS = 8, 8
RANKS = min(4, os.cpu_count() or 1)
UNFLUSHED_RANKS = 4
TURN = 2
"""Steps of one runtime before the other's."""
TORCH_CLASSES = {
    "1F1B": "Schedule1F1B",
    "GPipe": "ScheduleGPipe",
    "Interleaved1F1B": "ScheduleInterleaved1F1B",
    "ZeroBubbleH1": "ScheduleInterleavedZeroBubble",
    "ZeroBubbleV": "ScheduleZBVZeroBubble",
}
SINGLE_STAGE = ("1F1B", "GPipe")


def rank_main(rank, port, schedule, turns, dim, results):
    import torch
    import torch.distributed as dist
    from ballast_policies.contract.job.training import TrainingConfig
    from ballast_policies.planning.launch import stages_over
    from ballast_policies.planning.partition import even_partition
    from ballast_trainer.distributed.process_group import join, reach_store, serve_store
    from ballast_trainer.layers.layer import LayerSet
    from ballast_trainer.models.gpt import build_gpt
    from ballast_trainer.pipeline.layout import ScheduleRequest
    from ballast_trainer.pipeline.stages import PipelineBuilder
    from ballast_trainer.profiling.meter import Meter
    from calibrated import sleeping_model
    from harness import local_plan
    from torch import nn
    from torch.distributed import pipelining

    torch.set_num_threads(1)
    device = torch.device("cpu")
    model = build_gpt(layers=LAYERS, dim=dim, context=64) if dim else sleeping_model(LAYERS)
    plan = local_plan([f"rank-{n}" for n in range(RANKS)], network=44)
    store = (serve_store if rank == 0 else reach_store)("127.0.0.1", port, 60)
    join(store=store, plan=plan, rank=rank, device=device, timeout_seconds=60)
    request = ScheduleRequest(name=schedule, ranks=RANKS, microbatches=MICROBATCHES)
    placement = request.placement()
    stages = stages_over(even_partition(LAYERS, len(placement)), placement)
    layers = LayerSet(model, TrainingConfig(), device, lambda index, module: module)
    mine = [(number, stage) for number, stage in enumerate(stages) if stage.rank == rank]
    layers.hold(layers.make(i) for _, stage in mine for i in range(stage.first_layer, stage.end_layer))
    meter = Meter(LAYERS, device, None)
    builder = PipelineBuilder(
        stages=stages, schedule=request, rank=rank, layers=layers, meter=meter, loss=model.loss
    )
    batch = model.batch(0, 0, 2 * MICROBATCHES)
    ours = builder.build(builder.probe_partition(batch))

    def our_step():
        meter.start_step(0, by_layer=False)
        ours.run(lambda: batch)

    theirs = [
        pipelining.PipelineStage(
            nn.Sequential(*(layers[i].module for i in range(stage.first_layer, stage.end_layer))),
            number,
            len(stages),
            device,
        )
        for number, stage in mine
    ]
    carrier = getattr(pipelining, TORCH_CLASSES[schedule], None) or getattr(
        pipelining.schedules, TORCH_CLASSES[schedule]
    )
    peer = carrier(
        theirs[0] if schedule in SINGLE_STAGE else theirs, n_microbatches=MICROBATCHES, loss_fn=model.loss
    )
    first, last = (any(number == at for number, _ in mine) for at in (0, len(stages) - 1))

    def torch_step():
        losses = []
        peer.step(
            *([batch[0]] if first else []),
            target=batch[1] if last else None,
            losses=losses,
            return_outputs=False,
        )
        return float(torch.stack(losses).detach().mean()) if last else None

    steps = {"ours": our_step, "torch": torch_step}
    cpu, wall = ({name: [] for name in steps} for _ in range(2))
    for turn in range(turns + 2):
        for name in ("ours", "torch") if turn % 2 else ("torch", "ours"):
            dist.barrier()
            began, cpu_began = time.perf_counter(), time.process_time()
            for _ in range(TURN):
                steps[name]()
                for layer in layers:
                    layer.module.zero_grad()
            cpu[name].append((time.process_time() - cpu_began) / TURN)
            dist.barrier()
            wall[name].append((time.perf_counter() - began) / TURN)
    of_all = torch.tensor([cpu["ours"], cpu["torch"]], dtype=torch.float64)
    dist.all_reduce(of_all)
    if rank == 0:
        # The first turns allocate, connect, and infer shapes.
        results.put((of_all[:, 2:].tolist(), [wall["ours"][2:], wall["torch"][2:]]))
        time.sleep(0.5)  # the store lives here: the others leave first


def beside_torch(schedule, turns, dim):
    """CPU and wall time of both, a step; CPU time of all ranks."""
    from harness import free_port
    from overhead import interval_of_median

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ballast_trainer.preload", "calibrated"])
    results, port = context.Queue(), free_port()
    ranks = [
        context.Process(target=rank_main, args=(rank, port, schedule, turns, dim, results))
        for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    (ours, theirs), (our_wall, their_wall) = results.get(timeout=1800)
    for process in ranks:
        process.join(30)
    ratios = [mine / peer for mine, peer in zip(ours, theirs, strict=True)]
    return {
        "schedule": schedule,
        "ranks": RANKS,
        "turns": turns,
        "our_cpu_ms": round(statistics.median(ours) * 1000, 2),
        "torch_cpu_ms": round(statistics.median(theirs) * 1000, 2),
        "ratio": round(statistics.median(ratios), 4),
        "interval": [round(end, 4) for end in interval_of_median(ratios)],
        "wall_ratio": round(
            statistics.median(mine / peer for mine, peer in zip(our_wall, their_wall, strict=True)), 4
        ),
    }


def without_a_flush(steps, forward):
    """Medians of a step as the session trains it, beside the simulator's."""
    from ballast_policies.planning.schedules.costs import even_costs
    from ballast_policies.planning.schedules.simulate import simulate
    from ballast_trainer.pipeline.layout import ScheduleRequest
    from calibrated import Job, run

    each = LAYERS // UNFLUSHED_RANKS
    costs = even_costs(UNFLUSHED_RANKS, forward=each * forward, backward=2 * each * forward)
    rows = []
    for name in ("1F1B", "PipeDream", "PipeDream2BW"):
        loads = np.tile([forward, 2 * forward], (steps, LAYERS, 1))
        ran = run(
            Job(
                loads=loads,
                ranks=UNFLUSHED_RANKS,
                bounds=tuple(range(0, LAYERS + 1, each)),
                microbatches=MICROBATCHES,
                schedule=name,
                settings={"training": {"clipNorm": 0}},
            )
        )
        inner = [seconds for step, seconds in ran.step_seconds().items() if 5 < step < steps]
        request = ScheduleRequest(name=name, ranks=UNFLUSHED_RANKS, microbatches=MICROBATCHES)
        if name == "1F1B":
            simulated = simulate(request.one_step(), costs).makespan
        else:
            short, long = (simulate(request.run_of(n), costs).makespan for n in (2, 10))
            simulated = (long - short) / 8
        rows.append(
            {
                "schedule": name,
                "step_seconds": round(statistics.median(inner), 4),
                "simulated_seconds": round(simulated, 4),
                "measured_over_simulated": round(statistics.median(inner) / simulated, 4),
            }
        )
    first = rows[0]
    for row in rows:
        row["speed_up_over_1f1b"] = round(first["step_seconds"] / row["step_seconds"], 3)
        row["speed_up_simulated"] = round(first["simulated_seconds"] / row["simulated_seconds"], 3)
    return rows


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--dim", type=int, default=256, help="of the GPT")
    parser.add_argument("--tiny", action="store_true", help="layers do next to nothing")
    parser.add_argument("--schedules", default=",".join(TORCH_CLASSES), help="of the comparison with torch")
    parser.add_argument("--no-flush", action="store_true", help="compare schedules without a flush instead")
    parser.add_argument("--steps", type=int, default=40, help="without a flush")
    parser.add_argument("--milliseconds", type=float, default=16.0, help="a layer's forward; backward twice")
    arguments = parser.parse_args()
    if arguments.no_flush:
        rows = iter(without_a_flush(arguments.steps, arguments.milliseconds / 1000))
    else:
        dim = 0 if arguments.tiny else arguments.dim
        names = filter(None, arguments.schedules.split(","))
        rows = (beside_torch(name, arguments.turns, dim) for name in names)
    for row in rows:
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
