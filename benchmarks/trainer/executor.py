"""Our executor against torch's pipelining on schedules with a flush, and what no flush saves.

Four ranks over gloo; layers sleep for stated seconds (``calibrated``), all else is real.

- *Overhead*: the same stages are carried out by torch.distributed.pipelining and by
  ``runtime/executor``, in one run and in turns of a few steps.  The ratio of medians says what the
  executor costs over torch; the ratio to the simulated step, what each costs over the schedule.
  CPU milliseconds of a rank and step, which sleeping layers leave to the runtime, are told apart, since a
  busy machine does not disturb them.
- *No flush*: medians of a step of 1F1B, PipeDream and 2BW, as the session trains them, beside the
  simulator's.  With p ranks and m microbatches 1F1B takes (m + p - 1) / m times as long as the others.

    python benchmarks/trainer/executor.py [--blocks 8] [--steps 40] [--milliseconds 16]

On a machine whose cores are busy with other things, use longer layers.
"""

import argparse
import json
import multiprocessing
import statistics
import time

import numpy as np

RANKS, MICROBATCHES, LAYERS = 4, 8, 8
BLOCK = 4
FLUSHING = ("1F1B", "GPipe", "Interleaved1F1B", "ZeroBubbleH1", "ZeroBubbleV")


def rank_main(rank, port, schedule, blocks, forward, results):
    import torch
    import torch.distributed as dist
    from ballast_policies.contract.job import TrainingConfig
    from ballast_policies.planning import even_partition
    from ballast_policies.planning.stages import stages_over
    from ballast_trainer.distributed.process_group import join, reach_store, serve_store
    from ballast_trainer.layers.layer import LayerSet
    from ballast_trainer.pipeline.executor.pipelines import ExecutedPipeline
    from ballast_trainer.pipeline.layout import ScheduleRequest
    from ballast_trainer.pipeline.stages import PipelineBuilder
    from ballast_trainer.profiling.meter import Meter
    from calibrated import sleeping_model
    from harness import local_plan

    torch.set_num_threads(1)
    device, model = torch.device("cpu"), sleeping_model(LAYERS)
    plan = local_plan([f"rank-{n}" for n in range(RANKS)], network=44)
    store = (serve_store if rank == 0 else reach_store)("127.0.0.1", port, 60)
    join(store=store, plan=plan, rank=rank, device=device, timeout_seconds=60)
    request = ScheduleRequest(name=schedule, ranks=RANKS, microbatches=MICROBATCHES)
    placement = request.placement()
    stages = stages_over(even_partition(LAYERS, len(placement)), placement)
    layers = LayerSet(model, TrainingConfig(), device, lambda index, module: module)
    mine = [stage for stage in stages if stage.rank == rank]
    layers.hold(layers.make(i) for stage in mine for i in range(stage.first_layer, stage.end_layer))
    for layer in layers:
        layer.module.forward_seconds, layer.module.backward_seconds = forward, 2 * forward
    meter = Meter(LAYERS, device, None, clock=time.perf_counter)
    builder = PipelineBuilder(
        stages=stages, schedule=request, rank=rank, layers=layers, meter=meter, loss=model.loss
    )
    batch = model.batch(0, 0, MICROBATCHES)
    boundaries = builder.probe_partition(batch)
    pipelines = {
        "torch": builder.build(boundaries),
        "executor": ExecutedPipeline(
            request.one_step(),
            rank=rank,
            stacks=builder.stacks(),
            boundaries=boundaries,
            meter=meter,
            loss=model.loss,
            device=device,
        ),
    }
    seconds = {name: [] for name in pipelines}
    busy = dict.fromkeys(pipelines, 0.0)
    for block in range(2 * (blocks + 1)):
        name = list(pipelines)[block % 2]
        dist.barrier()
        for _ in range(BLOCK):
            meter.start_step(0)
            began, busy_before = time.perf_counter(), time.process_time()
            pipelines[name].run(lambda: batch)
            dist.barrier()
            seconds[name].append(time.perf_counter() - began)
            if block > 1:
                busy[name] += (time.process_time() - busy_before) / (blocks * BLOCK)
            for layer in layers:
                layer.module.zero_grad()
    of_all = torch.tensor(list(busy.values()), dtype=torch.float64)
    dist.all_reduce(of_all)
    if rank == 0:
        own = dict(zip(busy, (of_all / RANKS).tolist(), strict=True))
        results.put(({name: values[BLOCK:] for name, values in seconds.items()}, own))
        time.sleep(0.5)  # the store lives here: the others leave first


def overhead(schedule, blocks, forward):
    """Medians of both, and of the simulated step."""
    from ballast_policies.planning import even_partition
    from ballast_policies.planning.schedules import simulate, stage_costs
    from ballast_trainer.pipeline.layout import ScheduleRequest
    from harness import free_port

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ballast_trainer.preload", "calibrated"])
    results, port = context.Queue(), free_port()
    ranks = [
        context.Process(target=rank_main, args=(rank, port, schedule, blocks, forward, results))
        for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    seconds, own = results.get(timeout=90)
    for process in ranks:
        process.join(30)
    built = ScheduleRequest(name=schedule, ranks=RANKS, microbatches=MICROBATCHES).one_step()
    costs = stage_costs(
        even_partition(LAYERS, built.stages),
        forward_seconds=[forward * MICROBATCHES] * LAYERS,
        backward_seconds=[2 * forward * MICROBATCHES] * LAYERS,
        microbatches=MICROBATCHES,
    )
    simulated = simulate(built, costs).makespan
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "schedule": schedule,
        "torch_seconds": round(medians["torch"], 4),
        "executor_seconds": round(medians["executor"], 4),
        "executor_over_torch": round(medians["executor"] / medians["torch"], 4),
        "torch_own_cpu_ms": round(own["torch"] * 1000, 1),
        "executor_own_cpu_ms": round(own["executor"] * 1000, 1),
        "torch_over_simulated": round(medians["torch"] / simulated, 4),
        "executor_over_simulated": round(medians["executor"] / simulated, 4),
    }


def without_a_flush(steps, forward):
    """Medians of a step as the session trains it, beside the simulator's."""
    from ballast_policies.planning.schedules import even_costs, simulate
    from ballast_trainer.pipeline.layout import ScheduleRequest
    from calibrated import Job, run

    each = LAYERS // RANKS
    costs = even_costs(RANKS, forward=each * forward, backward=2 * each * forward)
    rows = []
    for name in ("1F1B", "PipeDream", "PipeDream2BW"):
        loads = np.tile([forward, 2 * forward], (steps, LAYERS, 1))
        ran = run(
            Job(
                loads=loads,
                ranks=RANKS,
                bounds=tuple(range(0, LAYERS + 1, each)),
                microbatches=MICROBATCHES,
                schedule=name,
                settings={"training": {"clipNorm": 0}},
            )
        )
        inner = [seconds for step, seconds in ran.step_seconds().items() if 5 < step < steps]
        request = ScheduleRequest(name=name, ranks=RANKS, microbatches=MICROBATCHES)
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
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--milliseconds", type=float, default=16.0, help="a layer's forward; backward twice")
    parser.add_argument("--schedules", default=",".join(FLUSHING), help="of the comparison with torch")
    arguments = parser.parse_args()
    forward = arguments.milliseconds / 1000
    print(json.dumps({"layers": "calibrated by sleeping", "ranks": RANKS, "microbatches": MICROBATCHES}))
    for schedule in filter(None, arguments.schedules.split(",")):
        print(json.dumps(overhead(schedule, arguments.blocks, forward)), flush=True)
    for row in without_a_flush(arguments.steps, forward):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
