"""``ballast plan --planner best``: how long it takes, how tight its bound is, and whether others are faster.

    python benchmarks/planning/best.py [--instances 200] [--output json]

Seconds are CPU seconds of one search. "Never worse" compares with every plan of the other planners that fits
and that the trainer runs, over random profiles of 2 to 20 layers and clusters of 1 to 12 GPUs of up to three
types, with two levels of links and memory limits, by the one cost model.
"""

import json
import time

import click
import numpy as np
from ballast_operator.cli.plan.input import ClusterInput, known_tensor, reduced_bytes
from ballast_policies.planning.partition import PlanningError
from ballast_policies.planning.planners.best.search import plan_best
from ballast_policies.planning.planners.cost_model import CostModel
from ballast_policies.planning.planners.layout import devices_of
from ballast_policies.planning.planners.registry import PLANNERS, PlanRequest
from ballast_policies.planning.profile import GpuKind, LayerProfile, read_profile
from ballast_policies.planning.schedules.schedule import ScheduleError

A100 = {"gpu_type": "a100", "speed": 2.5, "memory_bytes": 4.0e10}
V100 = {"gpu_type": "v100", "speed": 1.7, "memory_bytes": 3.2e10}
T4 = {"gpu_type": "t4", "speed": 1.0, "memory_bytes": 1.6e10}
SIZES = (
    ("24 layers, 16 GPUs alike", 24, 64, ((A100, 16),)),
    ("24 layers, 16 GPUs of 2 types", 24, 64, ((A100, 8), (T4, 8))),
    ("24 layers, 16 GPUs of 3 types", 24, 64, ((A100, 6), (V100, 6), (T4, 4))),
    ("96 layers, 16 GPUs of 2 types", 96, 64, ((A100, 8), (T4, 8))),
    ("96 layers, 16 GPUs of 3 types", 96, 64, ((A100, 6), (V100, 6), (T4, 4))),
    ("96 layers, 512 GPUs of 3 types", 96, 512, ((A100, 128), (V100, 192), (T4, 192))),
)


def timed(layers, batch, kinds):
    random = np.random.default_rng(0)
    forward = random.uniform(0.008, 0.012, layers)
    profile = LayerProfile(
        forward_seconds=tuple(forward),
        backward_seconds=tuple(2 * forward),
        held_bytes=(8e8,) * layers,
        weight_bytes=(1e8,) * layers,
        activation_bytes=(5e7,) * layers,
        output_bytes=(1e7,) * layers,
    )
    gpus = [GpuKind(count=count, **kind) for kind, count in kinds]
    devices = devices_of(gpus, gpus_per_server=8, inside=1.5e11, between=1.2e10)
    start = time.process_time()
    model = CostModel(profile, (4e7,) * layers, 1, devices)
    found = plan_best(model, batch_size=batch, most_tensor=devices.count)
    return time.process_time() - start, found


def instance(seed):
    """A request on a random profile and cluster."""
    random = np.random.default_rng(seed)
    count = int(random.integers(2, 21))
    zero = random.random(4) < 0.2

    def value(low, high, index=None):
        return 0.0 if index is not None and zero[index] else float(random.uniform(low, high))

    layers = [
        {
            "forwardSeconds": value(0.05, 1),
            "backwardSeconds": value(0.05, 2),
            "heldBytes": value(0, 6),
            "weightBytes": value(0, 5, 0),
            "activationBytes": value(0, 4, 1),
            "outputBytes": value(0, 4, 2),
            "overheadSeconds": value(0, 0.05, 3),
        }
        for _ in range(count)
    ]
    gpus, left = [], int(random.integers(1, 13))
    for name in "abc"[: int(random.integers(1, 4))]:
        if left:
            own = int(random.integers(1, left + 1))
            left -= own
            memory = {"memoryBytes": value(8, 40)} if random.random() < 0.4 else {}
            gpus.append(
                {"type": name, "count": own, "speed": float(random.choice([0.4, 1, 1.7, 2.5])), **memory}
            )
    links = {"insideServer": 20.0, "betweenServers": float(random.choice([1, 3, 20]))}
    total = sum(gpu["count"] for gpu in gpus)
    cluster = ClusterInput.model_validate(
        {
            "gpus": gpus,
            "gpusPerServer": int(random.integers(1, total + 1)),
            **({"bandwidth": links} if random.random() < 0.8 else {}),
        }
    )
    size, microbatches = int(random.choice([1, 1, 2])), int(random.choice([4, 6, 8, 12, 16]))
    read = read_profile({"microbatchSize": size, "layers": layers})
    profile = read.profile(microbatches)
    return PlanRequest(
        profile=profile,
        gpus=tuple(cluster.kinds()),
        bandwidth=cluster.pipeline_bandwidth(cluster.total),
        microbatches=microbatches,
        samples=microbatches * size,
        evaluations=60,
        most_tensor=known_tensor(read, cluster),
        model=CostModel(profile, reduced_bytes(read, microbatches), size, cluster.devices()),
    )


def answered(name, request):
    try:
        return PLANNERS[name].plan(request).content
    except (PlanningError, ScheduleError):
        return None


def compared(seed):
    """(the best step or None, whether it is proven optimal, [(planner, step, refused)])."""
    request = instance(seed)
    best = answered("best", request)
    others = []
    for name in PLANNERS.builtin:
        answer = None if name == "best" else answered(name, request)
        others += [
            (name, plan["stepSeconds"], plan["refused"])
            for plan in (answer or {}).get("plans", [])[:1]
            if plan["fits"]
        ]
    seconds = None if best is None else best["stepSeconds"]
    return seconds, best is not None and best["optimal"], others


@click.command(help=__doc__)
@click.option("--instances", default=200, show_default=True)
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def main(instances, output):
    rows = []
    for name, layers, batch, kinds in SIZES:
        seconds, found = timed(layers, batch, kinds)
        step = found.plans[0][0]
        rows.append(
            {
                "size": name,
                "seconds": round(seconds, 3),
                "stepSeconds": round(step, 4),
                "aboveBoundPercent": round(100 * (step / found.bound - 1), 1),
                "optimal": found.optimal,
            }
        )
        if output == "text":
            click.echo(json.dumps(rows[-1]))
    optimal = plans = 0
    worse = []
    for seed in range(instances):
        best, proven, others = compared(seed)
        optimal += proven
        for name, seconds, refused in others:
            plans += 1
            if best is None or best > seconds * (1 + 1e-9):
                worse.append(
                    {"seed": seed, "planner": name, "best": best, "step": seconds, "refused": refused}
                )
    summary = {
        "benchmark": "planning_best",
        "instances": instances,
        "provenOptimal": optimal,
        "plansCompared": plans,
        "slowerThan": sum(row["refused"] is None for row in worse),
        "slowerThanPlansThatTheTrainerRefuses": sum(row["refused"] is not None for row in worse),
    }
    click.echo(json.dumps({**summary, "rows": rows, "worse": worse} if output == "json" else summary))


if __name__ == "__main__":
    main()
