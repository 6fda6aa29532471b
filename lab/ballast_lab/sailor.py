"""Steps and peak bytes of Sailor's measured plans, predicted from its profiles, links and models alone.

    python -m ballast_lab.sailor --data FOLDER

FOLDER holds files of Sailor's artifact (github.com/eth-easl/sailor, MIT; Strati et al., SOSP 2025), which are
not part of Ballast: ``profiles/MODEL_GPU.json`` (microbatch -> tensor degree -> layer -> seconds of forward,
backward and update), ``multizone_bandwidths_het.json`` and ``measured_plans.json``.

Steps and bytes are those of the planners' cost model (``planners.cost_model``), a node being one GPU,
except that a rank waits for what it sends and receives; gradients are reduced as FULL, those of the embedding
also between the first and the last stage, which both have it (DeepSpeed's tied layers). A profile that
repeats another model's on the same GPUs, to the last digit, is none: the model's own on other GPUs is scaled
by what the other model's layers say of the two.

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
import numpy as np
from ballast_policies.planning.gpu_profiles import GpuProfiles
from ballast_policies.planning.planners.cost_model import CostModel, Degrees
from ballast_policies.planning.planners.layout import Devices, Layout
from ballast_policies.planning.planners.one_f_one_b import backward_ends
from ballast_policies.planning.planners.plan_memory import PlanMemory
from ballast_policies.planning.profile import LayerProfile, ProfiledLayer
from ballast_policies.planning.schedules.registry import DEFAULT_SCHEDULE

from ballast_lab.comparison import Comparison, Point

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
        """Parameters of a layer; the first embeds, the last has the same weights again."""
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
"""Shapes as published with the models."""

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

    @property
    def name(self) -> str:
        """Name as a GPU type of :class:`Devices`."""
        return f"{self.tensor} x {self.gpu} in {self.zone}"


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
        """Microbatches of a step, in each replica."""
        return max(1, self.samples // (self.microbatch * len(self.replicas[0])))

    def layout(self) -> Layout:
        """Each node as one GPU, which does what its GPUs do together."""
        nodes = itertools.count()
        return Layout.of(
            (0, *(layers[-1] + 1 for layers in self.stages)),
            (tuple((next(nodes),) for _ in replicas) for replicas in self.replicas),
            microbatch_size=self.microbatch,
            microbatches=self.microbatches * len(self.replicas[0]),
        )


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
        """True if the profile is another, smaller model's."""
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
    """Ratio of the sums over the layers; 1 where ``there`` has none: some profiles have no updates."""
    total = sum(row[part] for row in there)
    return sum(row[part] for row in here) / total if total > 0 else 1.0


class Links:
    """Bytes/s between neighbouring stages or replicas, on different nodes."""

    def __init__(self, folder: Path) -> None:
        text = (folder / "multizone_bandwidths_het.json").read_text(encoding="utf-8")
        self._zones = json.loads(text)

    def bandwidth(self, one: Machine, other: Machine) -> float:
        """Bandwidth between the two, of all their GPUs together: the slower way.

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
    shape, last, layout = SHAPES[plan.model], plan.stages[-1][-1], plan.layout()
    machines = [machine for stage in plan.replicas for machine in stage]
    measured = {
        (machine.name, 1, plan.microbatch): tuple(
            ProfiledLayer(forward_seconds=forward, backward_seconds=backward, optimizer_seconds=update)
            for forward, backward, update in _rows(plan, profiles, machine)
        )
        for machine in set(machines)
    }
    reduced = [FULL * shape.parameters(layer, last) for layer in range(last + 1)]
    if len(plan.stages) == 1:
        reduced[last] = 0.0  # tied to the first
    profile = _profile(plan, weights=reduced)
    rings = [zip(stage, (*stage[1:], stage[0]), strict=True) for stage in plan.replicas if len(stage) > 1]
    neighbours = list(itertools.chain.from_iterable(rings))
    around = zip(plan.replicas, (*plan.replicas[1:], plan.replicas[0]), strict=True)
    for here, there in around if len(plan.stages) > 1 else ():
        longest = range(max(len(here), len(there)))
        neighbours += [(here[k % len(here)], there[k % len(there)]) for k in longest]
    between: dict[tuple[str, str], float] = {}
    for one, other in neighbours:
        names = (min(one.name, other.name), max(one.name, other.name))
        between[names] = min(between.get(names, float("inf")), links.bandwidth(one, other))
    devices = Devices(
        types=tuple(machine.name for machine in machines),
        speeds=(1.0,) * len(machines),
        memory=(float("inf"),) * len(machines),
        servers=tuple(range(len(machines))),
        between_of=between,
    )
    model = CostModel(
        profile, (0.0,) * profile.layers, plan.microbatch, devices, measured=GpuProfiles(measured)
    )
    gpus = model.stage_gpus(tuple(stage.groups for stage in layout.stages))
    times = model.times(
        Degrees(1, 1, plan.microbatch, plan.microbatches),
        gpus,
        np.array([layout.bounds]),
        np.array(layout.replicas),
    )
    # A rank of theirs waits for what it sends and receives.
    waits = np.pad(times.transfer, ((0, 0), (0, 1))) + np.pad(times.transfer, ((0, 0), (1, 0)))
    ends = backward_ends(
        times.forward + waits, times.backward + waits, np.zeros_like(times.transfer), plan.microbatches
    )
    if len(plan.stages) > 1:
        link = devices.link((layout.stages[0].gpus[0], layout.stages[-1].gpus[0]))
        ends[:, [0, -1]] = ends[:, [0, -1]].max() + reduced[0] / link
    return float((ends + times.exchange).max())


def peak_bytes(plan: Measured) -> float:
    """Predicted bytes of the fullest GPU."""
    shape, last, layout = SHAPES[plan.model], plan.stages[-1][-1], plan.layout()
    fullest = 0.0
    for number, replicas in enumerate(plan.replicas):
        tensor = min(machine.tensor for machine in replicas)
        profile = _profile(
            plan,
            weights=[HALF * shape.parameters(layer, last) / tensor for layer in range(last + 1)],
            held=[HELD * shape.parameters(layer, last) / tensor for layer in range(last + 1)],
            kept=[plan.microbatch * shape.activations(layer, last, tensor) for layer in range(last + 1)],
        )
        taken = PlanMemory(profile, plan.microbatch).of_layout(layout, DEFAULT_SCHEDULE)
        fullest = max(fullest, float(taken[number]))
    return RESERVED + fullest


def _profile(
    plan: Measured,
    *,
    weights: Sequence[float],
    held: Sequence[float] | None = None,
    kept: Sequence[float] | None = None,
) -> LayerProfile:
    """Layers of one microbatch, whose seconds are measured elsewhere."""
    shape, none = SHAPES[plan.model], (0.0,) * len(weights)
    return LayerProfile(
        forward_seconds=none,
        backward_seconds=none,
        held_bytes=tuple(held or weights),
        weight_bytes=tuple(weights),
        activation_bytes=tuple(kept or none),
        output_bytes=(float(HALF * plan.microbatch * shape.tokens * shape.width),) * len(weights),
    )


def _rows(plan: Measured, profiles: Profiles, machine: Machine) -> Layers:
    last = plan.stages[-1][-1]
    known = profiles.layers(plan.model, machine.gpu, machine.tensor, plan.microbatch)
    return [_row(known, layer, last) for layer in range(last + 1)]


def _row(known: Layers, layer: int, last: int) -> tuple[float, float, float]:
    """Row of a layer; where fewer were profiled, the one in the middle stands for the others."""
    if layer == last:
        return known[-1]
    return known[layer] if layer < len(known) - 1 else known[len(known) // 2]


def read_plans(text: str) -> list[Measured]:
    """The plans of ``measured_plans.json``.

    Raises:
        ValueError: it is none.
    """
    try:
        plans = [_plan(name, row) for name, row in json.loads(text).items()]
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"measured_plans.json: {error!r} is not as in Sailor's artifact") from error
    if not plans:
        raise ValueError("measured_plans.json has no plan")
    return plans


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
def main(folder: Path) -> Comparison:
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
    points = [Point("plans predicted", f"{len(plans)}", len(steps), low=len(plans), high=len(plans))]
    for what, errors in (("steps", steps), ("peak bytes", peaks)):
        if errors:
            each = sorted(map(abs, errors))
            click.echo(
                f"error of {len(each)} {what}: mean {statistics.fmean(each):.1%}, "
                f"median {statistics.median(each):.1%}"
            )
            mean = statistics.fmean(each)
            points.append(Point(f"mean error of {what}", "0", mean, low=0.0, high=0.1))
    return Comparison(tuple(points), "Band: a mean error of at most 10 %.")


if __name__ == "__main__":
    main()
