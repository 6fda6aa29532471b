"""Estimates of speed: stated, measured, taken from jobs of the same kind, or completed; and mean prices."""

import dataclasses
import itertools
import math

import pytest
from ballast_operator.allocator.decider import record
from ballast_operator.views.lease import LeaseView
from ballast_policies.contract.job.job import JobConfig
from ballast_policies.contract.messages import Ack, Report
from ballast_policies.scheduling.gang_speeds import GangRequest
from ballast_policies.scheduling.measurements import Measurements
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.operator.views.builders import a_config, a_plan, a_spec, a_view

KNOWN = {"v100": {4: 4.0, 2: 2.2}, "k80": {4: 1.0}}
TYPES = ("v100", "k80")


def config(model="gpt"):
    pipeline = {"maxStages": 4, "globalBatchSize": 32, "microbatches": 8}
    return a_config(model={"name": model}, pipeline=pipeline)


def a_report(job, spec, *, rate, step, gpu_type="v100", stages=2):
    """The view of ``job`` running on ``stages`` GPUs, as it reports ``rate`` steps/s at ``step``."""
    pods = tuple(f"{job}-{rank}" for rank in range(stages))
    view = a_view(pods=pods, plan=a_plan(pods), spec=spec, key=("team", job))
    report = Report(epoch=1, step=step, loss=1.0, steps_per_second=rate)
    lease = LeaseView(report=report, ack=Ack(epoch=1, step=0))
    allocation = view.status.allocation.replace(gpu_type=gpu_type)
    return dataclasses.replace(view, lease=lease, status=view.status.replace(allocation=allocation))


def estimates(measurements, job, spec, *, stages=2, types=TYPES):
    key = ("team", job)
    return measurements.estimates([GangRequest(key=key, spec=spec, gpus=stages)], types)[key]


def stated(table, *, script):
    """A spec with these speeds, of a script with up to sixteen ranks or of a model."""
    ranks = {"totalSteps": 9, "pipeline": {"minStages": 1, "maxStages": 16}}
    return a_spec(throughput=table, **({"config": JobConfig.from_mapping(ranks)} if script else {}))


def speeds(*args, **options):
    return {t: found.steps_per_second for t, found in estimates(*args, **options).items()}


def test_stated_speeds_are_taken_as_they_are_before_the_job_has_run():
    """The spec's table, at the gang's size, as a prior."""
    found = estimates(Measurements(), "a", a_spec(throughput=KNOWN), stages=4)
    assert {t: e.steps_per_second for t, e in found.items()} == pytest.approx({"v100": 4.0, "k80": 1.0})
    assert {e.source for e in found.values()} == {"prior"}


@pytest.mark.parametrize(("rate", "ratio"), [(0.95, 4.0), (2.0, 2.0)])
def test_reports_change_how_types_compare_only_where_they_contradict_the_spec(rate, ratio):
    """4 to 1 stated: 0.95 on a K80 bears it out; twice the stated speed does not."""
    measurements, spec = Measurements(), a_spec(throughput=KNOWN)
    for step in range(20):
        record(a_report("a", spec, rate=4.0, step=2 * step, stages=4), measurements)
        record(a_report("a", spec, rate=rate, step=2 * step + 1, stages=4, gpu_type="k80"), measurements)
    found = speeds(measurements, "a", spec, stages=4)
    assert found["v100"] / found["k80"] == pytest.approx(ratio, rel=1e-3)


def test_another_number_of_stages_follows_from_the_nearest_known_one_by_the_pipelines_bubble():
    """k80 is stated with four stages only; eight layers over three leave one rank with three of them."""
    found = speeds(Measurements(), "a", a_spec(throughput=KNOWN), stages=3)
    assert found["k80"] == pytest.approx((7 * 2 / 8 + 1) / (7 * 3 / 8 + 1))


@pytest.mark.parametrize("script", [False, True])
def test_between_two_stated_sizes_the_speed_is_between_theirs(script):
    """On a line over the logarithms of both, of scripts as well."""
    spec = stated({"v100": {2: 1.0, 8: 1.5}}, script=script)
    assert spec.is_script == script
    assert speeds(Measurements(), "a", spec, stages=4, types=("v100",))["v100"] == pytest.approx(
        math.sqrt(1.5)
    )
    found = by_size(Measurements(), spec, base=2, sizes=(2, 4, 6, 8))
    assert list(found["v100"].values()) == pytest.approx(
        [1.0, 1.5**0.5, 1.5 ** (math.log(3) / math.log(4)), 1.5]
    )


@pytest.mark.slow
@settings(max_examples=30)
@given(
    rates=st.dictionaries(st.integers(1, 16), st.floats(0.01, 100.0), min_size=2, max_size=5),
    script=st.booleans(),
    known=st.sampled_from(["stated", "stated and measured", "measured by the kind"]),
    measured=st.integers(0, 4),
)
def test_no_speed_between_two_known_sizes_is_beyond_theirs(rates, script, known, measured):
    """Neither by what is stated, nor once a size was measured, nor by what jobs of the kind have reported."""
    sizes = sorted(rates)
    table = {} if known == "measured by the kind" else {"v100": rates}
    spec = stated(table, script=script)
    measurements = Measurements()
    if known == "stated and measured":
        at = sizes[measured % len(sizes)]
        record(a_report("a", spec, rate=3.0, step=1, stages=at), measurements)
    elif not table:
        for step, at in enumerate(sizes):
            record(a_report("b", spec, rate=rates[at], step=step, stages=at), measurements)
    found = by_size(measurements, spec, base=sizes[0], sizes=tuple(range(sizes[0], sizes[-1] + 1)))["v100"]
    for low, high in itertools.pairwise(sizes):
        least, most = sorted((found[low], found[high]))
        for size in range(low, high + 1):
            here = speeds(measurements, "a", spec, stages=size, types=("v100",))["v100"]
            assert least * (1 - 1e-9) <= found[size] <= most * (1 + 1e-9)
            assert here == pytest.approx(found[size])


def test_beyond_the_stated_sizes_a_measured_gang_goes_by_the_nearest_stated_one():
    """Measured at 4 as stated around it: 12 is not guessed from 4, the nearest measured one."""
    spec, measurements = a_spec(throughput={"v100": {2: 1.0, 8: 1.5}}), Measurements()
    before = by_size(measurements, spec, base=2, sizes=(2, 4, 8, 12))["v100"]
    record(a_report("a", spec, rate=before[4], step=1, stages=4), measurements)
    assert by_size(measurements, spec, base=2, sizes=(2, 4, 8, 12))["v100"] == pytest.approx(before)


def test_a_stated_zero_stays_zero():
    """The user says that it cannot run there."""
    assert speeds(Measurements(), "a", a_spec(throughput={"k80": {4: 0.0}}), stages=4)["k80"] == 0.0


def test_without_any_knowledge_all_types_are_alike():
    found = estimates(Measurements(), "a", a_spec())
    assert {t: e.steps_per_second for t, e in found.items()} == {"v100": 1.0, "k80": 1.0}
    assert {e.source for e in found.values()} == {"unknown"}


def test_a_report_is_taken_in_once():
    """The same report seen in a hundred passes is one measurement."""
    measurements, spec = Measurements(), a_spec()
    for _ in range(100):
        record(a_report("a", spec, rate=3.0, step=7), measurements)
    assert estimates(measurements, "a", spec)["v100"].reports == 1


def test_a_gang_of_another_size_follows_from_what_was_measured():
    """Measured with two stages and their bubble, asked for one without: 9/16, and less certain."""
    measurements, spec = Measurements(), a_spec(config=config())
    record(a_report("a", spec, rate=5.0, step=1), measurements)
    found = estimates(measurements, "a", spec, stages=1)["v100"]
    assert found.steps_per_second == pytest.approx(5.0 * 9 / 16)
    assert found.deviation > estimates(measurements, "a", spec, stages=2)["v100"].deviation


def by_size(measurements, spec, *, base=1, sizes=(1, 2, 4)):
    request = GangRequest(key=("team", "a"), spec=spec, gpus=base)
    return measurements.by_size(request, measurements.estimates([request], TYPES)["team", "a"], sizes)


def test_each_size_of_an_elastic_gang_has_the_speed_that_is_stated_for_it():
    """And the nearest one by the pipeline's model where none is."""
    found = by_size(Measurements(), a_spec(throughput=KNOWN), base=2, sizes=(2, 3, 4))
    assert found["v100"][2] == pytest.approx(2.2)
    assert found["v100"][4] == pytest.approx(4.0)
    assert 2.2 < found["v100"][3] < 4.0


def test_a_size_that_the_job_has_run_with_has_the_speed_that_it_reported():
    measurements, spec = Measurements(), a_spec(config=config())
    for step in range(20):
        record(a_report("a", spec, rate=3.0, step=step), measurements)
    found = by_size(measurements, spec)
    assert found["v100"][2] == pytest.approx(3.0, rel=1e-3)
    assert found["v100"][1] == pytest.approx(3.0 * 9 / 16, rel=1e-3)


def test_different_layers_that_were_measured_limit_what_more_gpus_bring():
    """One layer has half of the work: four ranks are less than 1.4 times as fast as two; alike, 1.6 times."""
    measurements, spec = Measurements(), a_spec(config=config())
    view = a_report("a", spec, rate=3.0, step=1)
    report = view.lease.report.replace(layer_seconds=(0.1, 0.1, 0.4, 0.1, 0.1))
    record(dataclasses.replace(view, lease=dataclasses.replace(view.lease, report=report)), measurements)
    found = by_size(measurements, spec)
    assert found["v100"][4] < 1.4 * found["v100"][2]


def test_a_size_at_which_the_job_is_said_not_to_run_is_none_of_its_sizes():
    """Too little memory there, say."""
    spec = a_spec(throughput={"v100": {1: 0.0, 2: 2.0}})
    assert set(by_size(Measurements(), spec, base=2)["v100"]) == {2, 4}


def test_a_size_between_two_that_were_measured_is_between_them():
    """The model does not promise more than the larger one was measured to bring."""
    measurements, spec = Measurements(), a_spec(config=config())
    for step in range(20):
        record(a_report("a", spec, rate=3.0, step=2 * step), measurements)
        record(a_report("a", spec, rate=3.1, step=2 * step + 1, stages=4), measurements)
    assert 3.0 < by_size(measurements, spec, sizes=(1, 2, 3, 4))["v100"][3] < 3.1
