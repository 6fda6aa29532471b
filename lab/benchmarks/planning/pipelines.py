"""Figures of the dissertation's chapters 2 to 4 that are of pipelines: played schedules and closed forms.

VGG-16 is the one model of chapter 2 whose layers follow from its published shape: seconds are FLOPs at an
assumed 7 TFLOP/s, 64 samples, fp32; Cluster-A has 4 servers of 4 GPUs on 10 GB/s of shared PCIe (assumed) and
1.25 GB/s between them.
"""

import dataclasses
import functools
import itertools
import math

import numpy as np
from ballast_lab.comparison import Comparison, Point, near, table
from ballast_lab.simulated_steps import simulated_step_seconds
from ballast_lab.two_versions import BlockModel, gpipe_memory_bytes, memory_bytes
from ballast_policies.planning.planners.pipedream import Level, plan_pipedream
from ballast_policies.planning.schedules.builders.asynchronous import pipedream as no_flush
from ballast_policies.planning.schedules.builders.synchronous import one_stage_order
from ballast_policies.planning.schedules.costs import StageCosts
from ballast_policies.planning.schedules.registry import build_schedule
from ballast_policies.planning.schedules.schedule import Kind
from ballast_policies.planning.schedules.simulate import simulate

CONVOLUTIONS = (
    # VGG-16: channels in and out, side of the output, whether a pooling follows.
    (3, 64, 224, False),
    (64, 64, 224, True),
    (64, 128, 112, False),
    (128, 128, 112, True),
    (128, 256, 56, False),
    (256, 256, 56, False),
    (256, 256, 56, True),
    (256, 512, 28, False),
    (512, 512, 28, False),
    (512, 512, 28, True),
    (512, 512, 14, False),
    (512, 512, 14, False),
    (512, 512, 14, True),
)
CONNECTED = ((25_088, 4096), (4096, 4096), (4096, 1000))
SAMPLES = 64
PCIE, ETHERNET = 1e10, 1.25e9
RESNET_50 = (
    (9_536, 200_704),
    (215_808, 802_816),
    (1_219_584, 401_408),
    (7_098_368, 200_704),
    (17_013_736, 0),
)
"""Parameters and outputs of a sample, of its first convolution with pooling and its four groups of blocks."""
RESNET_SAMPLES = 128


@functools.cache
def vgg():
    """Seconds, bytes of weights and bytes of outputs of VGG-16's layers."""
    seconds, weights, outputs = [], [], []
    for inputs, channels, side, pooled in CONVOLUTIONS:
        values = 9 * inputs * channels
        seconds.append(3 * 2 * values * side**2 * SAMPLES / 7e12)
        weights.append(4.0 * (values + channels))
        outputs.append(4.0 * channels * (side // 2 if pooled else side) ** 2 * SAMPLES)
    for inputs, channels in CONNECTED:
        seconds.append(3 * 2 * inputs * channels * SAMPLES / 7e12)
        weights.append(4.0 * (inputs + 1) * channels)
        outputs.append(4.0 * channels * SAMPLES)
    return seconds, weights, outputs


@dataclasses.dataclass(frozen=True)
class Replicated:
    """VGG-16 cut into stages of several GPUs each, over links of one speed."""

    replicas: tuple[int, ...]
    cuts: tuple[int, ...]
    bandwidth: float

    @property
    def spans(self):
        """First layer of each stage, and the end of it."""
        return list(itertools.pairwise((0, *self.cuts, len(vgg()[0]))))

    def costs(self):
        """(seconds of a microbatch, seconds of an exchange of gradients, seconds of a transfer) by stage."""
        seconds, weights, outputs = vgg()
        compute = [sum(seconds[i:j]) for i, j in self.spans]
        exchange = [
            2 * (count - 1) * sum(weights[i:j]) / self.bandwidth
            for count, (i, j) in zip(self.replicas, self.spans, strict=True)
        ]
        return compute, exchange, [outputs[cut - 1] / self.bandwidth for cut in self.cuts]

    @property
    def predicted(self):
        """Seconds a microbatch by the optimizer's equation, in which computing hides exchanges."""
        compute, exchange, transfer = self.costs()
        stages = [max(a, b) / n for a, b, n in zip(compute, exchange, self.replicas, strict=True)]
        return max(*stages, *(2 * each for each in transfer), 0.0)

    @property
    def played(self):
        """Seconds a microbatch in the middle of a run, where a rank computes or exchanges, not both."""
        compute, exchange, transfer = self.costs()
        costs = StageCosts(
            forward=tuple(each / 3 for each in compute),
            backward=tuple(2 * each / 3 for each in compute),
            update=tuple(exchange),
            transfer=tuple(transfer),
            serial_links=True,
        )
        rounds = math.lcm(*self.replicas) * -(-64 // math.lcm(*self.replicas))
        short, long = (
            simulate(no_flush(self.replicas, count), costs).makespan for count in (rounds, 2 * rounds)
        )
        return (long - short) / rounds


def best_cut(replicas, bandwidth):
    """The cut of VGG-16 whose slowest stage is fastest."""
    layers = range(1, len(vgg()[0]))
    every = (
        Replicated(replicas, cuts, bandwidth) for cuts in itertools.combinations(layers, len(replicas) - 1)
    )
    return min(every, key=lambda each: each.predicted)


def predicted_and_played():
    """Figure 2.14: VGG-16 on 16 GPUs, predictions beside the schedule of each configuration played."""
    every = ((16,), (15, 1), (14, 2), (14, 1, 1), (12, 4), (8, 8), (8, 4, 4), (4, 4, 4, 4), (10, 5, 1))
    found = {replicas: best_cut(replicas, ETHERNET) for replicas in every}
    predicted, played = (
        np.array([1 / getattr(each, kind) for each in found.values()]) for kind in ("predicted", "played")
    )
    chosen = every[int(predicted.argmax())]
    return Comparison(
        (
            Point(
                "correlation of predicted with played throughput, 9 configurations",
                "strongly linear",
                float(np.corrcoef(predicted, played)[0, 1]),
                low=0.95,
                high=1.0,
            ),
            Point(
                f"the optimizer's choice ({'-'.join(map(str, chosen))}) over the best played",
                "the best",
                float(played[predicted.argmax()] / played.max()),
                low=0.98,
                high=1.0,
            ),
        )
    )


def without_pipelining():
    """Figure 2.13a: VGG-16 on 4 GPUs of Cluster-A over the same stages without pipelining."""
    straight = best_cut((1, 1, 1, 1), PCIE)
    compute, _, transfer = straight.costs()
    one_at_a_time = sum(compute) + 2 * sum(transfer)
    plan = plan_pipedream(*vgg(), [Level(components=4, bandwidth=PCIE)])
    return Comparison(
        (
            Point(
                "a straight pipeline over model parallelism",
                "2 or more",
                one_at_a_time / straight.played,
                low=2.0,
                high=4.0 * one_at_a_time / sum(compute),
            ),
            near(
                f"PipeDream ({plan.configuration}) over model parallelism",
                14.9,
                one_at_a_time / plan.seconds_per_microbatch,
                0.2,
            ),
        )
    )


def stashed_memory():
    """Figure 2.15: weights, gradients, activations of VGG-16's worst of 4 stages, over data parallelism."""
    _, weights, outputs = vgg()
    straight = best_cut((1, 1, 1, 1), PCIE)
    alone = 2 * sum(weights) + sum(outputs)
    stages = [
        sum(weights[i:j]) + (4 - stage) * (sum(weights[i:j]) + sum(outputs[i:j]))
        for stage, (i, j) in enumerate(straight.spans)
    ]
    return Comparison(
        (Point("worst stage over data parallelism", "on par", max(stages) / alone, low=0.5, high=1.5),)
    )


def bytes_a_sample():
    """Figure 2.16: bytes a sample of the best two stages on 4 GPUs, over data parallelism."""

    def over_data_parallel(weights, outputs, samples):
        def exchanged(part, replicas):
            return 2 * (replicas - 1) * sum(part) / (replicas * samples)

        best = min(
            exchanged(weights[:cut], first)
            + exchanged(weights[cut:], 4 - first)
            + 2 * outputs[cut - 1] / samples
            for first in (1, 2, 3)
            for cut in range(1, len(weights))
        )
        return best / (exchanged(weights, 4))

    _, weights, outputs = vgg()
    resnet = [[4.0 * count for count, _ in RESNET_50], [4.0 * RESNET_SAMPLES * size for _, size in RESNET_50]]
    return Comparison(
        (
            Point("VGG-16", "far less", over_data_parallel(weights, outputs, SAMPLES), low=0.0, high=0.5),
            Point("ResNet-50", "more", over_data_parallel(*resnet, RESNET_SAMPLES), low=1.0, high=10.0),
        )
    )


def in_flight():
    """Figure 2.17: 4 equal stages, a transfer of a fifth of a forward, by microbatches in flight."""
    costs = StageCosts(forward=(1.0,) * 4, backward=(2.0,) * 4, transfer=(0.2,) * 3, serial_links=True)
    rate, held = {}, {}
    for most in (1, 2, 4, 7):
        took = []
        for count in (60, 120):
            depths = [min(most, max(4, most) - stage) for stage in range(4)]
            rows = [tuple(one_stage_order(stage, list(range(count)), depths[stage])) for stage in range(4)]
            trace = simulate(dataclasses.replace(no_flush((1,) * 4, count), actions=tuple(rows)), costs)
            took.append(trace.makespan)
        rate[most] = 60 / (took[1] - took[0])
        steps = [1 if span.action.kind is Kind.FORWARD else -1 for span in trace.spans if span.rank == 0]
        held[most] = max(itertools.accumulate(steps))
    best = max(rate.values())
    return Comparison(
        (
            Point("1 (none) over 7", "least", rate[1] / best, low=0.2, high=0.4),
            Point("throughput, 2 in flight over 7", "less", rate[2] / best, low=0.26, high=0.8),
            Point("4 (NOAM) over 7", "both highest", rate[4] / best, low=0.9, high=1.0),
            near("inputs held by the first stage, 7 over 2", 3.5, held[7] / held[2], 1e-6),
        )
    )


def flushes():
    """Figures 3.6 and 3.10: 2.2 billion parameters on 8 stages, batches of 512 and 2048, microbatch 32."""
    forward, backward, played = (1.0,) * 8, (2.0,) * 8, {}
    for m in (16, 64):
        flush = simulated_step_seconds([m * f for f in forward], [m * b for b in backward], m)
        runs = [
            simulate(
                build_schedule("PipeDream2BW", ranks=8, microbatches=count),
                StageCosts(forward=forward, backward=backward),
            ).makespan
            for count in (128, 256)
        ]
        played[m] = {"flush": flush, "2BW": m * (runs[1] - runs[0]) / 128, "one": m * 8 * 3.0}
    low, high = played[16], played[64]
    return Comparison(
        (
            near("2BW over PipeDream-Flush, small batch", 1.6, low["flush"] / low["2BW"], 0.15),
            near("2BW over PipeDream-Flush, large batch", 1.15, high["flush"] / high["2BW"], 0.05),
            near(
                "what a large batch gains with flushes, over inter-layer parallelism",
                5.3 / 4.1,
                (high["one"] / high["flush"]) / (low["one"] / low["flush"]),
            ),
            near("2BW over inter-layer parallelism", 6.1, high["one"] / high["2BW"], 0.15),
        )
    )


def footprints(hidden=1920, layers=48, sequence=512, stages=8, size=4):
    """Figures 3.7 and 3.11: bytes of the worst of 8 GPUs for 2.2 billion parameters, recomputed."""
    model = BlockModel(
        weight_bytes=16.0 * 12 * layers * hidden**2,
        activation_bytes=34.0 * sequence * hidden * layers,
        boundary_bytes=2.0 * sequence * hidden,
    )
    two = memory_bytes(model, stages, size, recompute=True)
    flush = two - model.weight_bytes / stages
    one = flush - (stages - 1) * model.boundary_bytes * size
    gpipe = gpipe_memory_bytes(model, stages, size, 64 // size)
    return Comparison(
        (
            Point("2BW over PipeDream-Flush", "more", two / flush, low=1.05, high=2.0),
            Point(
                "PipeDream-Flush over inter-layer parallelism",
                "slightly more",
                flush / one,
                low=1.0001,
                high=1.15,
            ),
            Point("GPipe at a batch of 64 over 2BW", "more", gpipe / two, low=1.0, high=9.0),
        )
    )


def interleaved():
    """Figure 4.4: the bubble over the ideal step, (p - 1) / (m v), of the schedules played."""
    points = []
    for ranks, m in ((4, 8), (8, 32)):
        for schedule, chunks in (("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2), ("Interleaved1F1B", 4)):
            stages = ranks * chunks
            seconds = simulated_step_seconds(
                [m / chunks] * stages, [2 * m / chunks] * stages, m, schedule=schedule, chunks=chunks
            )
            what = f"{schedule}, p = {ranks}, m = {m}, v = {chunks}"
            points.append(near(what, (ranks - 1) / (m * chunks), seconds / (3 * m) - 1, 1e-6))
    return Comparison(tuple(points))


def bubbles():
    """Figure 4.6: the bubble of 1F1B played over the ideal step, by data-parallel size: (n - d) / b'."""
    sizes, rows, points = (1, 2, 4, 8, 16, 32, 64), [], []
    for gpus, batch in ((32, 32), (32, 128), (128, 128), (128, 512)):
        row = dict.fromkeys(sizes, "")
        for data in sizes:
            stages, m = gpus // data, batch // data
            if 1 < stages <= 32:
                bubble = simulated_step_seconds([m] * stages, [2 * m] * stages, m) / (3 * m) - 1
                points.append(
                    near(f"n = {gpus}, b' = {batch}, d = {data}", (gpus - data) / batch, bubble, 1e-6)
                )
                row[data] = f"{bubble:.2f}"
        rows.append((gpus, batch, *row.values()))
    return Comparison(tuple(points), table(("n", "b'", *(f"d = {data}" for data in sizes)), rows))


def recomputing():
    """Figure 4.17: sequences/s of 16 stages at a small batch, recomputed over not, played."""
    plain, again = (simulated_step_seconds([4.0] * 16, [4.0 * backward] * 16, 4) for backward in (2, 3))
    return Comparison((Point("batch of 4", "up to 33 % lower", plain / again, low=0.67, high=0.8),))
