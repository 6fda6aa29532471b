"""Pipelines whose plans are looked for at prices: as if every plan of every mix of GPUs had been cut."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from ballast_policies.allocation.generated import GENERATES, allocate_generated
from ballast_policies.allocation.planned_gangs import (
    REVERSED_GAIN,
    STAGE_WORK,
    LivePlans,
    PlannedGang,
    TensorProfile,
)
from ballast_policies.allocation.problem import Job, Problem
from ballast_policies.allocation.registry import allocate
from ballast_policies.contract.decode import decode
from ballast_policies.contract.errors import ContractError
from ballast_policies.planning.memory.measured_layers import PipelineForm
from ballast_policies.planning.partition import Partition
from ballast_policies.planning.planners.cost_model import RECOMPUTED, Degrees
from ballast_policies.planning.planners.plan_memory import PlanMemory
from ballast_policies.planning.rank_capacity import RankCapacity
from ballast_policies.planning.step_time import predict_step_seconds

from tests.policies.planning.partitions import all_partitions
from tests.support.examples import first_daily, in_proportion

FAMILIES = ("everything", "blocks", "uneven", "overheads", "little memory", "links", "tensor degrees")
SHARING = ("zero 1", "zero 2", "zero 3")
"""Replicas have a part each of what they hold, where memory and links are scarce."""
TYPES = ("a", "b", "c")
BATCH, SIZE = 8, 2


def drawn(family, draw):
    """A job's plans in one of the families."""
    layers = int(draw.integers(3, 9))
    everything = family == "everything" or family in SHARING
    work = draw.uniform(0.5, 2.0, layers) if family != "blocks" else np.ones(layers)
    weights = draw.uniform(0.5, 1.5, layers) * 1e9
    rows = [
        {
            "forwardSeconds": float(seconds) / 3,
            "backwardSeconds": float(seconds) * 2 / 3,
            "overheadSeconds": float(draw.uniform(0, seconds))
            if everything or family == "overheads"
            else 0.0,
            "heldBytes": float(4 * held),
            "weightBytes": float(held),
            "expertBytes": float(draw.uniform(0, 1) * held) if everything else 0.0,
            "experts": 3 if everything else 0,
            "routedBytes": 0.02 * float(held) if everything else 0.0,
            "activationBytes": float(draw.uniform(0, 2) * held),
            "outputBytes": float(draw.uniform(0, 0.1) * held),
        }
        for seconds, held in zip(work, weights, strict=True)
    ]
    halves = [
        {name: value if name == "experts" else value * 0.6 for name, value in row.items()} for row in rows
    ]
    degrees = (1, 2) if everything or family == "tensor degrees" else (1,)
    limited = everything or family == "little memory"
    return PlannedGang(
        profiles=tuple(
            decode(TensorProfile, {"microbatchSize": SIZE, "tensor": t, "layers": rows if t == 1 else halves})
            for t in degrees
        ),
        speeds=dict(zip(TYPES, draw.choice([0.5, 1.0, 1.3, 2.0, 3.0], 3).tolist(), strict=True)),
        batch_size=BATCH,
        sizes=(1, 2, 4),
        most_types=3 if everything else 2,
        memory_bytes={"a": 5e9, "b": 12e9} if limited else {},
        bandwidth=5e9 if everything or family == "links" else None,
        zero_stage=int(family[-1]) if family in SHARING else 0,
        both_orders=family not in ("blocks", "overheads", "links"),
    )


def seconds_of_the_best_plan(gang, gpus, order=1):
    """(least, most), as cuts that are as even differ in what links take; infinite where none fits.

    By every cut of every plan: that with the smallest largest load, then the smallest sum of loads.
    """
    types = sorted((t for t in TYPES if gpus.get(t)), key=lambda t: -gang.speeds[t])[::order]
    bandwidth, least, most = gang.bandwidth or math.inf, math.inf, math.inf
    for measured, data, size, again in itertools.product(
        gang.profiles, (1, 2, 4, 8), (1, 2, 4, 8), (0, 1, 2, 4)
    ):
        group, count = measured.tensor * data, BATCH // (data * size)
        ranks = [t for t in types for _ in range(gpus[t] // group)]
        profile, zero = measured.profile(1), gang.zero_stage
        if any(gpus[t] % group for t in types) or not len(ranks) <= min(count, profile.layers):
            continue
        forward, backward = np.array(profile.forward_seconds), np.array(profile.backward_seconds)
        fixed = np.array(profile.overhead_seconds)
        part = forward / (forward + backward)
        forward = size / SIZE * (forward - part * fixed) + part * fixed
        backward = size / SIZE * (backward - (1 - part) * fixed) + (1 - part) * fixed
        form = PipelineForm(schedule="1F1B", positions=len(ranks), microbatches=count, averaged=data > 1)
        capacity = RankCapacity(
            speeds=[gang.speeds[t] for t in ranks],
            memory=[int(gang.memory_bytes.get(t, 2**62)) for t in ranks],
            stage_bytes=PlanMemory(profile, SIZE, zero_stage=zero).stage_bytes(form, 1, size, again, data),
        )
        seconds = forward + backward
        if again:
            seconds[again - 1 :: again] += forward[again - 1 :: again]
        # A gather or a scatter takes half of the all-reduce that replicas without parts have once a step.
        half = (1 - 1 / data) * np.subtract(profile.weight_bytes, profile.expert_bytes) / bandwidth
        in_microbatch, in_step = ((0, 2), (0, 2), (1, 1), (3, 0))[zero]
        # Tokens go to their experts and come back in each forward and each backward.
        passes = np.full(profile.layers, 2.0)
        if again:
            passes[again - 1 :: again] += 1
        routed = 2 * passes * (1 - 1 / data) * size / SIZE * np.array(profile.routed_bytes) / bandwidth
        sent_in_microbatch = in_microbatch * half + routed
        cut_by = seconds + sent_in_microbatch * min(capacity.speeds)
        steps = {}
        for cut in filter(capacity.fits, all_partitions(profile.layers, len(ranks))):
            even = cut.loads(cut_by, capacity.speeds)
            loads = (cut.loads(seconds, capacity.speeds) + cut.loads(sent_in_microbatch)) * count
            sent = [2 * size / SIZE * profile.output_bytes[end - 1] / bandwidth for end in cut.bounds[1:-1]]
            exchanged = in_step * cut.loads(half).max()
            step = predict_step_seconds(loads, count, boundary_seconds=sent, fixed_seconds=exchanged)
            steps.setdefault((round(even.max(), 9), round(even.sum(), 9)), []).append(step)
        if steps:
            launched = steps[min(steps)]
            # Of those that repeat some forwards it has the best of the degrees that are best with all.
            least, most = min(least, *launched), min(most, max(launched) if again < 2 else math.inf)
    return least, most


@pytest.mark.slow
@pytest.mark.parametrize("family", (*FAMILIES, *SHARING))
def test_each_mix_of_gpus_has_its_best_plan(family):
    """Of all degrees, microbatch sizes and cuts, as brute force finds it; its plan is one of that step.

    A mix that is not listed has none, or is no faster than some of its GPUs.
    """
    draw, most = np.random.default_rng(7), dict.fromkeys(TYPES, 4)
    gang = drawn(family, draw)
    found = {tuple(each.gpus.get(t, 0) for t in TYPES): each for each in gang.listed(most)}
    for counts in itertools.product((0, 1, 2, 4), repeat=3):
        if not 1 <= sum(count > 0 for count in counts) <= gang.most_types:
            continue
        gpus, slack = dict(zip(TYPES, counts, strict=True)), 1e-9
        least, longest = seconds_of_the_best_plan(gang, gpus)
        if gang.both_orders:
            others = seconds_of_the_best_plan(gang, gpus, order=-1)
            least, longest, slack = min(least, others[0]), min(longest, others[1]), REVERSED_GAIN
        if counts not in found:
            fewer = (1 / one.throughput for some, one in found.items() if (np.array(some) <= counts).all())
            assert min(fewer, default=math.inf) <= longest * (1 + slack)
            continue
        assert least * (1 - 1e-9) <= 1 / found[counts].throughput <= longest * (1 + slack)
        plan = gang.plan_of(found[counts])
        assert plan.degrees.microbatches * plan.degrees.microbatch_size * plan.degrees.data == BATCH
        assert plan.cut.ranks * plan.degrees.data * plan.degrees.tensor == sum(counts)
        if np.count_nonzero(counts) == 1:
            (gpu_type, count), *_ = ((kind, count) for kind, count in gpus.items() if count)
            assert gang.plan_with(plan.degrees, gpu_type, count) == plan
            assert gang.plan_with(plan.degrees, gpu_type, count * (gang.batch_size + 1)) is None


@pytest.mark.slow
@pytest.mark.parametrize("policy", GENERATES)
@pytest.mark.parametrize("family", first_daily(FAMILIES, 2))
def test_the_optimum_over_all_plans_from_those_that_are_cut(policy, family):
    """Within 2 % of the program with each mix of GPUs and its best plan; the gap tells how near."""
    for seed in range(in_proportion(2)):
        draw = np.random.default_rng(seed)
        capacity = {t: int(draw.integers(3, 9)) for t in TYPES}
        jobs = tuple(
            Job(
                name=f"job-{m}",
                steps_remaining=float(10 ** draw.uniform(2, 4)),
                weight=float(draw.integers(1, 4)),
            )
            for m in range(6)
        )
        posed = Problem(gpu_types=TYPES, capacity=capacity, jobs=jobs)
        gangs = {job.name: drawn(family, draw) for job in jobs}
        listed = [
            Job(
                name=job.name,
                steps_remaining=job.steps_remaining,
                weight=job.weight,
                configurations=gangs[job.name].listed(capacity),
            )
            for job in jobs
        ]
        want = allocate(policy, Problem(gpu_types=TYPES, capacity=capacity, jobs=tuple(listed)))
        found = allocate_generated(policy, posed, gangs, within=0.01)
        assert found.allocation.objective == pytest.approx(want.objective, rel=0.02)
        assert found.allocation.gap <= 0.01 + 1e-6


BUBBLES = {
    "1F1B": 3 / 16,
    "GPipe": 3 / 16,
    "LoopedBFS": 3 / 32,
    "Interleaved1F1B": 3 / 32,
    "ZeroBubbleH1": 1 / 16,
    "InterleavedZeroBubble": 1 / 32,
    "ZeroBubbleV": 1 / 32,
}
"""Of four ranks and 16 microbatches, as docs/planning.md has them."""


def sixteen_layers(**fields):
    row = {"repeat": 16, "forwardSeconds": 1, "backwardSeconds": 2, "activationBytes": 1e6, "heldBytes": 4e6}
    profile = decode(TensorProfile, {"layers": [row]})
    return PlannedGang(profiles=(profile,), speeds={"a": 1.0}, batch_size=16, sizes=(4,), **fields)


@pytest.mark.parametrize("memory", [None, 40e6])
def test_schedules_of_a_plan_have_their_bubbles_and_fit(memory):
    """The fastest comes first; GPipe and LoopedBFS keep all 16 microbatches: there may be no room."""
    gang = sixteen_layers(memory_bytes={} if memory is None else {"a": memory})
    degrees, cut = Degrees(1, 1, 1, 16), Partition(bounds=(0, 4, 8, 12, 16))
    found = gang.scheduled(LivePlans(degrees, cut, (("a", 4),), tuple(BUBBLES), 9))
    best = {one.form.schedule: one for one in reversed(found)}
    expected = BUBBLES if memory is None else BUBBLES.keys() - {"GPipe", "LoopedBFS"}
    assert best.keys() == set(expected)
    for name, one in best.items():
        assert one.seconds == pytest.approx(16 * 4 * 3 * (1 + BUBBLES[name])), name
        assert max(one.memory_bytes) <= (memory or math.inf)
    assert [one.seconds for one in found[: len(best)]] == sorted(one.seconds for one in best.values())
    assert found[0].seconds == min(one.seconds for one in found)
    near = found[len(best) :]
    assert {one.form.schedule for one in near} <= {found[0].form.schedule} and (near or memory)
    for one in near:
        moved = np.subtract(one.cut.bounds, found[0].cut.bounds)
        assert sorted(abs(moved))[-2:] == [0, 1]


def test_another_schedule_is_launched_where_it_gains_enough():
    """A twentieth: of many microbatches the bubble is less than that."""
    few, many = (
        sixteen_layers().scheduled(
            LivePlans(
                Degrees(1, 1, 1, count),
                Partition(bounds=(0, 4, 8, 12, 16)),
                (("a", 4),),
                ("1F1B", "ZeroBubbleH1"),
                3,
            )
        )
        for count in (16, 256)
    )
    assert [one.form.schedule for one in few[:2]] == ["ZeroBubbleH1", "1F1B"]
    assert [one.form.schedule for one in many[:2]] == ["1F1B", "ZeroBubbleH1"]
    assert many[1].seconds < many[0].seconds
    assert not sixteen_layers().scheduled(
        LivePlans(Degrees(1, 4, 1, 4), Partition(bounds=(0, 16)), (("a", 4),), ("1F1B",), 3)
    )


@pytest.mark.parametrize("memory", [None, 40e6, 36e6])
def test_schedules_repeat_as_few_forwards_as_fit(memory):
    """GPipe and LoopedBFS find room so; after the cuts come plans of the fastest that repeat more."""
    gang = sixteen_layers(memory_bytes={} if memory is None else {"a": memory})
    degrees, cut = Degrees(1, 1, 1, 16), Partition(bounds=(0, 4, 8, 12, 16))
    found = gang.scheduled(LivePlans(degrees, cut, (("a", 4),), tuple(BUBBLES), 40, RECOMPUTED))
    assert {one.form.schedule for one in found} == BUBBLES.keys()
    alone = {
        again: gang.scheduled(
            LivePlans(dataclasses.replace(degrees, recompute=again), cut, (("a", 4),), tuple(BUBBLES), 40)
        )
        for again in RECOMPUTED
    }
    first = {one.form.schedule: one for one in reversed(found)}
    for name, one in first.items():
        fits = {again for again in RECOMPUTED if name in {other.form.schedule for other in alone[again]}}
        assert one.degrees.recompute == next(again for again in RECOMPUTED if again in fits)
        assert max(one.memory_bytes) <= (memory or math.inf)
    of_fastest = [one.degrees.recompute for one in found if one.form.schedule == found[0].form.schedule]
    assert set(of_fastest) == set(RECOMPUTED[RECOMPUTED.index(found[0].degrees.recompute) :])
    assert found[0].seconds == min(one.seconds for one in found)


@pytest.mark.parametrize(("cuts", "every"), [(1, 1), (2, 1), (6, 4)])
def test_a_job_that_can_be_planned_with_all_forwards_repeated_is_not_refused(cuts, every):
    """Of one GPU's plans one fits. Fewer layers repeat where half of the work is left without it."""
    layer = {"forwardSeconds": 0.1, "backwardSeconds": 0.2, "activationBytes": 2e9, "outputBytes": 1e6}
    profile = decode(TensorProfile, {"microbatchSize": 1, "layers": [{"repeat": 8, **layer}]})
    gang = PlannedGang(
        profiles=(profile,), speeds={"a": 1.0}, batch_size=1, sizes=(1,), memory_bytes={"a": 15e9}
    )
    listed = gang.listed({"a": 1}, work=cuts * (8**2 + STAGE_WORK))
    assert listed is not None and len(listed) == 1
    assert gang.plan_of(listed[0]).degrees.recompute == every


@pytest.mark.parametrize("tensor", [1, 8])
def test_the_best_of_gpus_too_dear_to_gain_is_an_answer(tensor):
    """It is None only where the job cannot run, as where its layers are measured on more GPUs than it has."""
    layer = {"forwardSeconds": 0.1, "backwardSeconds": 0.2, "heldBytes": 1e9}
    profile = decode(TensorProfile, {"tensor": tensor, "layers": [layer]})
    gang = PlannedGang(
        profiles=(profile,), speeds={"a": 1.0, "b": 2.0}, batch_size=1, sizes=(4, 1), memory_bytes={"b": 1e8}
    )
    answer, listed = gang.best_answer({"a": 1e6, "b": 1.0}, 1.0, {"a": 4, "b": 4}), gang.listed({"a": 4})
    assert [each.gpus for each in listed] == ([{"a": 1}] if tensor == 1 else [])
    assert answer == (listed[0] if listed else None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"memory_bytes": {"z": 1e9}}, "memory_bytes.z: speeds does not have the type"),
        ({"sizes": tuple(range(1, 400)), "most_types": 3}, "sizes: .*To fix: fewer sizes"),
    ],
)
def test_what_cannot_be_planned_is_refused(fields, message):
    profile = decode(TensorProfile, {"layers": [{"forwardSeconds": 1.0, "backwardSeconds": 2.0}]})
    stated = {
        "profiles": (profile,),
        "speeds": {"a": 1.0, "b": 1.0, "c": 2.0},
        "batch_size": 8,
        "sizes": (1,),
    }
    with pytest.raises(ContractError, match=message):
        PlannedGang(**{**stated, **fields})
