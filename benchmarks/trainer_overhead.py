"""A step of the trainer's runtime against torch's own schedule on the same split, in one run.

Four ranks over gloo train the same GPT on the same batches.  Steps alternate between the two in
blocks, so that both see the same machine:

- ours: seeds each layer, meters it, sums one vector over the ranks, clips, steps one optimizer per
  layer, looks at the channel and reports;
- torch: ``Schedule1F1B`` over ``nn.Sequential`` stages, an all-reduce of the gradient norm to clip
  as ours does, and one AdamW over the stage.

    python benchmarks/trainer_overhead.py [--steps 60] [--dim 128]

``ratio`` is the median over pairs of neighbouring blocks of (fastest step of ours / fastest of torch's), so
that other programs on the machine, which only ever add time, disturb it little; ``ratio_of_medians`` is over
all steps.  The target is at most 1.03.  Layers are padded to ten times their own CPU
time, as on an emulated GPU: with more ranks than cores both would measure the kernel's scheduler.
"""

import argparse
import json
import multiprocessing
import statistics
import time

RANKS = 4
BLOCK = 5
MICROBATCHES = 8


def rank_main(rank, port, arguments, results):
    import torch
    import torch.distributed as dist
    from ballast_policies.contract import Plan
    from ballast_trainer.channel.liaison import Liaison
    from ballast_trainer.channel.standalone import StandaloneChannel
    from ballast_trainer.config import TrainerConfig
    from ballast_trainer.emulation import EmulatedSpeed
    from ballast_trainer.models.registry import build_model
    from ballast_trainer.reporting.console import SilentReporter
    from ballast_trainer.runtime.decide import initial_stages
    from ballast_trainer.runtime.layers import LayerSet
    from ballast_trainer.runtime.process_group import join, reach_store, serve_store
    from ballast_trainer.runtime.profile import Meter, Profile
    from ballast_trainer.runtime.session import Session
    from ballast_trainer.runtime.state import Training
    from ballast_trainer.runtime.stopping import StopSignal
    from ballast_trainer.testing import local_plan
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.set_num_threads(1)
    config = TrainerConfig.from_mapping(
        {
            "totalSteps": 1_000_000,
            "model": {"name": "gpt", "layers": 10, "args": {"dim": arguments.dim}},
            "pipeline": {"microbatches": MICROBATCHES, "globalBatchSize": 16},
        }
    )
    model = build_model(config.model)
    plan: Plan = local_plan([f"rank-{n}" for n in range(RANKS)], network=41)
    store = (serve_store if rank == 0 else reach_store)("127.0.0.1", port, 60)
    device = torch.device("cpu")
    world = join(store=store, plan=plan, rank=rank, device=device, timeout_seconds=60)
    speed = EmulatedSpeed(factor=arguments.factor)
    training = Training(
        config=config,
        model=model,
        device=device,
        speed=speed,
        dynamics=(),
        layers=LayerSet(model, config.training, device, lambda index, module: module),
        meter=Meter(model.layer_count, device, speed),
        profile=Profile(model.layer_count),
        world=world,
        plan=plan,
        stages=initial_stages(None, tuple(range(RANKS)), model.layer_count),
    )
    liaison = Liaison(StandaloneChannel(plan), plan) if rank == 0 else None
    session = Session(
        training, liaison=liaison, reporter=SilentReporter(), stop=StopSignal(), peer_timeout_seconds=60
    )
    session._launch()

    mine = training.stages[rank]
    module = nn.Sequential(*[model.build_layer(i) for i in range(mine.first_layer, mine.end_layer)])

    class PaddedStage(PipelineStage):
        def forward_one_chunk(self, *args, **kwargs):
            wall, cpu = time.perf_counter(), time.thread_time()
            value = super().forward_one_chunk(*args, **kwargs)
            speed.pad(wall, time.thread_time() - cpu)
            return value

        def backward_one_chunk(self, *args, **kwargs):
            wall, cpu = time.perf_counter(), time.thread_time()
            super().backward_one_chunk(*args, **kwargs)
            speed.pad(wall, time.thread_time() - cpu)

    def padded_loss(output, target):
        wall, cpu = time.perf_counter(), time.thread_time()
        value = model.loss(output, target)
        speed.pad(wall, time.thread_time() - cpu)
        return value

    stage = PaddedStage(module, rank, RANKS, device)
    schedule = Schedule1F1B(stage, n_microbatches=MICROBATCHES, loss_fn=padded_loss)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0.01)

    def torch_step(number):
        inputs, targets = model.batch(0, number, 16)
        losses = []
        schedule.step(
            *([inputs] if rank == 0 else []), target=targets if rank == RANKS - 1 else None, losses=losses
        )
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        squared = torch.stack(torch._foreach_norm(gradients)).double().square().sum()
        dist.all_reduce(squared)
        torch._foreach_mul_(gradients, min(1.0, 1.0 / (float(squared.sqrt()) + 1e-6)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    seconds = {"ours": [], "torch": []}
    for block in range(2 * arguments.steps // BLOCK):
        name = ("ours", "torch")[block % 2]
        dist.barrier()
        for number in range(BLOCK):
            began = time.perf_counter()
            session._train_step() if name == "ours" else torch_step(block * BLOCK + number)
            seconds[name].append(time.perf_counter() - began)
    dist.barrier()
    if rank == 0:
        results.put({name: values[BLOCK:] for name, values in seconds.items()})
        liaison.close()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--factor", type=float, default=10.0)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ballast_trainer.preload"])
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = context.Queue()
    ranks = [
        context.Process(target=rank_main, args=(rank, port, arguments, results)) for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    seconds = results.get(timeout=1800)
    for process in ranks:
        process.join(10)
        if process.is_alive():
            process.kill()
    ours, torchs = (statistics.median(seconds[name]) for name in ("ours", "torch"))
    fastest = {
        name: [min(values[at : at + BLOCK]) for at in range(0, len(values), BLOCK)]
        for name, values in seconds.items()
    }
    pairs = [a / b for a, b in zip(fastest["ours"], fastest["torch"], strict=True)]
    print(
        json.dumps(
            {
                "benchmark": "trainer_overhead",
                "ranks": RANKS,
                "steps_each": len(seconds["ours"]),
                "emulated_factor": arguments.factor,
                "ours_median_ms": round(ours * 1000, 2),
                "torch_median_ms": round(torchs * 1000, 2),
                "ratio": round(statistics.median(pairs), 4),
                "ratio_of_medians": round(ours / torchs, 4),
                "target": 1.03,
            }
        )
    )


if __name__ == "__main__":
    main()
