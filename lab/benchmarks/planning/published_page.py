# ruff: noqa: E501 - lines of the page are as long as those of other pages
"""Write lab/docs/published-planners.md: tables of the planners' papers beside what our functions give.

    python lab/benchmarks/planning/published_page.py

Published values are from D. Narayanan's dissertation (tables 2.2, 4.1, 4.2 and section 4.5.1) and AMP's
supplement (tables 6 to 11); nothing is run.
"""

from pathlib import Path

import click
from ballast_lab.ptdp import Transformer, plan_ptdp, training_seconds
from ballast_lab.two_versions import GpuServers
from ballast_policies.planning.partition import PlanningError
from ballast_policies.planning.planners.pipedream import Level, plan_pipedream

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
    ("174.6 B (table 4.2)", 174.6e9, 300e9, 384, 153, 84),
    ("174.6 B (table 4.2)", 174.6e9, 300e9, 768, 149, 43),
    ("174.6 B (table 4.2)", 174.6e9, 300e9, 1536, 141, 23),
    ("529.6 B (table 4.2)", 529.6e9, 300e9, 560, 171, 156),
    ("529.6 B (table 4.2)", 529.6e9, 300e9, 1120, 167, 80),
    ("529.6 B (table 4.2)", 529.6e9, 300e9, 2240, 159, 42),
)
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
CLUSTERS = (("4x4 (A)", (4, 1e10), (4, 1.25e9)), ("2x8 (B)", (8, 2.5e10), (2, 3.125e9)))
AMP = (
    ("6, 7: like GPUs", 1.32, 1.20),
    ("8, 9: unlike GPUs", 1.97, 1.28),
    ("10, 11: unlike layers", 1.89, 1.07),
)


def percent(ours, theirs):
    return f"{100 * (ours / theirs - 1):+.1f} %"


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


def transformer(index):
    return Transformer(layers=LAYERS[index], hidden=HIDDEN[index], sequence=2048, vocabulary=51_200)


def parameters():
    rows = []
    for index, published in enumerate(SIZES):
        ours = transformer(index).parameters / 1e9
        rows.append((LAYERS[index], HIDDEN[index], published, f"{ours:.1f}", percent(ours, published)))
    gpt3 = Transformer(layers=96, hidden=12_288, sequence=2048, vocabulary=51_200).parameters / 1e9
    rows.append((96, 12_288, 174.6, f"{gpt3:.1f}", percent(gpt3, 174.6)))
    return table(("layers", "hidden size", "published, billions", "equation 4.3", "deviation"), rows)


def degrees():
    rows = []
    for index, published in enumerate(SIZES):
        servers = GpuServers(
            gpus=GPUS[index],
            gpus_per_server=8,
            memory_bytes=80e9,
            fast_bandwidth=3e11,
            slow_bandwidth=2.5e10,
        )
        theirs = f"{TENSOR[index]}x{PIPELINE[index]}"
        flops = TERAFLOPS[index] * 1e12
        try:
            (plan,) = plan_ptdp(
                transformer(index), servers, batch_size=BATCH[index], flops_per_second=flops, most=1
            )
        except PlanningError as error:
            rows.append((published, GPUS[index], theirs, f"none: {error}", "", ""))
            continue
        same = (plan.tensor, plan.pipeline) == (TENSOR[index], PIPELINE[index])
        rows.append(
            (
                published,
                GPUS[index],
                theirs,
                f"{plan.tensor}x{plan.pipeline}x{plan.data}",
                plan.microbatch_size,
                "the same" if same else "other",
            )
        )
    head = ("billions", "GPUs", "published t x p", "ours t x p x d", "microbatch", "")
    return table(head, rows)


def days():
    rows = []
    for name, count, tokens, gpus, teraflops, published in DAYS:
        seconds = training_seconds(
            tokens=tokens, parameters=count, gpus=gpus, flops_per_second=teraflops * 1e12
        )
        ours = seconds / DAY
        rows.append((name, gpus, teraflops, published, f"{ours:.1f}", percent(ours, published)))
    return table(("model", "GPUs", "TFLOP/s a GPU", "published days", "equation 4.4", "deviation"), rows)


def vgg():
    """Seconds, weights and outputs of VGG-16's layers, from its shapes: 64 samples, 7 TFLOP/s, fp32."""
    batch, seconds, weights, outputs = 64, [], [], []
    for inputs, channels, side, pooled in CONVOLUTIONS:
        values = 9 * inputs * channels
        seconds.append(3 * 2 * values * side**2 * batch / 7e12)
        weights.append(4.0 * (values + channels))
        outputs.append(4.0 * channels * (side // 2 if pooled else side) ** 2 * batch)
    for inputs, channels in CONNECTED:
        seconds.append(3 * 2 * inputs * channels * batch / 7e12)
        weights.append(4.0 * (inputs + 1) * channels)
        outputs.append(4.0 * channels * batch)
    return seconds, weights, outputs


def pipedream():
    rows = []
    for name, inside, between in CLUSTERS:
        levels = [Level(components=count, bandwidth=speed) for count, speed in (inside, between)]
        plan = plan_pipedream(*vgg(), levels)
        one = plan_pipedream(*vgg(), [Level(components=16, bandwidth=between[1])])
        rows.append((name, "15-1", plan.configuration, one.configuration))
    return table(("servers x GPUs", "published", "ours, two levels", "ours, one level"), rows)


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
300 GB/s inside a server, 25 GB/s a GPU between servers, no interleaving. The published degrees follow the dissertation's take-aways (tensor
parallelism up to the server's size, then pipeline parallelism); our prediction takes the same FLOP/s for any tensor degree and microbatch size.

## PTD-P: days of training (4.5.1, table 4.2)

{days()}

Deviations come mostly from equation 4.4, which leaves out attention and the output layer: for GPT-3 and the trillion the
dissertation uses it too, table 4.2 was computed from measured throughput.

## PipeDream: configurations (table 2.2)

VGG-16, the one model of the table whose layers follow from its published shape:

{pipedream()}

Seconds are FLOPs at an assumed 7 TFLOP/s, 64 samples; links inside servers are assumed (10 GB/s shared PCIe, 25 GB/s NVLink). Over two
levels the recursion uses whole servers for its outer stages, so 15-1 over 4 x 4 GPUs is not among its answers.

Published, without ours, since the profiles of their layers are not printed: ResNet-50 16 (both clusters); AlexNet 15-1; GNMT-16
straight (1x4, 4x4, 2x8); GNMT-8 straight (1x4, 3x4), 16 (2x8); AWD LM straight (1x4); S2VT 2-1-1 (4x1).

## AMP: tables 6 to 11

{amp()}

The best measured step of each table. Ours is missing: the layers' times and the clusters' links of the measurements are not
printed. Our search over AMP's cost model equals brute force on random instances (`tests/policies/planning/planners`).

## Missing

2BW's tables are throughputs measured on V100 GPUs, with profiles that are not printed; the planner's formulas are tested
against brute force.
"""


if __name__ == "__main__":
    PAGE.write_text(page())
    click.echo(f"wrote {PAGE.name}")
