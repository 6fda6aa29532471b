"""``ballast gpus``: the catalogue of GPUs."""

import json
from typing import Any

import click
from ballast_policies.gpus.catalogue import (
    PRECISIONS,
    GpuModel,
    built_in_gpus,
    gpu_named,
    gpu_of_node,
    gpus_containing,
)


@click.command()
@click.argument("product", required=False)
@click.option("--label", "labels", multiple=True, metavar="KEY=VALUE", help="A node's label; repeatable.")
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def gpus(product: str | None, labels: tuple[str, ...], output: str) -> None:
    """List what vendors' data sheets state of their GPUs: memory, FLOP/s, bandwidth, links.

    PRODUCT is a name of the list, or the product that a driver or a node's label names. With --label it
    is the GPU of a node with these labels, NVIDIA's or AMD's. Without either all are listed.
    See docs/planning.md.
    """
    if product is None and not labels:
        shown = list(built_in_gpus())
    elif product is not None and labels:
        raise click.UsageError("PRODUCT and --label are two ways to ask. To fix: give one of them")
    else:
        found = gpu_of_node(_parsed(labels)) if product is None else gpu_named(product)
        if found is None:
            asked = ", ".join(labels) if product is None else product
            meant = gpus_containing(product or "")
            if meant:
                names = ", ".join(gpu.name for gpu in meant)
                raise click.ClickException(f"{asked!r} may be {names}. To fix: choose one of them")
            raise click.ClickException(
                f"{asked!r} is not in the catalogue, which has whole GPUs by full names, as v100-sxm2-16gb. "
                "To fix: choose one that `ballast gpus` lists, or state memoryBytes in the cluster file"
            )
        shown = [found]
    click.echo(json.dumps({"gpus": [_row(gpu) for gpu in shown]}) if output == "json" else _text(shown))


def _parsed(labels: tuple[str, ...]) -> dict[str, str]:
    for label in labels:
        if "=" not in label:
            raise click.UsageError(
                f"--label {label!r} has no '='. To fix: --label nvidia.com/gpu.product=NVIDIA-L4"
            )
    return dict(label.split("=", 1) for label in labels)


def _row(gpu: GpuModel) -> dict[str, Any]:
    return {
        "name": gpu.name,
        "vendor": gpu.vendor,
        "products": list(gpu.products),
        "memoryBytes": gpu.memory_bytes,
        "memoryBytesPerSecond": gpu.memory_bandwidth,
        "flops": dict(gpu.flops),
        "linkBytesPerSecond": gpu.link_bandwidth,
        "source": gpu.source,
        "year": gpu.year,
    }


def _text(shown: list[GpuModel]) -> str:
    head = f"{'GPU':<16} {'GB':>5} {'GB/s':>6} {'links':>6} "
    lines = ["peak TFLOP/s by precision, without sparsity; links: GB/s, both directions", ""]
    lines.append(head + "".join(f"{precision:>8}" for precision in PRECISIONS) + "  source")
    for gpu in shown:
        cells = f"{gpu.name:<16} {_of(gpu.memory_bytes, 1e9):>5} {_of(gpu.memory_bandwidth, 1e9):>6} "
        cells += f"{_of(gpu.link_bandwidth, 1e9):>6} "
        cells += "".join(f"{_of(gpu.flops.get(precision), 1e12):>8}" for precision in PRECISIONS)
        lines.append(f"{cells}  {gpu.source}, {gpu.year}")
    return "\n".join(lines)


def _of(value: float | None, unit: float) -> str:
    return "-" if value is None else f"{value / unit:g}"
