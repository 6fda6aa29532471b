"""The speed of a model that has run nowhere, on a GPU type on which nothing has run.

    python -m ballast_lab.unseen --data FOLDER

FOLDER holds ``arena/optimal_iteration_seconds.json`` (github.com/sjtu-epcc/arena, Apache-2.0, EuroSys 2026)
and ``gavel/simulation_throughputs.json`` (github.com/stanford-futuredata/gavel, MIT), which are not part of
Ballast. One of the two is enough.

A step's work follows from the shapes of layers, a GPU's speed from the catalogue (``speed_scales``); what is
left is fitted on what has run: the part of the work that the model's family reaches, and how that changes
with work, GPUs, samples, nodes and parameters a GPU, by least absolute deviations with a ridge. Held out for
each estimate are all runs of the model and all on the GPU type. The interval is that of the same hold-out
within what is left: 90 % of its errors.

More is not to be had from Gavel's three types: the median error of 27 % stays where the model has run on the
other two, and is 26 % where other models have run on the type, because V100s are 0.8 to 2.4 times as fast as
P100s (tenth to ninetieth percentile). With an exponent of the catalogue's speed (of all, by family, by batch
or GPUs), or operations and bandwidth apart, it is 32 to 39 %; with a slope of GPUs by family 27 %.
"""

import dataclasses
import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from ballast_policies.gpus.catalogue import speed_scales
from ballast_policies.throughput.estimator import Estimator
from ballast_policies.throughput.table import built_in_table

COVERED, DEVIATIONS = 0.9, 1.645
"""Part of the errors that an interval has, and how many standard deviations that is."""

SWEEPS, LEAST_ERROR, RIDGE = 25, 0.05, 10.0
"""Fit by reweighted squares: sweeps, errors below which none weighs more, penalty of slopes."""

LEAST_RUNS = 20
"""Fewer runs than this are not fitted."""

TOKENS = 1024
"""Tokens of a sample of Arena's transformers."""

DENSE = {"760M": (1536, 24), "1.3B": (2048, 24), "2.6B": (2560, 32), "6.7B": (4096, 32), "15B": (5120, 48)}
EXPERTS = {"690M": (768, 8), "1.3B": (768, 16), "2.4B": (1024, 16), "10B": (1536, 16), "27B": (2048, 16)}
"""Size -> (width, layers) as in Alpa's suites (Zheng et al., OSDI 2022), from which Arena's models are."""

WORDS, EXPERT_WORDS, GROUP = 51_200, 32_000, 2048
"""Words of the two vocabularies; tokens of a group that is sent to experts by one product of matrices."""

GPUS = {
    "a100": "a100-sxm4-40gb",
    "v100": "v100-sxm2-16gb",
    "a40": "a40-48gb",
    "a10": "a10-24gb",
    "k80": "k80-12gb",
    "p100": "p100-pcie-16gb",
}
"""Names of the tables -> of the catalogue."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A measured step.

    Attributes:
        family, model: the model, and models alike.
        precision: of its operations.
        work: operations of a sample, in a unit of the family's.
        parameters: of the model, 1e9; 1 where they are not known.
        samples: of a step.
        gpus, nodes: of ``gpu_type``.
        seconds: of the step.
    """

    family: str
    model: str
    precision: str
    work: float
    parameters: float
    samples: float
    gpu_type: str
    gpus: int
    nodes: int
    seconds: float


def sample_work(family: str, size: str, parameters: float) -> float:
    """1e12 operations of a sample: forward, recomputed, and twice backward.

    Of a transformer's layer 24 width^2 for each token and 4 tokens width for attention; every second layer of
    a mixture sends each token to two experts, and takes 8 group width to send and bring it back. Wide
    residual networks of one depth and image size do operations in proportion to their parameters.
    """
    if family == "bert" and size in DENSE:
        width, layers = DENSE[size]
        return TOKENS * (4 * layers * (24 * width**2 + 4 * TOKENS * width) + 6 * width * WORDS) / 1e12
    if family == "moe" and size in EXPERTS:
        width, layers = EXPERTS[size]
        attention, experts = 4 * TOKENS * width, 8 * width**2 + 32 * width**2 + 8 * GROUP * width
        both = 24 * width**2 + experts + 2 * attention
        return TOKENS * (4 * layers / 2 * both + 6 * width * EXPERT_WORDS) / 1e12
    return 3 * parameters


def arena(content: Mapping[str, Mapping[str, float | None]]) -> Iterator[Run]:
    """Arena's table: model_size_samples -> number_gpu_nodes_n_devices_d -> seconds; none: it does not fit."""
    for name, shapes in content.items():
        found = re.fullmatch(r"(\w+)_([\d.]+)([MB])_(\d+)", name)
        for shape, seconds in shapes.items() if found else ():
            _, gpu, nodes, _, devices, _ = shape.split("_")
            if found is None or seconds is None or not seconds > 0:
                continue
            parameters = float(found[2]) * (1.0 if found[3] == "B" else 1e-3)
            yield Run(
                family=found[1],
                model=f"{found[1]} {found[2]}{found[3]}",
                precision="fp32" if found[1] == "wide_resnet" else "fp16",
                work=sample_work(found[1], found[2] + found[3], parameters),
                parameters=parameters,
                samples=float(found[4]),
                gpu_type=gpu,
                gpus=int(nodes) * int(devices),
                nodes=int(nodes),
                seconds=float(seconds),
            )


def gavel(content: Mapping[str, Mapping[str, Any]]) -> Iterator[Run]:
    """Gavel's table: gpu -> (model (batch size N), GPUs) -> steps/s alone. A batch size is a model."""
    for gpu in ("k80", "p100", "v100"):
        for name, rates in content.get(gpu, {}).items():
            found = re.fullmatch(r"\('(.*?)(?: \(batch size (\d+)\))?', (\d+)\)", name)
            if found is None or not rates["null"] > 0:
                continue
            yield Run(
                family=found[1],
                model=f"{found[1]} {found[2] or ''}",
                precision="fp32",
                work=1.0,
                parameters=1.0,
                samples=float(found[2] or 1) * int(found[3]),
                gpu_type=gpu,
                gpus=int(found[3]),
                nodes=1,
                seconds=1.0 / rates["null"],
            )


class Fit:
    """Model fitted on runs: the logarithm of a step over what work and catalogue say of it."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._families = sorted({run.family for run in runs})
        rows, left = self._rows(runs), _left(runs)
        penalty = np.diag([0.01] * len(self._families) + [RIDGE] * (rows.shape[1] - len(self._families)))
        weights = np.ones(len(left))
        for _ in range(SWEEPS):
            weighted = rows * weights[:, None]
            self._factors = np.linalg.solve(weighted.T @ rows + penalty, weighted.T @ left)
            weights = 1 / np.maximum(np.abs(left - rows @ self._factors), LEAST_ERROR)

    def errors(self, runs: Sequence[Run]) -> np.ndarray:
        """(runs,) logarithm of the estimated over the measured seconds."""
        found: np.ndarray = self._rows(runs) @ self._factors - _left(runs)
        return found

    def _rows(self, runs: Sequence[Run]) -> np.ndarray:
        return np.array(
            [
                [
                    *(float(run.family == family) for family in self._families),
                    np.log(run.work / 10),
                    np.log(run.gpus),
                    np.log(run.samples / 256),
                    np.log(run.nodes),
                    np.log(run.parameters / run.gpus),
                ]
                for run in runs
            ]
        )


def _left(runs: Sequence[Run]) -> np.ndarray:
    names = sorted({GPUS[run.gpu_type] for run in runs})
    scales = {precision: speed_scales(names, precision) for precision in ("fp16", "fp32")}
    speeds = np.array([scales[run.precision][GPUS[run.gpu_type]] / 1e12 for run in runs])
    work = np.array([run.work * run.samples / run.gpus for run in runs])
    seconds = np.array([run.seconds for run in runs])
    found: np.ndarray = np.log(seconds * speeds / work)
    return found


def held_out(runs: Sequence[Run]) -> Iterator[tuple[list[Run], list[Run]]]:
    """(runs of one model on one GPU type, runs of other models on other GPU types), where both are there."""
    for gpu_type, model in sorted({(run.gpu_type, run.model) for run in runs}):
        test = [run for run in runs if (run.gpu_type, run.model) == (gpu_type, model)]
        rest = [run for run in runs if run.gpu_type != gpu_type and run.model != model]
        if {run.family for run in test} <= {run.family for run in rest} and len(rest) >= LEAST_RUNS:
            yield test, rest


def figures(runs: Sequence[Run]) -> dict[str, Any]:
    """Median error, part of the runs that their interval has, and its median width, over all hold-outs."""
    errors, inside, widths = [], [], []
    for test, rest in held_out(runs):
        inner = [np.abs(Fit(left).errors(held)) for held, left in held_out(rest)]
        if not inner:
            continue
        found = Fit(rest).errors(test)
        width = float(np.quantile(np.concatenate(inner), COVERED))
        errors += np.abs(np.expm1(found)).tolist()
        inside += (np.abs(found) <= width).tolist()
        widths.append(width)
    return {
        "runs": len(errors),
        "median_error": statistics.median(errors) if errors else None,
        "covered": statistics.fmean(inside) if inside else None,
        "interval_factor": float(np.exp(statistics.median(widths))) if widths else None,
    }


def estimated() -> dict[str, Any]:
    """The same of the operator's estimator: models known on two of Gavel's GPU types, not on the third."""
    table, names = built_in_table(), ("k80", "p100", "v100")
    errors, inside = [], []
    for held in names:
        rates = {name: {} if name == held else dict(table.alone_rates[name]) for name in names}
        known = [t for t in table.alone_rates[held] if all(table.alone(t, name) > 0 for name in names)]
        estimator = Estimator(
            profiles=dataclasses.replace(table, alone_rates=rates),
            gpu_types=names,
            types={str(number): each for number, each in enumerate(known)},
        )
        alone = estimator.every_job_alone()
        for number, each in enumerate(known):
            estimate = alone[str(number)][held]
            ratio = estimate.steps_per_second / table.alone(each, held)
            errors.append(abs(ratio - 1))
            inside.append(abs(np.log(ratio)) <= DEVIATIONS * estimate.deviation)
    return {
        "runs": len(errors),
        "median_error": statistics.median(errors),
        "covered": statistics.fmean(inside),
        "interval_factor": None,
    }


@click.command()
@click.option("--data", required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def main(data: Path, output: str) -> None:
    """Median error and coverage of speeds whose model and GPU type were both held out."""
    tables = {
        "arena": (data / "arena" / "optimal_iteration_seconds.json", arena),
        "gavel": (data / "gavel" / "simulation_throughputs.json", gavel),
    }
    found = {}
    for name, (path, read) in tables.items():
        for file in (path, data.parent / name / path.name):
            if file.is_file() and name not in found:
                try:
                    runs = list(read(json.loads(file.read_text())))
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise click.ClickException(f"--data: {file} cannot be read: {error!r}") from error
                if unknown := {run.gpu_type for run in runs} - GPUS.keys():
                    raise click.ClickException(f"--data: {file}: {sorted(unknown)} are none of {list(GPUS)}")
                found[name] = figures(runs)
    if not found:
        raise click.ClickException(
            f"{data} has none of {', '.join(str(path) for path, _ in tables.values())}"
        )
    found["estimator"] = estimated()
    if output == "json":
        click.echo(json.dumps(found, indent=2))
        return
    for name, row in found.items():
        if not row["runs"]:
            click.echo(f"{name}: nothing can be held out")
            continue
        factor = row["interval_factor"]
        within = "" if factor is None else f" (within a factor of {factor:.2f})"
        click.echo(
            f"{name}: {row['runs']} runs, median error {row['median_error']:.1%}; "
            f"the 90 % intervals{within} have {row['covered']:.1%}"
        )


if __name__ == "__main__":
    main()
