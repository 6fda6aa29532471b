"""What a job with ``planner`` is launched as, by GPU type and number of GPUs: what the planner says."""

import dataclasses
import datetime
import functools
import itertools
import json
import math
import pickle

import numpy as np
import pytest
from ballast_operator.api.job_allocation import JobAllocation, LaunchDegrees
from ballast_operator.api.read import read_job_status
from ballast_operator.api.training_job import PlannerConfig
from ballast_operator.api.training_job_status import MeasuredOnType
from ballast_operator.views import planned_degrees
from ballast_operator.views.planned_degrees import DegreesQuestion
from ballast_operator.views.spec import read_spec, spec_until_planned
from ballast_policies.allocation.planned_gangs import PlannedGang, TensorProfile
from ballast_policies.contract.decode import decode
from ballast_policies.contract.job.job import JobConfig
from ballast_policies.gpus.catalogue import gpu_named
from ballast_policies.rounds.values import PoolPart
from hypothesis import given
from hypothesis import strategies as st

from tests.operator.steps.contexts import a_running_view
from tests.support.examples import first_daily

BATCH, TYPES = 16, ("a", "b")


def rows(draw, layers: int) -> list[dict[str, float]]:
    held = draw.uniform(0.5, 1.5, layers) * 1e9
    return [
        {
            "forwardSeconds": float(draw.uniform(0.1, 0.6)),
            "backwardSeconds": float(draw.uniform(0.2, 1.2)),
            "heldBytes": float(4 * one),
            "weightBytes": float(one),
            "activationBytes": float(draw.uniform(0, 1) * one),
            "outputBytes": float(draw.uniform(0, 0.1) * one),
        }
        for one in held
    ]


def planner(draw, layers: int) -> dict:
    whole = rows(draw, layers)
    halves = [{name: value * 0.6 for name, value in row.items()} for row in whole]
    profiles = [{"microbatchSize": 2, "layers": whole}, {"tensor": 2, "microbatchSize": 2, "layers": halves}]
    gpus = [
        {"gpuType": kind, "speed": float(draw.choice([0.5, 1.0, 3.0])), "memory": memory}
        for kind, memory in zip(TYPES, ("80G", f"{int(draw.integers(9, 20))}G"), strict=True)
    ]
    return {"profiles": profiles[: int(draw.integers(1, 3))], "gpus": gpus, "bandwidth": 5e9}


def a_job(planner: dict, **changes) -> dict:
    layers = sum(layer.get("repeat", 1) for layer in planner["profiles"][0]["layers"])
    spec = {
        "totalSteps": 10,
        "model": {"name": "gpt", "layers": layers},
        "pipeline": {"minStages": 1, "maxStages": 4, "microbatches": 8, "globalBatchSize": BATCH},
        "parallelism": {"data": 2},
        "checkpoint": {"path": "/checkpoints"},
        "planner": planner,
        "template": {"spec": {"containers": [{"name": "trainer", "image": "trainer:1"}]}},
        **changes,
    }
    return {"metadata": {"name": "job", "namespace": "a", "uid": "u"}, "spec": spec}


def best_of(planner: dict, gpus: dict[str, int], batch_size: int = BATCH):
    """The planner's own answer for these GPUs alone; None: it has none."""
    return _best_of(json.dumps(planner), tuple(gpus.items()), batch_size)


@functools.cache
def _best_of(text: str, counts: tuple[tuple[str, int], ...], batch_size: int):
    planner, gpus = json.loads(text), dict(counts)
    of_type = {gpu["gpuType"]: gpu for gpu in planner["gpus"] if gpu["gpuType"] in gpus}
    gang = PlannedGang(
        profiles=tuple(decode(TensorProfile, profile) for profile in planner["profiles"]),
        speeds={kind: gpu["speed"] for kind, gpu in of_type.items()},
        batch_size=batch_size,
        sizes=tuple(gpus.values()),
        most_types=len(gpus),
        fewest_gpus=sum(gpus.values()),
        memory_bytes={kind: float(gpu["memory"][:-1]) * 1e9 for kind, gpu in of_type.items()},
        bandwidth=planner["bandwidth"],
        both_orders=True,
    )
    listed = gang.listed(gpus)
    return gang.plan_of(listed[0]) if listed else None


def offered(planner: dict, gpus: dict[str, int], per_pod: int):
    """:func:`best_of`; None where some of the GPUs, two or more, do as well without the others."""
    best = best_of(planner, gpus)
    for counts in itertools.product(*(range(0, count + 1, per_pod) for count in gpus.values())):
        fewer = {kind: count for kind, count in zip(gpus, counts, strict=True) if count}
        if best is not None and 2 <= sum(counts) < sum(gpus.values()):
            other = best_of(planner, fewer)
            best = None if other is not None and other.seconds <= best.seconds else best
    return best


@pytest.mark.parametrize("seed", first_daily(range(24), 6))
def test_each_size_has_the_plan_that_the_planner_makes_for_it_alone(seed):
    """Its speed is the predicted one, and the trainer accepts each.

    A size without a plan is impossible, and so is one whose plan is no faster than a smaller one's.
    """
    draw = np.random.default_rng(seed)
    planned = planner(draw, int(draw.integers(4, 9)))
    spec, problem = read_spec(a_job(planned))
    assert not problem
    per_pod = max(profile.get("tensor", 1) for profile in planned["profiles"])
    assert spec.gpus_per_pod == per_pod
    sizes = range(2, 9, per_pod)
    assert [size for size in range(1, 10) if spec.suits(size)] == [
        size for size in sizes if any(offered(planned, {kind: size}, per_pod) for kind in TYPES)
    ]
    for kind, size in itertools.product(spec.plans, sizes):
        best, degrees = offered(planned, {kind: size}, per_pod), spec.plans[kind].get(size)
        assert (best is None) == (degrees is None)
        assert spec.throughput[kind][size] == (0.0 if best is None else 1 / best.seconds)
        if best is None or degrees is None:
            continue
        assert degrees.layers == tuple(np.diff(best.cut.bounds).tolist())
        launched = spec.with_degrees(degrees)
        assert launched.ranks_per_position * launched.max_stages == size
        assert launched.suits(size) and launched.gpus_per_pod == per_pod
        config = JobConfig.from_json(launched.config.to_json())
        assert (config.parallelism.tensor, config.parallelism.data) == (
            best.degrees.tensor,
            best.degrees.data,
        )
        each = config.pipeline.microbatches // config.parallelism.data
        assert (each, config.training.repeated) == (best.degrees.microbatches, best.degrees.recompute)


def test_no_more_forwards_are_repeated_than_memory_asks_for():
    """Eight layers on one GPU keep 3 GB each, smaller microbatches take as long: of 22 GB six keep theirs, of
    16 GB four, of 5 GB none."""
    row = {"forwardSeconds": 0.1, "backwardSeconds": 0.2, "overheadSeconds": 0.3, "activationBytes": 3e9}
    profile = {"microbatchSize": 8, "layers": [{"repeat": 8, "heldBytes": 1e6, **row}]}
    repeated = {}
    for memory in ("40G", "22G", "16G", "5G"):
        job = a_job(
            {"profiles": [profile], "gpus": [{"gpuType": "a", "memory": memory}]},
            pipeline={"minStages": 1, "maxStages": 1, "microbatches": 1, "globalBatchSize": 8},
            parallelism={"data": 1},
        )
        spec, problem = read_spec(job)
        assert spec is not None, problem
        planned = spec.plans["a"][1]
        repeated[memory] = spec.with_degrees(planned).config.training.repeated
        layers = 8 // repeated[memory] if repeated[memory] else 0
        assert planned.step_seconds == pytest.approx(8 * 0.3 + layers * 0.1)
    assert repeated == {"40G": 0, "22G": 4, "16G": 2, "5G": 1}


@pytest.mark.parametrize("trial", [None, 2])
def test_a_gang_that_repeats_other_forwards_is_not_as_planned(trial):
    """Its speed is none of the edited planner's, unless it tries several: then it kept the fastest."""
    row = {"forwardSeconds": 0.1, "backwardSeconds": 0.2, "overheadSeconds": 0.3, "activationBytes": 3e9}
    profile = {"microbatchSize": 8, "layers": [{"repeat": 8, "heldBytes": 1e6, **row}]}
    specs = {}
    for memory in ("40G", "6G"):
        planned = {"profiles": [profile], "gpus": [{"gpuType": "a", "memory": memory}]}
        job = a_job(
            planned if trial is None else {**planned, "trial": trial},
            pipeline={"minStages": 2, "maxStages": 2, "microbatches": 2, "globalBatchSize": 8},
            parallelism={"data": 1},
        )
        specs[memory], problem = read_spec(job)
        assert specs[memory] is not None, problem
    degrees = {memory: spec.plans["a"][2] for memory, spec in specs.items()}
    assert degrees["40G"].repeated == 0 < degrees["6G"].repeated
    view = a_running_view()
    held = view.status.allocation.replace(
        gpu_type="a", gpus=2, pods=("one-1-0", "one-1-1"), nodes=("n", "n"), degrees=degrees["6G"]
    )
    view = dataclasses.replace(view, status=view.status.replace(allocation=held))
    found = {memory: dataclasses.replace(view, spec=spec).as_planned for memory, spec in specs.items()}
    assert found == {"6G": True, "40G": trial is not None}


@pytest.mark.parametrize("seed", first_daily(range(24), 6))
def test_each_mix_has_the_plan_that_the_planner_makes_for_it_alone(seed):
    """Of two types, the fastest first or the slowest; each type's bytes are those of its fullest stage."""
    draw = np.random.default_rng(seed)
    planned = planner(draw, int(draw.integers(4, 9)))
    speeds = {gpu["gpuType"]: gpu["speed"] for gpu in planned["gpus"]}
    spec, problem = read_spec(a_job(planned, mixedPools="Allowed"))
    assert not problem
    assert all(2 <= sum(gpus for _, gpus in mix) <= 8 and len(mix) == 2 for mix in spec.mixes)
    fastest_first = sorted(TYPES, key=lambda kind: -speeds[kind])
    parts = range(spec.gpus_per_pod, 8, spec.gpus_per_pod)
    for counts in itertools.product(parts, parts):
        mix = tuple(zip(fastest_first, counts, strict=True))
        best = offered(planned, dict(mix), spec.gpus_per_pod) if sum(counts) <= 8 else None
        if best is not None and best.slow_first:
            assert mix not in spec.mixes
            mix = mix[::-1]
        found = spec.mixes.get(mix)
        assert (found is None) == (best is None)
        if best is None or found is None:
            continue
        assert found.degrees.step_seconds == best.seconds
        assert found.degrees.layers == tuple(np.diff(best.cut.bounds).tolist())
        first = mix[0][1] // (best.degrees.tensor * best.degrees.data)
        taken = best.memory_bytes
        assert found.memory == (max(taken[:first]), max(taken[first:]))
        memory = {gpu["gpuType"]: float(gpu["memory"][:-1]) * 1e9 for gpu in planned["gpus"]}
        assert all(held <= memory[kind] for (kind, _), held in zip(mix, found.memory, strict=True))
        launched = spec.with_degrees(found.degrees)
        assert launched.ranks_per_position * launched.max_stages == sum(counts)
        JobConfig.from_json(launched.config.to_json())
    alone, _ = read_spec(a_job(planned))
    assert not alone.mixes
    assert all(spec.plans[kind].items() >= by_size.items() for kind, by_size in alone.plans.items())


@pytest.mark.parametrize("seed", first_daily(range(24), 4))
def test_gpus_of_a_type_in_two_pools_have_the_plan_that_the_planner_makes_for_both(seed):
    """As for two types that are alike, of which no stage is on both; at the sizes that it may have."""
    draw = np.random.default_rng(seed)
    planned = planner(draw, int(draw.integers(4, 9)))
    spec, _ = read_spec(a_job(planned, mixedPools="Allowed"))
    for gpu in planned["gpus"]:
        twice = {**planned, "gpus": [{**gpu, "gpuType": pool} for pool in ("one-pool", "another")]}
        for first, second in itertools.product(range(spec.gpus_per_pod, 7, spec.gpus_per_pod), repeat=2):
            if first + second > 8:
                continue
            counts = {"one-pool": first, "another": second}
            best = best_of(twice, counts)
            parts = [PoolPart(pool=p, gpu_type=gpu["gpuType"], gpus=n) for p, n in counts.items()]
            found = spec.degrees_on(parts)
            assert (found is None) == (best is None or first + second not in spec.plans[gpu["gpuType"]])
            if found is not None and best is not None:
                assert found.step_seconds == pytest.approx(best.seconds, rel=1e-9)
                assert first % found.gpus_per_stage == second % found.gpus_per_stage == 0
                JobConfig.from_json(spec.with_degrees(found).config.to_json())


@pytest.mark.parametrize("seed", first_daily(range(12), 2))
def test_sizes_are_left_out_where_they_are_too_many_only_if_others_are_nearly_as_fast(seed):
    """Of 8 to 64 GPUs at most 32 numbers are planned for.

    The best plan on at most n GPUs is as fast as that of all numbers, within what bounds leave open.
    """
    draw = np.random.default_rng(seed)
    planned = planner(draw, int(draw.integers(8, 13)))
    planned["profiles"] = planned["profiles"][:1]
    batch_size = 8 * int(draw.integers(6, 13))
    pipeline = {"minStages": 1, "maxStages": 8, "microbatches": batch_size, "globalBatchSize": batch_size}
    spec, problem = read_spec(a_job(planned, pipeline=pipeline, parallelism={"data": 8}))
    assert not problem and all(len(by_size) <= planned_degrees.MOST_SIZES for by_size in spec.plans.values())
    for kind, by_size in spec.plans.items():
        best = best_alone = math.inf
        for size in range(8, 65):
            alone = best_of(planned, {kind: size}, batch_size)
            best_alone = min(best_alone, alone.seconds if alone is not None else math.inf)
            best = min(best, by_size[size].step_seconds if size in by_size else math.inf)
            assert best <= 1.02 * best_alone


HOSTILE = (
    math.nan,
    math.inf,
    -1,
    0,
    5e-324,
    1e-9,
    1e9,
    1e17,
    1e308,
    2**70,
    True,
    "\U0010ffff\0",
    [[[]]],
    None,
)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("seed", first_daily(range(200), 60))
def test_hostile_numbers_are_planned_with_or_refused_in_words(seed):
    """In any fields of a planner for mixes; what is planned is finite, and the trainer accepts it."""
    draw = np.random.default_rng(seed)
    planned = planner(draw, int(draw.integers(1, 7)))
    places = [(gpu, field) for gpu in planned["gpus"] for field in ("gpuType", "speed", "memory")]
    for profile in planned["profiles"]:
        places += [(profile, field) for field in ("tensor", "microbatchSize", "layers")]
        places += [
            (layer, field) for layer in profile["layers"] for field in (*layer, "repeat", "overheadSeconds")
        ]
    places += [(planned, field) for field in planned]
    for number in draw.choice(len(places), size=int(draw.integers(1, 4))):
        holder, field = places[number]
        holder[field] = HOSTILE[int(draw.integers(len(HOSTILE)))]
    item = {**a_job(planner(draw, 4), mixedPools="Allowed")}
    item["spec"] = {**item["spec"], "planner": planned, "model": {"name": "gpt", "layers": 4}}
    spec, problem = read_spec(item)
    assert (spec is None) == bool(problem)
    if spec is None:
        assert "spec.planner" in problem
        return
    launches = [*(mix.degrees for mix in spec.mixes.values())]
    launches += [degrees for by_size in spec.plans.values() for degrees in by_size.values()]
    for degrees in launches:
        assert 0 < degrees.step_seconds < math.inf and degrees.memory_bytes < math.inf
        JobConfig.from_json(spec.with_degrees(degrees).config.to_json())


def test_jobs_with_other_degrees_are_of_another_kind():
    """What one reports of a number of GPUs says nothing of the other."""
    planned = planner(np.random.default_rng(0), 4)
    fast, alike, slow = (
        read_spec(a_job({**planned, "bandwidth": bandwidth}))[0] for bandwidth in (1e15, 1e15, 1e6)
    )
    stated, _ = read_spec({**a_job(planned), "spec": {**a_job(planned)["spec"], "planner": None}})
    assert fast.plans["a"] != slow.plans["a"]
    assert fast.kind == alike.kind
    assert len({fast.kind, slow.kind, stated.kind}) == 3


def test_stated_speeds_come_before_predicted_ones():
    planned = planner(np.random.default_rng(0), 4)
    known = [{"gpuType": "a", "stages": 2, "stepsPerSecond": 7.0}]
    spec, _ = read_spec(a_job(planned, throughput=known))
    assert spec.throughput["a"][4] == 7.0
    assert spec.throughput["a"][2] == pytest.approx(1 / spec.plans["a"][2].step_seconds)


def test_stated_speeds_add_no_size_without_a_plan():
    """A gang would be given GPUs on which it cannot be launched."""
    planned = four_layers()
    planned["gpus"] += [{"gpuType": "b", "memory": "1500M"}]
    spec, _ = read_spec(a_job(planned, throughput=[{"gpuType": "b", "stages": 1, "stepsPerSecond": 5.0}]))
    assert 2 in spec.plans["a"] and 2 not in spec.plans["b"]
    assert spec.throughput["b"][2] == 0.0


def test_the_gang_is_as_small_and_large_as_its_plans():
    """Two GPUs do not hold it, so no message asks for two."""
    spec, _ = read_spec(a_job(four_layers(memory="1500M")))
    assert (spec.smallest_gang, spec.largest_gang) == (min(spec.plans["a"]), max(spec.plans["a"])) == (4, 8)


def test_no_plan_has_more_replicas_than_a_job_may_have():
    """One stage on 2,048 GPUs would be as many, and the job refused whole."""
    sizes = {"minStages": 1, "maxStages": 4, "microbatches": 512, "globalBatchSize": 4096}
    spec, problem = read_spec(a_job(four_layers(), pipeline=sizes, parallelism={"data": 512}))
    assert spec is not None, problem
    assert max(degrees.data for plans in spec.plans.values() for degrees in plans.values()) == 1024


def test_memory_that_is_not_stated_is_the_catalogues():
    """A plan for a GPU of any size would not start on this one."""
    known, stated = four_layers(), four_layers(memory=f"{gpu_named('t4-16gb').memory_bytes:.0f}")
    known["gpus"] = [{"gpuType": "t4-16gb"}]
    large = {**LAYER, "heldBytes": 10e9}
    for planned in (known, stated):
        planned["profiles"] = [{"layers": [large] * 4}]
    plans, same = (read_spec(a_job(planned))[0].plans for planned in (known, stated))
    assert list(plans["t4-16gb"]) == list(same["a"]) and min(plans["t4-16gb"]) > 2


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_replicas_that_share_need_less_memory(stage):
    """Each launch with several shares as the job says; one without shares with nobody, and is accepted."""
    planned = {"profiles": [{"layers": [{**LAYER, "heldBytes": 4e9, "weightBytes": 1e9}] * 4}]}
    small, any_size = (
        {**planned, "gpus": [{"gpuType": "a", **memory}]} for memory in ({"memory": "3900M"}, {})
    )
    alone, problem = read_spec(a_job(small, parallelism={"data": 8}))
    assert alone is None and "no plan fits the memory of its GPUs, 8 to 32 of a type" in problem
    shared = {"data": 8, "zeroStage": stage}
    spec, _ = read_spec(a_job(small, parallelism=shared))
    assert spec.plans["a"]
    for degrees in spec.plans["a"].values():
        assert degrees.memory_bytes <= 3.9e9 and degrees.data > 1
        assert spec.with_degrees(degrees).config.parallelism.zero_stage == stage
    slow, _ = read_spec(
        a_job({**any_size, "bandwidth": 1.0}, parallelism={**shared, "data": 2}, pipeline=PIPELINE)
    )
    assert {each.data for each in slow.plans["a"].values()} == {1}
    for degrees in slow.plans["a"].values():
        assert slow.with_degrees(degrees).config.parallelism.zero_stage == 0
    unknown = {**planned, "profiles": [{"layers": [LAYER] * 4}], "gpus": [{"gpuType": "a"}]}
    _, problem = read_spec(a_job(unknown, parallelism=shared))
    assert "weightBytes does not say" in problem


PIPELINE = {"minStages": 1, "maxStages": 2, "microbatches": 16, "globalBatchSize": BATCH}


def test_a_layer_may_take_no_time():
    """As one that only reshapes."""
    planned = {**four_layers(), "profiles": [{"layers": [STILL, *[LAYER] * 3]}]}
    spec, problem = read_spec(a_job(planned))
    assert not problem and spec.plans["a"][2].step_seconds > 0


def test_plans_are_tried_up_to_a_bound(monkeypatch):
    """One job does not keep the operator from the others; an edit elsewhere plans nothing again."""
    planned = planner(np.random.default_rng(1), 5)
    first, _ = read_spec(a_job(planned))
    monkeypatch.setattr(planned_degrees, "MOST_CUT", 10)
    again, _ = read_spec(a_job(planned, suspend=True))
    assert again.plans == first.plans
    spec, problem = read_spec(a_job({**planned, "bandwidth": 4e9}))
    assert spec is None and "too many plans to try for its GPUs, 2 to 8 of a type" in problem


@pytest.mark.parametrize("seconds", [0.0, 5e-324])
def test_degrees_that_nobody_planned_are_not_gone_on_with(seconds):
    """A status that was edited by hand: its job waits for its planner, and the operator does not fail."""
    degrees = LaunchDegrees(microbatches=8, layers=(2, 2), step_seconds=seconds, memory_bytes=1.0)
    held = JobAllocation(gpu_type="a", pool="a", gpus=2, degrees=degrees, plan_id="1", launch=1, since=SINCE)
    assert spec_until_planned(a_job(four_layers()), held) is None
    good = held.replace(degrees=degrees.replace(step_seconds=1.0))
    assert spec_until_planned(a_job(four_layers()), good).plans == {"a": {2: good.degrees}}


def measured(spec, tensor=1, gpu_type="a", ratios=(2.0,) * 4, of=None) -> dict:
    """An entry of ``status.measuredLayers``."""
    of = of or spec.measured_as
    return {
        "gpuType": gpu_type,
        "tensor": tensor,
        "ratios": list(ratios),
        "at": "2026-01-01T00:00:00Z",
        "of": of,
    }


@given(
    entries=st.lists(
        st.tuples(
            st.sampled_from(TYPES),
            st.sampled_from([1, 2]),
            st.lists(st.floats(0.2, 5.0), min_size=4, max_size=4),
        ),
        min_size=1,
        max_size=4,
        unique_by=lambda one: one[:2],
    )
)
def test_the_newest_measurement_is_what_its_gpus_are_planned_by(entries):
    """By layer; so is the sum of the newest of each type; other types change as the layers do."""
    draw = np.random.default_rng(0)
    planned = {
        "profiles": [{"layers": rows(draw, 4)}, {"tensor": 2, "layers": rows(draw, 4)}],
        "gpus": [
            {"gpuType": kind, "speed": speed} for kind, speed in zip(("a", "b", "c"), (1, 2, 4), strict=True)
        ],
    }
    spec, _ = read_spec(a_job(planned))
    status = [measured(spec, tensor, kind, ratios) for kind, tensor, ratios in entries]
    found, problem = read_spec({**a_job(planned), "status": {"measuredLayers": status}})
    assert not problem
    question = found.question

    def seconds(question, kind, tensor):
        profile = next(one for one in question.profiles if one.tensor == tensor)
        return profile.seconds(1, recompute=False) / question.speeds[kind]

    kind, tensor, ratios = entries[-1]
    assert seconds(question, kind, tensor) == pytest.approx(seconds(spec.question, kind, tensor) * ratios)
    for kind, tensor, ratios in {kind: one for one in entries for kind in [one[0]]}.values():
        stated = seconds(spec.question, kind, tensor)
        assert seconds(question, kind, tensor).sum() == pytest.approx(stated @ ratios)
    assert question.speeds["c"] == 4
    assert found.plans["c"][2].measured_on == tuple(dict.fromkeys(kind for kind, *_ in entries))


@given(
    st.lists(st.sampled_from("abc"), min_size=6, max_size=6),
    st.lists(st.floats(0.2, 5), min_size=3, max_size=3),
    st.lists(st.floats(0.2, 5), min_size=6, max_size=6),
    st.booleans(),
)
def test_layers_measured_on_several_types_take_as_long_there_in_the_next_plan(types, slower, own, again):
    """Whatever types and layers differ in, and whatever was measured before; what is no news is near."""
    speeds, slower = {"a": 1, "b": 2, "c": 4}, dict(zip("abc", slower, strict=True))
    gpus = [{"gpuType": t, "speed": speed} for t, speed in speeds.items()]
    planned = {"profiles": [{"layers": rows(np.random.default_rng(0), 6)}], "gpus": gpus}
    question = DegreesQuestion(
        planner=decode(PlannerConfig, planned), batch_size=BATCH, fewest=1, most=6, per_pod=1, mixes=True
    )
    of = {"tensor": 1, "at": SINCE, "of": "spec"}
    known = (MeasuredOnType(gpu_type="a", ratios=(1.5,) * 6, **of),) if again else ()
    question = dataclasses.replace(question, measured=known)
    took = question.stated[1].seconds(1, recompute=False) * own * [slower[t] / speeds[t] for t in types]
    degrees = LaunchDegrees(microbatches=BATCH, layers=(6,), step_seconds=1.0, memory_bytes=1.0)
    news = question.news(types, degrees, took * BATCH)
    known += tuple(MeasuredOnType(gpu_type=t, ratios=ratios, **of) for t, ratios in news.items())
    question = dataclasses.replace(question, measured=known)
    then = question.profiles[0].seconds(1, recompute=False) / [question.speeds[t] for t in types]
    if news:
        assert news.keys() == set(types) and then == pytest.approx(took, rel=0.02)
    else:
        assert abs(then - took).max() <= planned_degrees.MEASURED_CHANGE * max(then.max(), took.max())


def test_of_a_planned_spec_its_layers_are_sent_and_kept_once():
    """From the planner's process: not those slowed to what was measured beside them."""
    job = a_job({**four_layers(), "profiles": [{"layers": [LAYER] * 64}]})
    spec, _ = read_spec(job)
    found, _ = read_spec({**job, "status": {"measuredLayers": [measured(spec, ratios=(2.0,) * 64)]}})
    assert found.question.measured
    assert len(pickle.dumps(found)) < len(pickle.dumps(spec)) + 64 * 16


def test_measurements_that_do_not_fit_the_planner_do_not_count():
    """A status that was edited by hand, or was written of another planner."""
    job = a_job(four_layers())
    spec, _ = read_spec(job)
    for wrong in (
        {"tensor": 2},
        {"gpu_type": "b"},
        {"ratios": (2.0,) * 3},
        {"of": "another"},
        {"ratios": (-1.0,) * 4},
    ):
        found, problem = read_spec({**job, "status": {"measuredLayers": [measured(spec, **wrong)]}})
        assert not problem and found.plans == spec.plans, wrong
    found, _ = read_spec({**job, "status": {"measuredLayers": [measured(spec)]}})
    assert found.plans["a"][2].step_seconds == pytest.approx(2 * spec.plans["a"][2].step_seconds)


def test_where_nothing_can_be_planned_by_what_was_measured_the_stated_layers_count():
    """No layer takes as long as a plan needs to be one."""
    job = a_job(four_layers())
    spec, _ = read_spec(job)
    found, problem = read_spec({**job, "status": {"measuredLayers": [measured(spec, ratios=(1e-12,) * 4)]}})
    assert not problem and found.plans == spec.plans and not found.plans["a"][2].measured_on


def test_where_the_trainer_refuses_what_is_planned_by_what_was_measured_the_stated_layers_count():
    """Seconds that nobody would have measured: its GPUs would be taken from a job that runs."""
    slow = {name: 100 * value for name, value in LAYER.items()}
    profiles = [{"layers": [LAYER] * 4}, {"tensor": 2, "layers": [slow] * 4}]
    dynamics = [{"kind": "pruning", "endStep": 9, "target": 0.1}]
    job = a_job({**four_layers(), "profiles": profiles}, dynamics=dynamics)
    spec, problem = read_spec(job)
    assert not problem and {plan.tensor for plan in spec.plans["a"].values()} == {1}
    status = [measured(spec, ratios=(500.0,) * 4), measured(spec, tensor=2, ratios=(0.001,) * 4)]
    found, problem = read_spec({**job, "status": {"measuredLayers": status}})
    assert not problem and found.plans == spec.plans


SINCE = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
STILL = {"forwardSeconds": 0.0, "backwardSeconds": 0.0}
LAYER = {"forwardSeconds": 0.1, "backwardSeconds": 0.2, "heldBytes": 1e9}


def four_layers(**gpu) -> dict:
    return {"profiles": [{"layers": [{**LAYER, "repeat": 4}]}], "gpus": [{"gpuType": "a", **gpu}]}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (a_job(four_layers(memory="500M")), "its GPUs, 2 to 8 of a type. To fix: GPUs with more memory"),
        (
            a_job(four_layers(), model={"name": "gpt", "layers": 5}),
            "it has 4 layers, model.layers is 5. To fix: a profile of this model",
        ),
        (
            a_job({**four_layers(), "profiles": [{"tensor": 2, "layers": [{**LAYER, "repeat": 4}]}]},
                  dynamics=[{"kind": "pruning", "endStep": 9, "target": 0.1}]),
            "the trainer refuses it: dynamics: parallelism.tensor cuts layers",
        ),
        (
            a_job(
                {
                    **four_layers(),
                    "profiles": [{"layers": [LAYER] * 4}, {"tensor": 2, "layers": [LAYER] * 3}],
                }
            ),
            "their numbers of layers differ",
        ),
        (
            a_job(
                {**four_layers(), "gpus": [{"gpuType": f"t{i}"} for i in range(16)]},
                pipeline={"minStages": 1, "maxStages": 4, "microbatches": 840, "globalBatchSize": 720720},
            ),
            "are more than 1,000,000 together",
        ),
        (
            a_job({**four_layers(), "profiles": [{"layers": [{**LAYER, "repeat": 501}]}]}),
            "501 layers are too many for profiles: 1 and gpus: 1",
        ),
        (
            a_job({**four_layers(), "profiles": [{"layers": [STILL] * 4}]}),
            "no layer takes 1e-09 s",
        ),
        (a_job(four_layers(speed=1e-300)), "1e-300 is below 1e-06"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_refused_in_words(given, said):
    spec, problem = read_spec(given)
    assert spec is None
    assert problem.startswith("spec.planner") and said in problem and "To fix: " in problem


def test_a_trial_forgets_no_measured_layers():
    """Plans that were tried are of as many as were asked for, and are tried anew for another number."""
    plain, tries = (read_spec(a_job({**four_layers(), "trial": trial}))[0] for trial in (None, 3))
    (one,) = tries.measured_alike(
        read_job_status({"status": {"measuredLayers": [measured(plain)]}}).measured_layers
    )
    assert one.of == tries.measured_as == plain.measured_as
    assert plain.planned_as != tries.planned_as
