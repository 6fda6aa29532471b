"""Steps and peak bytes of Sailor's measured plans, predicted from its profiles, links and models alone.

    python -m ballast_lab.sailor --data FOLDER

FOLDER holds files of Sailor's artifact (github.com/eth-easl/sailor, MIT; Strati et al., SOSP 2025), which are
not part of Ballast: ``profiles/MODEL_GPU.json`` (microbatch -> tensor degree -> layer -> seconds of forward,
backward and update), ``multizone_bandwidths_het.json`` and ``measured_plans.json``.

A stage's seconds of a microbatch are those of its slowest replica: its layers, and the transfers of its
boundaries, activations one way and gradients back, which a rank waits for. 1F1B with m microbatches takes
(m - 1) of the slowest stage and one of each; then gradients are all-reduced over the replicas (a ring) and
the weights updated. What the profiles leave out or cannot be is repaired by what they say elsewhere:

- a smaller microbatch takes no longer than a larger one;
- a profile that repeats another model's on the same GPUs, to the last digit, is none: the model's own
  profile on other GPUs is scaled by what the other model's layers say of the two.

Of bytes nothing was profiled. A GPU holds weights, gradients and Adam's state of its part of each layer, and
the activations of the microbatches in flight, after Korthikanti et al., "Reducing Activation Recomputation in
Large Transformer Models" (arXiv:2205.05198), equation 2.
"""

import dataclasses
import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

HALF, FULL = 2, 4
"""Bytes of an activation, and of a gradient as it is all-reduced."""

HELD = 18
"""Bytes a parameter: weight and its master copy, gradient, two numbers of Adam (HALF + 4 x FULL)."""

LOGIT = 14
"""Bytes a word of a token: as HALF and as FULL, log-softmax, gradient."""

RESERVED = 4.5e9
"""Bytes of CUDA, NCCL and the framework on each GPU: what the formula leaves of OPT-350 on one node."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A transformer: width, tokens of a sample, words of its vocabulary, and heads.

    ``score``: bytes of an attention score that are kept: softmax, dropout's mask and output, as HALF.
    """

    width: int
    tokens: int
    words: int
    heads: int
    score: int = 2 * HALF + 1

    def parameters(self, layer: int, last: int) -> float:
        """Of a layer; the first embeds, the last has the same weights again."""
        return self.words * self.width if layer in (0, last) else 12.0 * self.width**2

    def activations(self, layer: int, last: int, tensor: int) -> float:
        """Bytes that one of ``tensor`` GPUs keeps of a layer for the backward of a sample."""
        if layer == 0:
            return 0.0
        if layer == last:
            return LOGIT * self.tokens * self.words / tensor
        scores = self.score * self.heads * self.tokens / self.width
        return self.tokens * self.width * (10 + (24 + scores) / tensor)


SHAPES = {
    "OPT-350": Shape(width=1024, tokens=2048, words=50272, heads=16),
    # Its attention is in float32.
    "GPT-Neo-2.7": Shape(width=2560, tokens=2048, words=50257, heads=20, score=2 * FULL + 1),
    "OPT-30": Shape(width=7168, tokens=2048, words=50272, heads=56),
    "LLAMA-3-8": Shape(width=4096, tokens=2048, words=128256, heads=32),
}
"""As published with the models."""

MODELS = {"GPT-NEO": "GPT-Neo-2.7", "OPT-30/": "OPT-30", "LLAMA": "LLAMA-3-8", "": "OPT-350"}
"""Part of a plan's name -> its model; the first that is in it."""

Layers = Sequence[tuple[float, float, float]]
"""Seconds of forward, backward and update, by layer."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A node with a replica of a stage, of which ``tensor`` GPUs share each layer."""

    gpu: str
    tensor: int
    zone: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A plan with what was measured of it.

    Attributes:
        microbatch, samples: of a replica, and of a step.
        stages: layers of each stage, in order from 0.
        replicas: of each stage, where each replica is.
        seconds: of a step.
        peak: bytes of the fullest GPU; None: not measured.
    """

    name: str
    model: str
    microbatch: int
    samples: int
    stages: tuple[tuple[int, ...], ...]
    replicas: tuple[tuple["Machine", ...], ...]
    seconds: float
    peak: float | None = None

    @property
    def microbatches(self) -> int:
        """Of a step, in each replica."""
        return max(1, self.samples // (self.microbatch * len(self.replicas[0])))


class Profiles:
    """The profiles of a folder, read as they are asked for."""

    def __init__(self, folder: Path) -> None:
        self._tables: dict[tuple[str, str], Mapping[str, Any]] = {}
        for path in sorted(folder.glob("*_*.json")):
            model, _, gpu = path.stem.rpartition("_")
            self._tables[model, gpu] = json.loads(path.read_text(encoding="utf-8"))

    def layers(self, model: str, gpu: str, tensor: int, microbatch: int) -> Layers:
        """Seconds of each layer.

        Raises:
            KeyError: neither the profile nor those that could stand for it have these degrees.
        """
        other = next((one for one in self._models_on(gpu) if self._repeats(model, one, gpu)), None)
        if other is None:
            return self._own(model, gpu, tensor, microbatch)
        for elsewhere in sorted({kind for one, kind in self._tables if one == model} - {gpu}):
            try:
                own = self._own(model, elsewhere, tensor, microbatch)
                here, there = (self._own(other, kind, tensor, microbatch) for kind in (gpu, elsewhere))
            except KeyError:
                continue
            ratio = tuple(_ratio(here, there, part) for part in range(3))
            return [(f * ratio[0], b * ratio[1], u * ratio[2]) for f, b, u in own]
        raise KeyError(f"{model} on {gpu}: its profile is that of {other}, and no other GPU type has both")

    def _models_on(self, gpu: str) -> list[str]:
        return [model for model, kind in self._tables if kind == gpu]

    def _repeats(self, model: str, other: str, gpu: str) -> bool:
        """Whether the profile is another, smaller model's."""
        if other == model or self._tables.get((model, gpu)) != self._tables[other, gpu]:
            return False
        return SHAPES[other].width < SHAPES[model].width

    def _own(self, model: str, gpu: str, tensor: int, microbatch: int) -> Layers:
        table = self._tables.get((model, gpu), {})
        known = sorted(int(size) for size in table if str(tensor) in table[size])
        if microbatch not in known:
            raise KeyError(f"{model} on {gpu}: no profile of microbatch {microbatch}, tensor degree {tensor}")
        rows = [table[str(size)][str(tensor)] for size in known if size >= microbatch]
        return [
            (*(min(row[str(layer)][part] for row in rows) for part in (0, 1)), rows[0][str(layer)][2])
            for layer in range(len(rows[0]))
        ]


def _ratio(here: Layers, there: Layers, part: int) -> float:
    """Of the sums over the layers."""
    return sum(row[part] for row in here) / sum(row[part] for row in there)


class Links:
    """Bytes/s between neighbouring stages or replicas, on different nodes."""

    def __init__(self, folder: Path) -> None:
        text = (folder / "multizone_bandwidths_het.json").read_text(encoding="utf-8")
        self._zones = json.loads(text)

    def bandwidth(self, one: Machine, other: Machine) -> float:
        """Between the two, of all their GPUs together: the slower way.

        Raises:
            KeyError: neither way was measured.
        """
        found = []
        for near, far in ((one, other), (other, one)):
            try:
                there = self._zones[near.zone][near.gpu][str(near.tensor)][far.zone][far.gpu]
                found.append(float(there[str(far.tensor)][1]))
            except KeyError:
                continue
        if not found:
            raise KeyError(f"no link between {one.gpu} in {one.zone} and {other.gpu} in {other.zone}")
        return min(found)


def step_seconds(plan: Measured, profiles: Profiles, links: Links) -> float:
    """Predicted seconds of a step.

    Raises:
        KeyError: a profile or a link is missing; the text says which.
    """
    shape, count = SHAPES[plan.model], len(plan.stages)
    message = HALF * plan.microbatch * shape.tokens * shape.width
    last = plan.stages[-1][-1]
    seconds, ends = [], []
    for number, (layers, replicas) in enumerate(zip(plan.stages, plan.replicas, strict=True)):
        slowest, update = 0.0, 0.0
        for replica, machine in enumerate(replicas):
            known = profiles.layers(plan.model, machine.gpu, machine.tensor, plan.microbatch)
            rows = [_row(known, layer, last) for layer in layers]
            here = sum(forward + backward for forward, backward, _ in rows)
            for beside in (number - 1, number + 1):
                if 0 <= beside < count:
                    others = plan.replicas[beside]
                    here += 2 * message / links.bandwidth(machine, others[replica % len(others)])
            slowest = max(slowest, here)
            update = max(update, sum(row[2] for row in rows))
        seconds.append(slowest)
        ends.append(update + _reduction(plan, layers, replicas, links))
    return (plan.microbatches - 1) * max(seconds) + sum(seconds) + max(ends)


def peak_bytes(plan: Measured) -> float:
    """Predicted bytes of the fullest GPU: of 1F1B, with as many microbatches in flight as stages follow."""
    shape, last = SHAPES[plan.model], plan.stages[-1][-1]
    fullest = 0.0
    for number, (layers, replicas) in enumerate(zip(plan.stages, plan.replicas, strict=True)):
        tensor = min(machine.tensor for machine in replicas)
        held = HELD * sum(shape.parameters(layer, last) for layer in layers) / tensor
        kept = plan.microbatch * sum(shape.activations(layer, last, tensor) for layer in layers)
        fullest = max(fullest, held + min(plan.microbatches, len(plan.stages) - number) * kept)
    return RESERVED + fullest


def _row(known: Layers, layer: int, last: int) -> tuple[float, float, float]:
    """Of a model of which fewer layers were profiled, the one in the middle stands for the others."""
    if layer == last:
        return known[-1]
    return known[layer] if layer < len(known) - 1 else known[len(known) // 2]


def _reduction(plan: Measured, layers: Sequence[int], replicas: Sequence[Machine], links: Links) -> float:
    """Seconds of the all-reduce of a stage's gradients; the shards of a node share its link."""
    shape, n, last = SHAPES[plan.model], len(replicas), plan.stages[-1][-1]
    if n == 1:
        return 0.0
    parameters = sum(shape.parameters(layer, last) for layer in layers)
    if {0, last} <= set(layers):
        parameters -= shape.words * shape.width  # tied
    ring = zip(replicas, (*replicas[1:], replicas[0]), strict=True)
    return 2.0 * (n - 1) / n * FULL * parameters / min(links.bandwidth(*pair) for pair in ring)


def read_plans(text: str) -> list[Measured]:
    """The plans of ``measured_plans.json``.

    Raises:
        ValueError: it is none.
    """
    try:
        return [_plan(name, row) for name, row in json.loads(text).items()]
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"measured_plans.json: {error!r} is not as in Sailor's artifact") from error


def _plan(name: str, row: Mapping[str, Any]) -> Measured:
    pipeline = row["pipeline_list"][0]
    # Layers are listed in order; one that is not (29 for 19) is the one whose place it has.
    places = itertools.count()
    return Measured(
        name=name,
        model=next(model for key, model in MODELS.items() if key in name),
        microbatch=row["mbs"],
        samples=row["gbs"],
        stages=tuple(tuple(next(places) for _ in stage) for stage in pipeline["layers_per_stage"]),
        replicas=tuple(
            tuple(Machine(gpu=on[0][0], tensor=tensor, zone=on[0][2]) for on, tensor in stage)
            for stage in pipeline["tmp_per_stage"]
        ),
        seconds=row["real"],
        peak=row.get("max_mem"),
    )


@click.command()
@click.option(
    "--data",
    "folder",
    required=True,
    metavar="FOLDER",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Files of Sailor's artifact.",
)
def main(folder: Path) -> None:
    """Print the steps and peak bytes of Sailor's measured plans, as predicted and as measured."""
    try:
        plans = read_plans((folder / "measured_plans.json").read_text(encoding="utf-8"))
        profiles, links = Profiles(folder / "profiles"), Links(folder)
    except (OSError, ValueError) as error:
        raise click.ClickException(f"--data: {folder} cannot be read: {error}") from error
    steps, peaks = list[float](), list[float]()
    click.echo(
        f"{'plan':46}{'predicted s':>12}{'measured':>10}{'error':>8}{'GB':>8}{'measured':>10}{'error':>8}"
    )
    for plan in plans:
        line = f"{plan.name:46}"
        try:
            predicted = step_seconds(plan, profiles, links)
        except KeyError as error:
            click.echo(f"{line} not predicted: {error.args[0]}")
            continue
        steps.append(predicted / plan.seconds - 1.0)
        line += f"{predicted:12.3f}{plan.seconds:10.3f}{steps[-1]:8.1%}"
        if plan.peak is not None:
            held = peak_bytes(plan)
            peaks.append(held / plan.peak - 1.0)
            line += f"{held / 1e9:8.2f}{plan.peak / 1e9:10.2f}{peaks[-1]:8.1%}"
        click.echo(line)
    for what, errors in (("steps", steps), ("peak bytes", peaks)):
        if errors:
            each = sorted(map(abs, errors))
            click.echo(
                f"error of {len(each)} {what}: mean {statistics.fmean(each):.1%}, "
                f"median {statistics.median(each):.1%}"
            )


if __name__ == "__main__":
    main()
