# ruff: noqa: E501 - lines of the page are as long as those of other pages
"""Write lab/docs/published-planners.md: tables of the planners' papers beside what our functions give.

    python lab/benchmarks/planning/published_page.py

Published values are from D. Narayanan's dissertation (tables 2.2, 4.1, 4.2 and section 4.5.1) and AMP's
supplement (tables 6 to 11). The figures of closed forms print no numbers but those of the text. Nothing is run.
"""

import itertools
from pathlib import Path

import click
from ballast_lab.comparison import Comparison, Point, near, table
from ballast_lab.ptdp import (
    GpuServers,
    Transformer,
    best_checkpoints,
    checkpointed_bytes,
    efficiency,
    plan_ptdp,
    step_seconds,
    training_seconds,
)
from ballast_lab.two_versions import BlockModel, memory_bytes
from ballast_policies.planning.planners.pipedream import Level, plan_pipedream
from pipelines import (
    ETHERNET,
    PCIE,
    Replicated,
    best_cut,
    bubbles,
    bytes_a_sample,
    flushes,
    footprints,
    in_flight,
    interleaved,
    predicted_and_played,
    recomputing,
    stashed_memory,
    vgg,
    without_pipelining,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "published-planners.md"
DAY = 86_400.0
SIZES = (1.7, 3.6, 7.5, 18.4, 39.1, 76.1, 145.6, 310.1, 529.6, 1008.0)
HIDDEN = (2304, 3072, 4096, 6144, 8192, 10240, 12288, 16384, 20480, 25600)
LAYERS = (24, 30, 36, 40, 48, 60, 80, 96, 105, 128)
TENSOR = (1, 2, 4, 8, 8, 8, 8, 8, 8, 8)
PIPELINE = (1, 1, 1, 1, 2, 4, 8, 16, 35, 64)
GPUS = (32, 64, 128, 256, 512, 1024, 1536, 1920, 2520, 3072)
BATCH = (512, 512, 512, 1024, 1536, 1792, 2304, 2160, 2520, 3072)
TERAFLOPS = (137, 138, 142, 135, 138, 140, 148, 155, 163, 163)
DAYS = (
    # Model, parameters, tokens, GPUs, TFLOP/s a GPU, days.
    ("GPT-3 (4.5.1)", 175e9, 300e9, 1024, 140, 34),
    ("1 trillion (4.5.1)", 1008e9, 450e9, 3072, 163, 84),
)
GPT3 = Transformer(layers=96, hidden=12_288, sequence=2048, vocabulary=51_200)
TABLE_42 = (
    # Scheme, billions, batch, GPUs, TFLOP/s a GPU, days.
    ("ZeRO-3", 174.6, 1536, 384, 144, 90),
    ("ZeRO-3", 174.6, 1536, 768, 88, 74),
    ("ZeRO-3", 174.6, 1536, 1536, 44, 74),
    ("ZeRO-3", 529.6, 2560, 640, 138, 169),
    ("ZeRO-3", 529.6, 2240, 1120, 98, 137),
    ("ZeRO-3", 529.6, 2240, 2240, 48, 140),
    ("PTD", 174.6, 1536, 384, 153, 84),
    ("PTD", 174.6, 1536, 768, 149, 43),
    ("PTD", 174.6, 1536, 1536, 141, 23),
    ("PTD", 529.6, 2240, 560, 171, 156),
    ("PTD", 529.6, 2240, 1120, 167, 80),
    ("PTD", 529.6, 2240, 2240, 159, 42),
)
MICROBATCHES, GAIN, HIDDEN_47 = (1, 2, 4, 8, 16), 1.3, 4096
HALF_SPEED = HIDDEN_47 * 16 * (GAIN - 1) / (16 - GAIN)
"""The b h / t at half speed by which a GPU is GAIN times as fast at b = 16 as at 1: figure 4.7 (h = 4096)."""
CLUSTERS = (("4x4 (A)", (4, PCIE), (4, ETHERNET)), ("2x8 (B)", (8, 2.5e10), (2, 3.125e9)))
AMP = (
    ("6, 7: like GPUs", 1.32, 1.20),
    ("8, 9: mixed GPUs", 1.97, 1.28),
    ("10, 11: different layers", 1.89, 1.07),
)


def percent(ours, theirs):
    return f"{100 * (ours / theirs - 1):+.1f} %"


def transformer(index):
    return Transformer(layers=LAYERS[index], hidden=HIDDEN[index], sequence=2048, vocabulary=51_200)


def parameters():
    rows, points = [], []
    for model, published in [
        *((transformer(index), size) for index, size in enumerate(SIZES)),
        (GPT3, 174.6),
    ]:
        ours = model.parameters / 1e9
        rows.append((model.layers, model.hidden, published, f"{ours:.1f}", percent(ours, published)))
        points.append(near(f"{published} billion", published, ours, 0.03))
    head = ("layers", "hidden size", "published, billions", "equation 4.3", "deviation")
    return Comparison(tuple(points), table(head, rows))


def degrees():
    rows, points = [], []
    for index, published in enumerate(SIZES):
        servers = GpuServers(
            gpus=GPUS[index],
            gpus_per_server=8,
            memory_bytes=80e9,
            fast_bandwidth=3e11,
            slow_bandwidth=2.5e10,
        )
        theirs = f"{TENSOR[index]}x{PIPELINE[index]}"
        # What a GPU reaches on large products, if the published degrees at b = 1 reach what is published.
        flops = TERAFLOPS[index] * 1e12 / efficiency(HIDDEN[index] / TENSOR[index], HALF_SPEED)
        (plan,) = plan_ptdp(
            transformer(index),
            servers,
            batch_size=BATCH[index],
            flops_per_second=flops,
            half_speed=HALF_SPEED,
            most=1,
        )
        same = (plan.tensor, plan.pipeline) == (TENSOR[index], PIPELINE[index])
        ours = f"{plan.tensor}x{plan.pipeline}x{plan.data}"
        points.append(Point(f"{published} billion", theirs, float(same), low=1.0, high=1.0))
        rows.append(
            (published, GPUS[index], theirs, ours, plan.microbatch_size, "the same" if same else "other")
        )
    head = ("billions", "GPUs", "published t x p", "ours t x p x d", "microbatch", "")
    return Comparison(tuple(points), table(head, rows))


def days():
    rows, points = [], []
    for name, count, tokens, gpus, teraflops, published in DAYS:
        seconds = training_seconds(
            tokens=tokens, parameters=count, gpus=gpus, flops_per_second=teraflops * 1e12
        )
        ours = seconds / DAY
        points.append(near(name, published, ours, 0.015))
        rows.append((name, gpus, teraflops, published, f"{ours:.1f}", percent(ours, published)))
    head = ("model", "GPUs", "TFLOP/s a GPU", "published days", "equation 4.4", "deviation")
    by_flops = []
    for scheme, billions, batch, gpus, teraflops, published in TABLE_42:
        model = GPT3 if billions < 200 else transformer(SIZES.index(billions))
        steps = 300e9 / (batch * model.sequence)
        ours = steps * model.step_flops(batch) / (gpus * teraflops * 1e12) / DAY
        points.append(near(f"{scheme}, {billions} billion, {gpus} GPUs", published, ours, 0.015))
        by_flops.append(
            (scheme, billions, gpus, teraflops, published, f"{ours:.1f}", percent(ours, published))
        )
    names = ("scheme", "billions", *head[1:4], "equation 4.2", "deviation")
    return Comparison(tuple(points), table(head, rows) + "\n\n" + table(names, by_flops))


def microbatches():
    """Figure 4.8: equation 4.1 with (p, t) = (8, 8), relative to the best microbatch."""
    rows, points = [], []
    for batch in (128, 512):
        seconds = [
            step_seconds(
                batch_per_pipeline=batch,
                microbatch_size=size,
                stages=8,
                microbatch_seconds=size / efficiency(HIDDEN_47 * size, HALF_SPEED),
            )
            for size in MICROBATCHES
        ]
        best = min(seconds)
        ours = MICROBATCHES[seconds.index(best)]
        points.append(Point(f"best b at B = {batch}", "4", ours, low=4, high=4))
        rows.append((batch, 4, ours, *(f"{best / each:.2f}" for each in seconds)))
    head = ("B", "published best b", "ours", *(f"b = {size}" for size in MICROBATCHES))
    return Comparison(tuple(points), table(head, rows))


def configurations(hidden, batches, **fixed):
    """Figures 4.13 to 4.15: by batch, plans of 32 layers on 64 A100s with b = 1 and ``fixed`` degrees, fastest first.

    FLOP/s depend on b h / t as in figure 4.8, and memory decides nothing.
    """
    servers = GpuServers(
        gpus=64, gpus_per_server=8, memory_bytes=1e15, fast_bandwidth=3e11, slow_bandwidth=2.5e10
    )
    found = {}
    for batch in batches:
        plans = plan_ptdp(
            Transformer(layers=32, hidden=hidden, sequence=2048, vocabulary=51_200),
            servers,
            batch_size=batch,
            flops_per_second=2e14,
            half_speed=HALF_SPEED,
            microbatch_sizes=(1,),
            most=1000,
        )
        found[batch] = [
            plan for plan in plans if all(getattr(plan, key) == value for key, value in fixed.items())
        ]
    return found


def tensor_and_pipeline():
    """Figure 4.13."""
    return Comparison(
        tuple(
            Point(f"best t at B = {batch}", "8", plans[0].tensor, low=8, high=8)
            for batch, plans in configurations(20_480, (32, 128), data=1).items()
        )
    )


def against_data():
    """Figures 4.14 and 4.15: replicas are faster than stages, and than tensor ranks, at each size of both."""
    points = []
    for kind, other in (("pipeline", "tensor"), ("tensor", "pipeline")):
        for batch, plans in configurations(3840, (64, 128, 512), **{other: 1}).items():
            sizes = [getattr(plan, kind) for plan in plans if 2 <= getattr(plan, kind) <= 32]
            slower = sum(a < b for a, b in itertools.pairwise(sizes))
            points.append(
                Point(
                    f"B = {batch}: slower with each doubling of the {kind} degree",
                    f"{len(sizes) - 1} of {len(sizes) - 1}",
                    slower,
                    low=len(sizes) - 1,
                    high=len(sizes) - 1,
                )
            )
    return Comparison(tuple(points))


def largest_model():
    """Figure 3.9: the most parameters for which two versions and the activations fit 16 GB, 64 GPUs."""
    rows, points = [], []
    for stages in (1, 2, 4, 8, 16, 32, 64):
        layers, sequence = 96, 512
        fits = [
            count
            for hidden in range(256, 16_384, 64)
            if memory_bytes(
                BlockModel(
                    # fp16 weights and gradients, fp32 masters and Adam.
                    weight_bytes=16.0 * (count := 12 * layers * hidden**2 / 1e9) * 1e9,
                    activation_bytes=34.0 * sequence * hidden * layers,
                    boundary_bytes=2.0 * sequence * hidden,
                ),
                stages,
                1,
                recompute=True,
            )
            <= 16e9
        ]
        rows.append((stages, "almost 30" if stages == 64 else "", f"{max(fits):.1f}"))
    points.append(near("64 stages, billions", 30, max(fits)))
    return Comparison(tuple(points), table(("stages", "published, billions", "ours, billions"), rows))


def recomputed():
    """Section 4.3.5: the checkpoints of a stage that need the least memory, at most one a layer."""
    rows, points = [], []
    for index, published in enumerate(SIZES):
        hidden, tensor, heads = HIDDEN[index], TENSOR[index], HIDDEN[index] / 128
        each, layers = 2.0 * 2048 * hidden, LAYERS[index] // PIPELINE[index]
        inside = 2048 * hidden * (10 + 24 / tensor + 5 * heads * 2048 / hidden / tensor)
        best = best_checkpoints(layers, intermediate_bytes=inside, input_bytes=each)
        count = min(layers, max(1, round(best)))
        held = [
            checkpointed_bytes(layers, c, intermediate_bytes=inside, input_bytes=each) / 1e9
            for c in (count, layers)
        ]
        points.append(
            Point(f"{published} billion, layers a checkpoint", "1 or 2", layers / count, low=1.0, high=2.0)
        )
        rows.append((published, layers, f"{best:.1f}", count, *(f"{size:.2f}" for size in held)))
    head = ("billions", "layers a stage", "c", "checkpoints", "GB with them", "GB with one a layer")
    return Comparison(tuple(points), table(head, rows))


def pipedream():
    rows, points = [], []
    for name, inside, between in CLUSTERS:
        levels = [Level(components=count, bandwidth=speed) for count, speed in (inside, between)]
        plan = plan_pipedream(*vgg(), levels)
        one = plan_pipedream(*vgg(), [Level(components=16, bandwidth=between[1])])
        rows.append((name, "15-1", plan.configuration, one.configuration))
        same = float("15-1" in (plan.configuration, one.configuration))
        points.append(Point(f"15-1 on {name}", "15-1", same, low=1.0, high=1.0))
    alone, chosen = (Replicated((16,), (), ETHERNET), best_cut((15, 1), ETHERNET))
    points.append(near("15-1 over data parallelism, 4x4 (A)", 5.3, alone.predicted / chosen.predicted, 0.2))
    head = ("servers x GPUs", "published", "ours, two levels", "ours, one level")
    return Comparison(tuple(points), table(head, rows))


def amp():
    rows = [(name, megatron, ours, f"{megatron / ours:.2f}") for name, megatron, ours in AMP]
    return table(("tables", "Megatron, seconds", "AMP, seconds", "ratio"), rows)


def page():
    return f"""# Published planners

Written by `python lab/benchmarks/planning/published_page.py`: values that the planners' papers print, beside what our functions
of the same formulas give. The dissertation is D. Narayanan, *Resource-Efficient Execution of Deep Learning Computations*
(2021).

## PTD-P: parameters (table 4.1)

{parameters()}

The last row is GPT-3.

## PTD-P: degrees (table 4.1)

{degrees()}

Ours is the least predicted step of `plan_ptdp` at the published GPUs, batch and FLOP/s, on 8 GPUs of 80 GB a server. Assumed:
300 GB/s inside a server, 25 GB/s a GPU between servers, no interleaving, and FLOP/s that depend on b h / t as figure 4.7 says (1.3 times as many
at b = 16 as at 1, for h = 4096): with the same FLOP/s for all, 2 of the 10 are met. From 145.6 billion on the published runs take 8 x p where
ours cuts the layers over more stages: a tensor degree above a server's half costs more FLOP/s here than a deeper pipeline idles.

## PTD-P: days of training (4.5.1, table 4.2)

{days()}

The text's two examples are of equation 4.4; table 4.2 is the steps' FLOPs over the measured FLOP/s, which are printed in whole TFLOP/s.

## PTD-P: bubble by data-parallel size (figure 4.6)

{bubbles()}

1F1B played on n / d stages, at most 32, with b' / d microbatches: each is (n - d) / b', as the figure's curves. The bubbles of figure 4.4, played:

{interleaved()}

At small batches recomputing costs "up to 33 %" of the sequences a second (figure 4.17); played:

{recomputing()}

## PTD-P: microbatch size (figure 4.8)

{microbatches()}

Speed over that of the best b, by equation 4.1, (p, t) = (8, 8), d = 1. The seconds of a microbatch are not printed: they follow from the 1.3 of figure 4.7.
At B = 128 two and four differ by 2 %.

## PTD-P: degrees against one another (figures 4.13 to 4.15)

{tensor_and_pipeline()}

{against_data()}

`plan_ptdp` on 64 GPUs with the assumptions of table 4.1, b = 1. As there, a tensor degree of 8 costs more FLOP/s here than it did; and the
exchange of gradients, which nothing hides here, outweighs the bubble of a few stages.

## PTD-P: recomputing every c-th layer (4.3.5)

{recomputed()}

For the models of table 4.1, b = 1, in fp16: a layer's input has 2 s h bytes, what is in it s h (10 + 24 / t + 5 a s / (h t)) (Korthikanti et al., 2022), with a = h / 128 heads. "For most
cases, checkpointing every 1 or 2 transformer layers is optimal": here, each layer's input, or for four of the ten fewer of them, which saves at
most 17 % of the activations. So `training.recompute` keeps each layer's input. `recomputeEvery: c` leaves
it to every c-th layer, for less time instead, and is planned: with a backward of two forwards a step is 12 % shorter than with all for c = 2, 19 % for c = 4.

## PipeDream-2BW: the largest model (figure 3.9)

{largest_model()}

By the planner's `2 W / p + A / p + p Ain` with recomputation, b = 1, on 16 GB; 96 blocks, 512 tokens and 16 bytes of weights, gradients and Adam a parameter are assumed.

## PipeDream-2BW: flushes and memory (figures 3.6, 3.7, 3.10, 3.11)

{flushes()}

A GPT of 2.2 billion parameters on 8 equal stages, batches of 512 and 2048 in microbatches of 32 (assumed), played without transfers, which are not
printed: 2BW is then 8 times as fast as one microbatch at a time. How many microbatches GPipe's memory admitted is not printed.

{footprints()}

Closed forms with recomputation, 16 bytes a parameter, microbatch 4 (assumed). By them GPipe's inputs weigh less than 2BW's second version, in the
measurements more, so what else was counted there is unknown.

Table 3.1 and figure 3.5 are of BERT and GPT, pre-trained. `ballast reproduce 2bw-3.5`, 600 steps of a small GPT: the loss of the last quarter
is 1.023 times vanilla's (theirs at the end: 1.005), the curves twice as close as in the first quarter.

## PipeDream: configurations (table 2.2)

VGG-16, the one model of the table whose layers follow from its published shape:

{pipedream()}

Seconds are FLOPs at an assumed 7 TFLOP/s, 64 samples; links inside servers are assumed (10 GB/s shared PCIe, 25 GB/s NVLink). Over two
levels the recursion uses whole servers for its outer stages, so 15-1 over 4 x 4 GPUs is not among its answers. By these seconds 15-1 is 14 times as fast as data parallelism on 4 x 4; measured were 5.3 times.

Published, without ours, since the profiles of their layers are not printed: ResNet-50 16 (both clusters); AlexNet 15-1; GNMT-16
straight (1x4, 4x4, 2x8); GNMT-8 straight (1x4, 3x4), 16 (2x8); AWD LM straight (1x4); S2VT 2-1-1 (4x1).

## PipeDream: figures 2.13 to 2.17

Of VGG-16 as above, and of four equal stages in 2.17, whose GNMT-8 is not printed. The schedules are played.

2.13, 4 GPUs of Cluster-A. By our assumptions 4 GPUs cannot be 15 times as fast as the same 4 without pipelining:

{without_pipelining()}

2.14, 16 GPUs over links of 1.25 GB/s:

{predicted_and_played()}

2.15: the first of four stages holds four versions of the convolutions' outputs, which are most of the memory:

{stashed_memory()}

2.16, two stages on 4 GPUs:

{bytes_a_sample()}

2.17:

{in_flight()}

## AMP: tables 6 to 11

{amp()}

The best measured step of each table. Ours is missing: the layers' times and the clusters' links of the measurements are not
printed. Our search over AMP's cost model equals brute force on random instances (`tests/policies/planning/planners`).

## Missing

`ballast reproduce` lists the other figures of these papers, each with the reason for which it is not made.
"""


if __name__ == "__main__":
    PAGE.write_text(page())
    click.echo(f"wrote {PAGE.name}")
