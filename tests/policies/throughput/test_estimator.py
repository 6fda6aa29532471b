"""Estimates of throughputs: by reports, by the number of GPUs, and completed from a table."""

import dataclasses
import gzip
import itertools
import json
import math

import numpy as np
import pytest
from ballast_policies.planning.balancers.exact import exact_partition
from ballast_policies.planning.schedules.registry import SCHEDULES
from ballast_policies.planning.step_time import predict_step_seconds
from ballast_policies.scheduling.gang_speeds import PipelineShape, relative_speed, rounded
from ballast_policies.throughput.estimator import Estimator, complete
from ballast_policies.throughput.speeds import ALPHA, Estimate
from ballast_policies.throughput.table import (
    JobType,
    ThroughputError,
    ThroughputTable,
    built_in_table,
    read_table,
)
from hypothesis import given
from hypothesis import strategies as st

TYPES = ("v100", "p100", "k80")
PROFILES = built_in_table("simulation")
RESNET = JobType(name="ResNet-18 (batch size 64)")


def without(name):
    """The profiles as if ``name`` had never been profiled."""
    return ThroughputTable(
        source="test",
        alone_rates={
            gpu_type: {job_type: rate for job_type, rate in rates.items() if job_type.name != name}
            for gpu_type, rates in PROFILES.alone_rates.items()
        },
        pair_rates={
            gpu_type: {
                job_type: {other: both for other, both in row.items() if other.name != name}
                for job_type, row in rows.items()
                if job_type.name != name
            }
            for gpu_type, rows in PROFILES.pair_rates.items()
        },
    )


def observed(estimator, job, gpu_type, rate):
    """The estimator after one report of a job that runs alone."""
    before = estimator.every_job_alone()[job][gpu_type]
    row = {**estimator.own.get(job, {}), gpu_type: before.measured(rate)}
    return dataclasses.replace(estimator, own={**estimator.own, job: row})


def test_a_new_job_of_a_profiled_type_starts_at_its_profile():
    """Before any report: the table's rates, called a prior."""
    found = Estimator(profiles=PROFILES, gpu_types=TYPES, types={"a": RESNET}).every_job_alone()["a"]
    for gpu_type in TYPES:
        assert found[gpu_type].steps_per_second == PROFILES.alone(RESNET, gpu_type)
        assert found[gpu_type].source == "prior"


def test_reports_take_the_priors_place_and_scale_the_other_types():
    """A job that runs at half its type's speed on one GPU type is expected to do so on the others."""
    estimator = Estimator(profiles=PROFILES, gpu_types=TYPES, types={"a": RESNET})
    for _ in range(6):
        estimator = observed(estimator, "a", "v100", 0.5 * PROFILES.alone(RESNET, "v100"))
    found = estimator.every_job_alone()["a"]
    assert found["v100"].source == "measured"
    assert found["v100"].steps_per_second == pytest.approx(0.5 * PROFILES.alone(RESNET, "v100"), rel=0.03)
    assert found["k80"].steps_per_second == pytest.approx(0.5 * PROFILES.alone(RESNET, "k80"), rel=0.03)
    assert found["k80"].deviation < 0.15


@given(reports=st.lists(st.floats(5.0, 20.0), min_size=1, max_size=30))
def test_uncertainty_decays_as_reports_come(reports):
    """Each report leaves the deviation no larger, down to that of the moving average."""
    estimate = Estimate(steps_per_second=10.0, deviation=1.5, source="unknown")
    deviations = [estimate.deviation]
    for report in reports:
        estimate = estimate.measured(report)
        deviations.append(estimate.deviation)
    assert all(after <= before + 1e-12 for before, after in itertools.pairwise(deviations))
    assert deviations[-1] < 0.06


def test_in_the_long_run_a_report_weighs_alpha_as_in_gavels_moving_average():
    """After many equal reports, a new one moves the logarithm by ALPHA of the difference."""
    estimate = Estimate(steps_per_second=8.0, deviation=0.15, source="prior")
    for _ in range(40):
        estimate = estimate.measured(8.0)
    moved = math.log(estimate.measured(16.0).steps_per_second / 8.0) / math.log(2.0)
    assert moved == pytest.approx(ALPHA, abs=1e-6)


@pytest.mark.slow
def test_a_type_never_profiled_is_completed_from_one_measurement():
    """Each profiled type in turn, hidden, measured on a V100 alone.

    Less than half of the squared error of taking all types for equally fast, and the deviation is
    honest: half of the errors at least are within it.
    """
    errors, blind, within = [], [], []
    for job_type in PROFILES.alone_rates["v100"]:
        if job_type.gpus > 1:
            continue
        estimator = Estimator(profiles=without(job_type.name), gpu_types=TYPES, types={"a": job_type})
        before = estimator.every_job_alone()["a"]
        assert {estimate.source for estimate in before.values()} == {"unknown"}
        measured = PROFILES.alone(job_type, "v100")
        found = observed(estimator, "a", "v100", measured).every_job_alone()["a"]
        assert found["v100"].steps_per_second == pytest.approx(measured, rel=0.01)
        for gpu_type in ("p100", "k80"):
            assert found[gpu_type].source == "completed"
            assert found[gpu_type].deviation < before[gpu_type].deviation
            true = PROFILES.alone(job_type, gpu_type)
            errors.append(abs(math.log(found[gpu_type].steps_per_second / true)))
            blind.append(abs(math.log(measured / true)))
            within.append(errors[-1] <= found[gpu_type].deviation)
    assert np.mean(np.square(errors)) < 0.5 * np.mean(np.square(blind))
    assert np.mean(within) >= 0.5


@pytest.mark.parametrize("v100, k80", [(1e-300, 1.0), (1.0, 1e-9), (1e9, 0.0), (0.0, 1e-9)])
def test_senseless_speeds_of_one_job_say_nothing_of_another(v100, k80):
    """They may be another team's typing error; the job that states them is taken at its word."""
    liar, other = JobType(name="liar"), JobType(name="other")
    honest = {"v100": {JobType(name="a"): 4.0, other: 2.0}, "k80": {JobType(name="a"): 1.0}}
    stated = {"v100": v100, "k80": k80}
    rates = {g: {**row, **({liar: stated[g]} if stated[g] else {})} for g, row in honest.items()}

    def found(alone_rates):
        table = ThroughputTable(source="test", alone_rates=alone_rates)
        return Estimator(profiles=table, gpu_types=("v100", "k80"), types={"o": other, "l": liar})

    assert found(rates).every_job_alone()["o"] == found(honest).every_job_alone()["o"]
    told = found(rates).every_job_alone()["l"]
    assert all(told[g].steps_per_second == rate for g, rate in stated.items() if rate)


@pytest.mark.slow
@given(seed=st.integers(0, 50))
def test_a_matrix_of_low_rank_is_recovered_from_part_of_it(seed):
    """Row and column effects and one product, 70 % known: the rest to a third of its spread."""
    random = np.random.default_rng(seed)
    u, v = random.normal(size=(20, 1)), random.normal(size=(1, 15))
    true = random.normal(size=(20, 1)) + random.normal(size=(1, 15)) + u @ v
    known = random.random(true.shape) < 0.7
    known[0], known[:, 0] = True, True
    found = complete(true, known)
    np.testing.assert_array_equal(found.values[known], true[known])
    error = np.sqrt(np.mean((found.values - true)[~known] ** 2))
    assert error < 0.33 * true.std()


def test_nothing_known_is_refused():
    """Neither an empty matrix nor one with a hole that is called known."""
    with pytest.raises(ValueError, match="nothing is known"):
        complete(np.ones((2, 2)), np.zeros((2, 2), dtype=bool))
    with pytest.raises(ValueError, match="not finite"):
        complete(np.full((2, 2), np.nan), np.ones((2, 2), dtype=bool))


@pytest.mark.parametrize("rate", [0.0, -1.0, math.inf, math.nan])
def test_a_senseless_report_is_refused(rate):
    """A rate must be positive and finite."""
    with pytest.raises(ValueError, match="not positive and finite"):
        Estimate(steps_per_second=1.0, deviation=0.1, source="prior").measured(rate)


def test_on_a_gpu_type_never_seen_the_catalogue_says_how_much_faster():
    """By the root of operations and bandwidth; wider than what is known; unknown names are typical."""
    types = [JobType(name=f"type-{number}", gpus=1) for number in range(4)]
    rates = {
        "v100-sxm2-16gb": {t: 10.0 * (1 + n) for n, t in enumerate(types)},
        "a100-sxm4-40gb": {},
        "x": {},
    }
    estimator = Estimator(
        profiles=ThroughputTable(source="test", alone_rates=rates),
        gpu_types=tuple(rates),
        types={"job": types[1]},
    )
    found = estimator.every_job_alone()["job"]
    ratio = math.sqrt(312 * 1555 / (125 * 900))
    assert found["a100-sxm4-40gb"].steps_per_second == pytest.approx(ratio * 20, rel=0.1)
    assert found["x"].steps_per_second == pytest.approx(20, rel=0.1)
    assert found["a100-sxm4-40gb"].deviation > found["v100-sxm2-16gb"].deviation
    new = dataclasses.replace(estimator, types={"new": JobType(name="new")})
    new = observed(new, "new", "v100-sxm2-16gb", 50.0)
    assert new.every_job_alone()["new"]["a100-sxm4-40gb"].steps_per_second == pytest.approx(
        ratio * 50, rel=0.1
    )


@given(st.lists(st.floats(0.01, 10.0), min_size=2, max_size=12), st.integers(1, 16), st.data())
def test_measured_layers_are_cut_and_timed_as_the_planner_does(seconds, microbatches, data):
    """The closed form over the exact partition."""
    positions = data.draw(st.integers(1, len(seconds)))
    shape = PipelineShape(schedule="1F1B", microbatches=microbatches, layer_seconds=tuple(seconds))

    def step(ranks: int) -> float:
        return predict_step_seconds(exact_partition(seconds, ranks).loads(seconds), microbatches)

    assert relative_speed(shape, positions) == pytest.approx(step(1) / step(positions))


@pytest.mark.parametrize("schedule", SCHEDULES.builtin)
def test_more_ranks_are_faster_and_less_than_in_proportion(schedule):
    """By every schedule; those without a flush are in proportion."""
    kind = SCHEDULES[schedule]
    shape = PipelineShape(
        schedule=schedule, microbatches=16, stages_per_rank=kind.stages_on_a_rank(), layers=64
    )
    speeds = [relative_speed(shape, ranks) for ranks in (1, 2, 4, 8)]
    assert speeds == sorted(speeds)
    for ranks, speed in zip((1, 2, 4, 8), speeds, strict=True):
        assert speed <= ranks + 1e-9
        assert speed < ranks or ranks == 1 or kind.asynchronous


def test_layers_that_do_not_divide_leave_a_rank_with_more_of_them():
    """Seven layers over six ranks are no faster than over four."""
    shape = PipelineShape(schedule="1F1B", microbatches=8, layers=7)
    assert relative_speed(shape, 6) == pytest.approx(relative_speed(shape, 4))


def test_an_unknown_schedule_and_one_too_large_to_play_have_the_bubble_of_1f1b():
    """A schedule of another distribution that is not installed here, or a thousand ranks."""
    known = PipelineShape(schedule="1F1B", microbatches=8)
    assert relative_speed(PipelineShape(schedule="their.own", microbatches=8), 4) == relative_speed(known, 4)
    huge = PipelineShape(schedule="ZeroBubbleH1", microbatches=4096)
    assert 800 < relative_speed(huge, 1024) < 1024


def test_layers_are_told_apart_by_two_digits():
    """So that a new measurement is mostly the same shape."""
    assert rounded((1.0, 2.0, 3.01)) == rounded((1.001, 2.0, 3.0)) == (0.17, 0.33, 0.5)
    assert rounded(()) == rounded((0.0,)) == rounded((float("inf"), 1.0)) == ()


def test_one_row_more_is_nearly_what_a_whole_fit_says():
    """With many rows the columns' factors are known; the row's known entries stay as they were given."""
    random = np.random.default_rng(3)
    rows, columns = random.normal(size=(60, 2)), random.normal(size=(5, 2))
    values = 1.0 + rows @ columns.T
    known = random.random(values.shape) < 0.8
    known[-1] = [True, False, True, True, False]
    without = complete(values[:-1], known[:-1])
    whole = complete(values, known)
    found = without.row(values[-1], known[-1])
    assert found[[0, 2, 3]] == pytest.approx(values[-1][[0, 2, 3]])
    assert found == pytest.approx(whole.values[-1], abs=0.15)


TABLE = {"v100": {"('A3C', 1)": {"null": 2.5, "('A3C', 1)": [1.5, 1.5]}}}


@pytest.mark.parametrize("pack", [lambda data: data, gzip.compress])
def test_a_table_is_read_plain_or_gzipped(tmp_path, pack):
    """Both forms give the same numbers."""
    file = tmp_path / "table"
    file.write_bytes(pack(json.dumps(TABLE).encode()))
    table = read_table(file)
    assert table.alone(JobType(name="A3C"), "v100") == 2.5
    assert table.shared(JobType(name="A3C"), JobType(name="A3C"), "v100") == (1.5, 1.5)


def test_the_built_in_tables_are_gavels():
    """83 rows a type; a value 0 means that the job does not fit; the two differ."""
    table = built_in_table("simulation")
    assert set(table.gpu_types) == {"k80", "p100", "v100"}
    assert len(table.alone_rates["v100"]) == 83
    large = JobType(name="ResNet-50 (batch size 128)", gpus=2)
    assert table.alone(large, "k80") == 0.0
    assert table.alone(large, "v100") > table.alone(large, "p100") > 0.0
    assert table.alone(large, "v100") != table.spread(large, "v100")
    assert table.alone_rates != built_in_table("physical_cluster").alone_rates


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"nonsense", "is not JSON"),
        (b"[1]", "is not a throughput table"),
        (b'{"v100": {"(\'x\', 1)": {"alone": 1}}}', 'no number under "null"'),
        (b'{"v100": {"x": {"null": 1}}}', "'x' is not a job type"),
        (b'{"v100": {"(\'x\', 0)": {"null": 1}}}', "is not a job type"),
        (b'{"v100": {"(\'x\', 1)": {"null": NaN}}}', "nan must be a number of steps/s"),
        (b'{"v100": {"(\'x\', 1)": {"null": -1}}}', "-1 must be a number of steps/s"),
        (b'{"v100": {"(\'x\', 1)": {"null": true}}}', "True must be a number of steps/s"),
        (b'{"v100": {"(\'x\', 1)": {"null": 1, "(\'y\', 1)": [1]}}}', "[1] must be [steps/s of the first"),
        (b"[" * 100_000, "is not JSON"),
        (b"\x1f\x8bnonsense", "is not JSON"),
    ],
)
def test_a_file_that_is_no_table_is_refused(tmp_path, content, what):
    """The message names the file and what is wrong."""
    file = tmp_path / "broken.json"
    file.write_bytes(content)
    with pytest.raises(ThroughputError, match=r"broken\.json") as raised:
        read_table(file)
    assert what in str(raised.value)


def test_a_missing_row_says_which_sizes_there_are():
    """Type, size and GPU type are named."""
    table = built_in_table("simulation")
    with pytest.raises(ThroughputError, match=r"'A3C' on 2 GPUs of v100 .* on \[1\] GPUs"):
        table.alone(JobType(name="A3C", gpus=2), "v100")
    with pytest.raises(ThroughputError, match="GPU type 'h100' is not in"):
        table.alone(JobType(name="A3C"), "h100")
