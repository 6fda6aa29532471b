"""PipeDream, 2BW and PTD-P over any profile."""

import itertools
from math import ceil

import numpy as np
import pytest
from ballast_policies.planning.memory.measured_layers import PipelineForm
from ballast_policies.planning.memory.rank_bytes import LayerSums, rank_bytes
from ballast_policies.planning.partition import Partition, PlanningError, even_partition
from ballast_policies.planning.planners.amp import (
    Grid,
    microbatch_sizes,
    search,
    step_seconds,
    tilings,
)
from ballast_policies.planning.planners.cost_model import CostModel
from ballast_policies.planning.planners.layout import Layout, devices_of
from ballast_policies.planning.planners.pipedream import DeviceMemory, Level, plan_pipedream
from ballast_policies.planning.planners.published import megatron_candidates, two_versions_candidates
from ballast_policies.planning.profile import GpuKind
from ballast_policies.planning.schedules.registry import SCHEDULES, build_schedule
from ballast_policies.planning.schedules.validate import validate

from tests.policies.planning.planners.random_instances import random_model, random_profile
from tests.support.examples import first_daily


def pipelines(layers, first, end, components):
    """Every cut of layers first..end-1 with every split of the components: [(first, end, replicas)]."""
    for parts in range(1, min(end - first, components) + 1):
        for cuts in itertools.combinations(range(first + 1, end), parts - 1):
            for split in itertools.combinations(range(1, components), parts - 1):
                bounds, shares = (first, *cuts, end), (0, *split, components)
                yield [(bounds[i], bounds[i + 1], shares[i + 1] - shares[i]) for i in range(parts)]


class PipeDream:
    """The slowest stage of the best pipeline, by trying all pipelines of pipelines."""

    def __init__(self, seconds, weights, outputs, levels, memory, held_and_kept):
        self.seconds, self.weights, self.outputs = seconds, weights, outputs
        self.levels, self.memory, self.bytes = levels, memory, held_and_kept

    def best(self, level, first, end, copies, after):
        """``copies`` of it exist, and ``after`` ranks come after them all."""
        if level == 0:
            active = ceil((after + copies) / copies)
            held, kept, weights = (sum(each[first:end]) for each in (*self.bytes, self.weights))
            kept += self.outputs[end - 1]
            # Gradients are there from a backward to the update right after it, but for one rank alone.
            step = active * kept - min(weights, held) * (after + copies > 1)
            messages = [self.outputs[at - 1] for at in (first, end) if 0 < at < len(self.outputs)]
            taken = held + (active - 1) * weights + max(0.0, step, (active - 1) * kept)
            taken += 2 * max(messages, default=0.0)
            return sum(self.seconds[first:end]) if taken <= self.memory.limit else float("inf")
        components, bandwidth = self.levels[level - 1].components, self.levels[level - 1].bandwidth
        below = int(np.prod([each.components for each in self.levels[: level - 1]]))
        least = float("inf")
        for stages in pipelines(len(self.seconds), first, end, components):
            worst, used = 0.0, 0
            for a, b, replicas in stages:
                used += replicas
                later = after + copies * (components - used) * below
                compute = self.best(level - 1, a, b, copies * replicas, later)
                exchange = 2 * (replicas - 1) * sum(self.weights[a:b]) / bandwidth
                worst = max(worst, max(compute, exchange) / replicas)
                if b < end:
                    worst = max(worst, 2 * self.outputs[b - 1] / bandwidth)
            least = min(least, worst)
        return least


@pytest.mark.parametrize("seed", first_daily(range(40), 10))
def test_pipedream_within_memory_equals_brute_force(seed):
    """Servers of GPUs; stages hold a version of the weights for each microbatch in flight."""
    random = np.random.default_rng(seed)
    layers = int(random.integers(1, 6))
    seconds, outputs, kept = (random.uniform(0.1, 5, layers).tolist() for _ in range(3))
    held = random.uniform(0.1, 9, layers)
    weights = (held * random.uniform(0.1, 0.5, layers)).tolist()
    sums = LayerSums(held=held, weights=weights, activations=kept, outputs=outputs)
    levels = [
        Level(components=int(random.integers(1, 4)), bandwidth=20.0),
        Level(components=int(random.integers(1, 3)), bandwidth=float(random.uniform(0.5, 10))),
    ]
    memory = DeviceMemory(limit=float(random.uniform(5, 90)), layers=sums)
    want = PipeDream(seconds, weights, outputs, levels, memory, (held, kept)).best(2, 0, layers, 1, 0)
    if np.isinf(want):
        with pytest.raises(PlanningError, match="weight versions and activations"):
            plan_pipedream(seconds, weights, outputs, levels, memory)
        return
    plan = plan_pipedream(seconds, weights, outputs, levels, memory)
    assert plan.seconds_per_microbatch == pytest.approx(want, rel=1e-9)
    gpus = [gpu for stage in plan.stages for gpu in stage.gpus]
    assert sorted(gpus) == list(range(levels[0].components * levels[1].components))
    cut = Partition(bounds=(0, *(stage.end_layer for stage in plan.stages)))
    replicas = tuple(stage.replicas for stage in plan.stages)
    # Enough microbatches that the pipeline fills, and that every stage's replicas share evenly.
    schedule = build_schedule("PipeDream", ranks=len(gpus), microbatches=60, replicas=replicas)
    if len(gpus) == 1:
        schedule = build_schedule("1F1B", ranks=1, microbatches=60)
    form = PipelineForm(schedule="PipeDream", positions=len(gpus), microbatches=60)
    for taken in rank_bytes(cut, schedule, validate(schedule), sums, form):
        assert taken.total <= memory.limit * (1 + 1e-9)


@pytest.mark.parametrize("seed", first_daily(range(25), 8))
def test_amp_on_mixed_devices_within_their_memory_equals_brute_force(seed):
    """Every degree, tiling, microbatch size and cut; each device with its own speed and memory."""
    random = np.random.default_rng(seed)
    rows, columns = map(int, random.choice([(2, 2), (4, 1), (2, 3), (3, 1)]))
    memory = (lambda: float(random.uniform(10, 60))) if seed % 4 else (lambda: None)
    kinds = [
        GpuKind(gpu_type=f"{i}", count=1, speed=float(random.choice([0.5, 1.0, 2.5])), memory_bytes=memory())
        for i in range(rows * columns)
    ]
    profile = random_profile(random, int(random.integers(1, 6)))
    reduced = tuple(random.uniform(0, 3, profile.layers).tolist())
    devices = devices_of(kinds, gpus_per_server=rows, inside=20.0, between=2.0)
    grid = Grid(CostModel(profile, reduced, 1, devices))
    n, count = grid.cells, profile.layers
    batch, best = int(random.choice([1, 2, 4, 6])), float("inf")
    for tensor, data in itertools.product(range(1, n + 1), repeat=2):
        if n % (tensor * data) or n // (tensor * data) > count or batch % data:
            continue
        stages = n // (tensor * data)
        for placement in tilings(grid.rows, grid.columns, tensor=tensor, data=data):
            for size in microbatch_sizes(batch, data):
                for cuts in itertools.combinations(range(1, count), stages - 1):
                    layout = Layout.of(
                        (0, *cuts, count),
                        grid.gpus(placement),
                        microbatch_size=size,
                        microbatches=batch // size,
                    )
                    best = min(best, step_seconds(layout, grid.model))
    if np.isinf(best):
        with pytest.raises(PlanningError):
            search(grid, batch_size=batch, evaluations=2000)
        return
    found = search(grid, batch_size=batch, evaluations=2000)
    assert found.plans[0][0] == pytest.approx(best, rel=1e-9)


def stage_values(model, stages, tensor, data, size, recompute):
    """Of even stages, by hand: seconds of a microbatch, to send, to exchange; bytes; memory."""
    bounds = even_partition(model.layers, stages).bounds
    profile, devices, scale = model.profile, model.devices, size / model.profiled_size
    group = tensor * data
    reduced = np.diff(model.R)
    values = []
    for i in range(stages):
        own, layers = range(i * group, (i + 1) * group), range(bounds[i], bounds[i + 1])
        teams = [own[k * tensor : (k + 1) * tensor] for k in range(data)]
        link = min(devices.link(team) for team in teams)
        peers = min(devices.link(own[j::tensor]) for j in range(tensor))
        speed, memory = min(devices.speeds[g] for g in own), min(devices.memory[g] for g in own)
        ring = (tensor - 1) / tensor * scale * sum(reduced[j] for j in layers) / link
        forward = backward = ring
        for j in layers:
            whole = profile.forward_seconds[j] + profile.backward_seconds[j]
            fixed = profile.overhead_seconds[j] / whole
            work = (1 - fixed) * scale / tensor + fixed
            forward += profile.forward_seconds[j] * work / speed
            backward += profile.backward_seconds[j] * work / speed
        sent = 0.0
        if i + 1 < stages:
            pairs = zip(own, range((i + 1) * group, (i + 2) * group), strict=True)
            sent = scale * profile.output_bytes[bounds[i + 1] - 1] / min(devices.link(p) for p in pairs)
        exchanged = 2 * (data - 1) / data * sum(profile.weight_bytes[j] for j in layers) / tensor / peers
        seconds = forward * (2 if recompute else 1) + backward
        values.append((seconds, sent, exchanged, memory))
    return values


def stages_fit(model, stages, degrees, microbatches, recompute, schedule, memory):
    """Whether even stages fit, by playing the schedule of one pipeline."""
    tensor, data, size = degrees
    profile, scale = model.profile, size / model.profiled_size
    inputs = (0.0, *profile.output_bytes[:-1])
    kept = scale * np.array(profile.activation_bytes) / tensor
    sums = LayerSums(
        held=np.array(profile.held_bytes) / tensor,
        weights=np.array(profile.weight_bytes) / tensor,
        activations=scale * np.array(inputs) if recompute else kept,
        outputs=scale * np.array(profile.output_bytes),
        repeated=kept if recompute else (),
    )
    if stages == 1 or schedule == "1F1B":
        played = build_schedule("1F1B", ranks=stages, microbatches=microbatches)
    else:
        played = SCHEDULES[schedule].build_run(stages, microbatches, 3)
    form = PipelineForm(schedule=schedule, positions=stages, microbatches=microbatches, averaged=data > 1)
    taken = rank_bytes(even_partition(model.layers, stages), played, validate(played), sums, form)
    return all(each.total <= limit * (1 + 1e-9) for each, limit in zip(taken, memory, strict=True))


@pytest.mark.parametrize("seed", first_daily(range(40), 10))
def test_2bw_and_megatron_equal_brute_force(seed):
    """Their formulas written out again, over every configuration that fits the memory."""
    random = np.random.default_rng(seed)
    model = random_model(random, most_gpus=6, most_layers=6)
    batch, n = int(random.choice([2, 4, 6, 8])), model.devices.count
    two_versions, megatron = float("inf"), float("inf")
    degrees = range(1, n + 1)
    for tensor, data, stages, size in itertools.product(degrees, degrees, degrees, range(1, batch + 1)):
        if stages > model.layers or tensor * data * stages > n or batch % (data * size):
            continue
        m = batch // (data * size)
        for recompute in (False, True):
            values = stage_values(model, stages, tensor, data, size, recompute)
            seconds, sent, exchanged, memory = map(list, zip(*values, strict=True))
            asked = (model, stages, (tensor, data, size), m, recompute)
            if tensor == 1 and m >= stages:
                arriving = [(sent[i - 1] if i else 0) + sent[i] for i in range(stages)]
                if stages_fit(*asked, "PipeDream2BW", memory):
                    period = max(max(seconds[i] + arriving[i], exchanged[i] / m) for i in range(stages))
                    two_versions = min(two_versions, m * period)
            if recompute and tensor * data * stages == n and m >= stages:
                if not stages_fit(*asked, "1F1B", memory):
                    continue
                filled = (m + stages - 1) * max(seconds) + 2 * (stages - 1) * max(sent)
                megatron = min(megatron, filled + max(exchanged))
    for want, plan in (
        (two_versions, lambda: two_versions_candidates(model, batch_size=batch, most=1)),
        (megatron, lambda: megatron_candidates(model, batch_size=batch, most=1, most_tensor=n)),
    ):
        if np.isinf(want):
            with pytest.raises(PlanningError):
                plan()
        else:
            assert plan()[0].predicted_seconds == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize(
    ("layers", "level", "want", "each"),
    [
        (([1.0] * 15 + [0.5] * 2, [1e5] * 15 + [4e9, 4e8], [1e6] * 17), (16, 1e9), "15-1", 1.0),
        (([1.0] * 8, [1.0] * 8, [1e9] * 8), (4, 1e6), "4", 2.0),
        (([1.0] * 8, [1e9] * 8, [1.0] * 8), (4, 1e6), "1-1-1-1", 2.0),
    ],
    ids=["VGG-16: few weights, then a fat end", "tiny weights: data parallel", "GNMT: heavy, even layers"],
)
def test_pipedream_finds_the_papers_configurations(layers, level, want, each):
    """What has few weights for its compute is replicated, and what has many is not."""
    components, bandwidth = level
    plan = plan_pipedream(*layers, [Level(components=components, bandwidth=bandwidth)])
    assert plan.configuration == want
    assert plan.seconds_per_microbatch == pytest.approx(each)


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        (([], [], [], [Level(components=1, bandwidth=1.0)]), "one value a layer"),
        (([1.0], [1.0], [1.0, 2.0], [Level(components=1, bandwidth=1.0)]), "one value a layer"),
        (([1.0], [1.0], [1.0], [Level(components=0, bandwidth=1.0)]), "at least one component"),
    ],
)
def test_a_profile_or_level_that_makes_no_sense_is_refused(arguments, want):
    with pytest.raises(PlanningError, match=want):
        plan_pipedream(*arguments)
