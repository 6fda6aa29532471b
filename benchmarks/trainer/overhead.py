"""A step of the trainer's runtime against torch's own on the same split, in one run.

Ranks over gloo train the same layers on the same batches.  Steps of the two alternate, and so does which of
them is first, so that both see the same machine:

- ours: seeds each layer, meters it, sums one vector over the ranks, clips, steps one optimizer per
  layer, looks at the channel and reports;
- torch: ``Schedule1F1B`` over ``nn.Sequential`` stages, an all-reduce of the gradient norm to clip
  as ours does, and one AdamW over the stage.

    python benchmarks/trainer/overhead.py [--pairs 100] [--dim 128] [--layers 12] [--setting] [--device cuda]

Settings, all unless one is named (on a GPU ``alone``):

- ``calibrated``: four ranks; layers sleep (``calibrated.py``), 2.5 ms a microbatch forward and twice
  that backward, all else is real;
- ``real``: a GPT on as many ranks as the machine has cores, at most four; nothing sleeps;
- ``ddp``, ``fsdp``: a GPT on two replicas of one stage with a microbatch each, against torch's
  ``DistributedDataParallel`` and, with ``parallelism.zeroStage: 3``, its ``fully_shard`` of every layer;
- ``alone``: a GPT on one rank, against a plain loop of forward and backward over the microbatches;
- ``tiny``: as ``alone``, 34 layers of 32 x 32 weights, which leave nearly all to the runtime;
- ``tenfold``: a GPT on four ranks, each chunk padded to ten times its own CPU seconds as on a node that
  emulates a GPU. So the runtime's own CPU seconds within a chunk count ten times too, which no real device
  does: a bound from above.

``ratio`` is the median over pairs of (ours / torch's), ``interval`` its 95 % interval by bootstrap over the
pairs, ``added_ms`` the median of the differences.  The target is a ratio of at most 1.03.
"""

import argparse
import dataclasses
import json
import multiprocessing
import os
import random
import socket
import statistics
import time

MICROBATCHES = 8
LAYERS = 12
WARM_UP_PAIRS = 10
"""The first steps: allocations, and the measured steps of a profile that has just begun."""
FORWARD_SECONDS = 0.0025
TARGET = 1.03
MODELS = {"cpu": {}, "cuda": {"heads": 16, "context": 1024}}
"""Arguments of the GPT by device: a GPU needs more to do than a test has."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """Setting of a comparison of steps: number of ranks, and their layers' seconds."""

    ranks: int
    layers: str
    factor: float | None = None
    zero_stage: int | None = None
    """Its ranks are replicas of one stage."""

    @property
    def microbatches(self) -> int:
        """Microbatches of a step; one for each replica."""
        return MICROBATCHES if self.zero_stage is None else self.ranks

    @property
    def sleeps(self) -> bool:
        """True if layers sleep."""
        return self.layers == "calibrated by sleeping"


SETTINGS = {
    "calibrated": Setting(4, "calibrated by sleeping"),
    "alone": Setting(1, "computed"),
    "tiny": Setting(1, "34 of 32 x 32 weights"),
    "real": Setting(min(4, os.cpu_count() or 1), "computed"),
    "ddp": Setting(2, "computed", zero_stage=0),
    "fsdp": Setting(2, "computed", zero_stage=3),
    "tenfold": Setting(4, "computed, padded to ten times their CPU seconds", factor=10.0),
}


def tiny_model():
    """A model whose layers have next to nothing to compute."""
    import torch
    from ballast_trainer.models.protocol import Model
    from torch import nn

    def layer():
        return nn.Sequential(nn.Linear(32, 32), nn.Tanh())

    def batch(seed, step, size):
        return (torch.randn(size, 32, generator=torch.Generator().manual_seed(step)),) * 2

    return Model.from_layers([layer] * 34, loss=nn.functional.mse_loss, batch=batch)


def rank_main(rank, port, setting, options, results):
    import torch
    import torch.distributed as dist
    from ballast_policies.contract.job.job import JobConfig
    from ballast_policies.contract.plan import Plan
    from ballast_policies.planning.launch import first_stages
    from ballast_trainer.channel.base import StandaloneChannel
    from ballast_trainer.channel.channel_thread import ChannelThread
    from ballast_trainer.distributed.mesh import Mesh
    from ballast_trainer.distributed.process_group import join, reach_store, serve_store
    from ballast_trainer.distributed.stopping import StopSignal
    from ballast_trainer.gpu_emulation import EmulatedSpeed
    from ballast_trainer.layers.layer import LayerSet
    from ballast_trainer.layers.precision import LossScale
    from ballast_trainer.loop.session import Session
    from ballast_trainer.loop.state import ModelState, RunState
    from ballast_trainer.models.registry import build_model
    from ballast_trainer.profiling.meter import Meter
    from ballast_trainer.reporting.console import SilentReporter
    from calibrated import sleeping_model
    from harness import local_plan
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.set_num_threads(1)
    count, replicas = setting.ranks, setting.zero_stage is not None
    parallelism = {"data": count, "zeroStage": setting.zero_stage} if replicas else {}
    config = JobConfig.from_mapping(
        {
            "totalSteps": 1_000_000,
            "model": {
                "name": "gpt",
                "layers": options.layers - 2,
                "args": {"dim": options.dim, **MODELS[options.device]},
            },
            "training": {"precision": options.precision},
            "pipeline": {"microbatches": setting.microbatches, "globalBatchSize": 16},
            "parallelism": parallelism,
        }
    )
    if setting == SETTINGS["tiny"]:
        model = tiny_model()
    else:
        model = sleeping_model(options.layers) if setting.sleeps else build_model(config.model)
    plan: Plan = local_plan([f"rank-{n}" for n in range(count)], network=41)
    store = (serve_store if rank == 0 else reach_store)("127.0.0.1", port, 60)
    device = torch.device(options.device, *([0] if options.device == "cuda" else []))
    mesh = Mesh(tensor=1, data=count if replicas else 1)
    world = join(store=store, plan=plan, rank=rank, device=device, timeout_seconds=60, mesh=mesh)
    speed = EmulatedSpeed(factor=setting.factor) if setting.factor else None
    clock = time.perf_counter if setting.sleeps else None
    run = RunState(plan=plan, loss_scale=LossScale(config.training.precision))
    training = ModelState(
        config=config,
        definition=model,
        device=device,
        speed=speed,
        dynamics=(),
        layers=LayerSet(
            model,
            config.training,
            device,
            lambda index, module: module,
            replicas=world.data if setting.zero_stage else None,
            shards_weights=setting.zero_stage == 3,
        ),
        meter=Meter(model.layer_count, device, speed, clock=clock),
        world=world,
        loss=run.loss_scale.scaled(model.loss),
        stages=first_stages(model.layer_count, (0,) if replicas else tuple(range(count))),
    )
    channel_thread = ChannelThread(StandaloneChannel(plan), plan) if rank == 0 else None
    session = Session(
        training,
        run,
        channel_thread=channel_thread,
        reporter=SilentReporter(),
        stop=StopSignal(),
    )
    session.launch()
    torch.manual_seed(0)

    mine = training.stages[0 if replicas else rank]
    module = nn.Sequential(*[model.build_layer(i) for i in range(mine.first_layer, mine.end_layer)]).to(
        device
    )
    if setting.zero_stage == 0:
        module = nn.parallel.DistributedDataParallel(module)
    elif replicas:
        devices = init_device_mesh(device.type, (count,))
        for layer in module:
            fully_shard(layer, mesh=devices)
        fully_shard(module, mesh=devices)

    for layer in [*module, *(layer.module for layer in training.layers)] if setting.sleeps else []:
        layer.forward_seconds, layer.backward_seconds = FORWARD_SECONDS, 2 * FORWARD_SECONDS

    def padded(work):
        """The work as a slower device would do it."""

        def run(*args, **kwargs):
            wall, cpu = time.perf_counter(), time.thread_time()
            value = work(*args, **kwargs)
            speed.pad(wall, time.thread_time() - cpu)
            return value

        return run if speed is not None else work

    class PaddedStage(PipelineStage):
        forward_one_chunk = padded(PipelineStage.forward_one_chunk)
        backward_one_chunk = padded(PipelineStage.backward_one_chunk)

    def plain_loop(inputs, targets):
        chunks = list(
            zip(inputs.chunk(setting.microbatches), targets.chunk(setting.microbatches), strict=True)
        )
        chunks = [chunks[rank]] if replicas else chunks
        for source, target in chunks:
            with torch.autocast(device.type, torch.bfloat16, enabled=options.precision == "bf16"):
                loss = model.loss(module(source), target) / len(chunks)
            loss.backward()
            losses.append(loss.detach())

    if count > 1 and not replicas:
        stage = PaddedStage(module, rank, count, device)
        schedule = Schedule1F1B(stage, n_microbatches=MICROBATCHES, loss_fn=padded(model.loss))
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=1e-3, weight_decay=0.01, fused=device.type == "cuda"
    )
    losses = []

    def torch_step(number):
        inputs, targets = (tensor.to(device) for tensor in model.batch(0, number, 16))
        losses.clear()
        if count == 1 or replicas:
            plain_loop(inputs, targets)
        else:
            schedule.step(
                *([inputs] if rank == 0 else []), target=targets if rank == count - 1 else None, losses=losses
            )
        gradients = [
            getattr(p.grad, "_local_tensor", p.grad) for p in module.parameters() if p.grad is not None
        ]
        squared = torch.stack(torch._foreach_norm(gradients)).double().square().sum()
        if count == 1:
            float(sum(losses))  # ours reports it, too
        elif not replicas:
            dist.all_reduce(squared)
        else:
            # DDP's gradients are whole on each rank; ours reports the mean loss of the replicas, too.
            told = torch.stack([sum(losses).double(), squared])
            dist.all_reduce(told)
            squared = told[1] if setting.zero_stage else squared
        torch._foreach_mul_(gradients, min(1.0, 1.0 / (float(squared.sqrt()) + 1e-6)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    seconds = {"ours": [], "torch": []}
    wait = torch.cuda.synchronize if device.type == "cuda" else int
    for pair in range(WARM_UP_PAIRS + options.pairs):
        for name in ("ours", "torch") if pair % 2 else ("torch", "ours"):
            if count > 1:
                dist.barrier()
            began = time.perf_counter()
            session.step.train() if name == "ours" else torch_step(pair)
            wait()
            seconds[name].append(time.perf_counter() - began)
    if count > 1:
        dist.barrier()
    if rank == 0:
        results.put({name: values[WARM_UP_PAIRS:] for name, values in seconds.items()})
        channel_thread.close()


def measure(setting, options):
    """Seconds of each step on rank 0, by runtime."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ballast_trainer.preload"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = context.Queue()
    ranks = [
        context.Process(target=rank_main, args=(rank, port, setting, options, results))
        for rank in range(setting.ranks)
    ]
    for process in ranks:
        process.start()
    seconds = results.get(timeout=1800)
    for process in ranks:
        process.join(10)
        if process.is_alive():
            process.kill()
    return seconds


def interval_of_median(values):
    """Its 95 % interval, by bootstrap."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[-51]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--setting", choices=list(SETTINGS))
    parser.add_argument("--device", choices=list(MODELS), default="cpu")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    options = parser.parse_args()
    settings = list(SETTINGS) if options.device == "cpu" else ["alone"]
    for name in [options.setting] if options.setting else settings:
        setting = SETTINGS[name]
        seconds = measure(setting, options)
        pairs = list(zip(seconds["ours"], seconds["torch"], strict=True))
        ratios = [ours / torchs for ours, torchs in pairs]
        line = {
            "benchmark": "trainer_overhead",
            "setting": name,
            "ranks": setting.ranks,
            "layers": setting.layers,
            "device": options.device,
            "precision": options.precision,
            "dim": options.dim,
            "pairs": len(pairs),
            "torch_median_ms": round(statistics.median(seconds["torch"]) * 1000, 2),
            "added_ms": round(statistics.median(ours - torchs for ours, torchs in pairs) * 1000, 2),
            "ratio": round(statistics.median(ratios), 4),
            "interval": [round(end, 4) for end in interval_of_median(ratios)],
            "target": TARGET,
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
