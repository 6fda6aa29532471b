"""Traces are read as they are; the same seed is the same workload."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from ballast_policies.simulator.settings import SimulatedCluster
from ballast_policies.simulator.workloads import Generated, WorkloadError, load_of, parse_trace, read_trace
from ballast_policies.throughput.table import JobType, ThroughputTable, built_in_table
from hypothesis import given
from hypothesis import strategies as st

from tests.policies.simulator.test_engine import FAST, job, table
from tests.support.examples import examples
from tests.support.simulations import simulation

LINE = "A3C\tpython3 main.py\trl\t--max-steps\t0\t1200\t1\t1\t-1.000000\t0\n"


def first(workload, count):
    return list(itertools.islice(workload.jobs, count))


def test_gavels_continuous_trace_has_96_jobs_over_thirteen_hours():
    """59 jobs on one GPU, 19 on two, 18 on four; the last arrives at 46,317 s."""
    jobs = first(read_trace(Path("max_min_fairness")), 1000)
    sizes = [job.type.gpus for job in jobs]
    assert (sizes.count(1), sizes.count(2), sizes.count(4)) == (59, 19, 18)
    assert jobs[0].type == JobType(name="ResNet-18 (batch size 128)", gpus=4)
    assert jobs[0].steps == 925982
    assert jobs[-1].arrival == pytest.approx(46317, abs=1)
    assert all(job.deadline_factor is None for job in jobs)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "no job"),
        ("a\tb\n", "line 1: 2 columns; a job has 10"),
        (LINE.replace("1200", "many"), "line 1: steps: 'many' is not a number"),
        (LINE.replace("1200", "0"), "steps: 0 must be a finite number above 0"),
        (LINE.replace("1200\t1\t", "1200\t1.5\t"), "GPUs: 1.5 is not a whole number"),
        (LINE.replace("1200\t1\t1", "1200\t1\t-2"), "weight: -2 must be"),
        (LINE.replace("\t0\n", "\t-5\n"), "arrival: -5 is before the begin"),
        (LINE.replace("\t0\n", "\t9\n") + LINE, "line 2: arrives at 0 s, before the line above"),
    ],
)
def test_a_wrong_line_is_named_with_what_is_wrong(text, what):
    """The message has the line, the column and the value."""
    with pytest.raises(WorkloadError, match=r"t\.trace") as raised:
        parse_trace(text, name="t.trace")
    assert what in str(raised.value)


def test_a_trace_that_is_not_there_names_the_built_in_ones():
    """The error says what to name instead."""
    with pytest.raises(WorkloadError, match="minimize_makespan"):
        read_trace(Path("nowhere.trace"))


def test_the_first_generated_jobs_of_seed_0_are_gavels():
    """Drawn by Python's generator in Gavel's order: scale factor, duration, job type."""
    import random

    jobs = random.Random(2)
    expected = []
    names = [f"ResNet-18 (batch size {size})" for size in (16, 32, 64, 128, 256)]
    names += [f"ResNet-50 (batch size {size})" for size in (16, 32, 64, 128)]
    names += [f"Transformer (batch size {size})" for size in (16, 32, 64, 128, 256)]
    names += [f"LM (batch size {size})" for size in (5, 10, 20, 40, 80)]
    names += [f"Recommendation (batch size {size})" for size in (512, 1024, 2048, 4096, 8192)]
    names += ["A3C", "CycleGAN"]
    for _ in range(50):
        jobs.uniform(0, 1)
        long = jobs.random() >= 0.8
        minutes = 10 ** (jobs.uniform(3, 4) if long else jobs.uniform(1.5, 3))
        expected.append((jobs.choice(names), 60 * minutes))
    table = built_in_table()
    found = first(Generated(table=table, jobs_per_hour=4.0, seed=0, several_gpus=False).workload(), 50)
    assert [job.type.name for job in found] == [name for name, _ in expected]
    durations = [job.steps / table.alone(job.type, "v100") for job in found]
    assert durations == pytest.approx([seconds for _, seconds in expected])


def test_single_and_multiple_workloads_of_a_seed_share_their_arrivals():
    """The number of GPUs does not touch the stream of the arrivals."""
    table = built_in_table()
    single = first(Generated(table=table, jobs_per_hour=4.0, seed=1, several_gpus=False).workload(), 100)
    multiple = first(Generated(table=table, jobs_per_hour=4.0, seed=1, several_gpus=True).workload(), 100)
    assert [job.arrival for job in single] == [job.arrival for job in multiple]
    assert {job.type.gpus for job in multiple} == {1, 2, 4, 8}
    assert single[0].arrival == 0.0


def test_drawn_workloads_have_gavels_shape():
    """70/10/15/5 % of sizes 1/2/4/8; a fifth are long; a fifth weigh 5; the rate is as asked."""
    table = built_in_table()
    drawn = Generated(table=table, jobs_per_hour=5.0, seed=3, weights=True, deadlines=True)
    jobs = first(drawn.workload(), 4000)
    share = {size: sum(job.type.gpus == size for job in jobs) / 4000 for size in (1, 2, 4, 8)}
    assert share == pytest.approx({1: 0.7, 2: 0.1, 4: 0.15, 8: 0.05}, abs=0.03)
    assert sum(job.weight == 5.0 for job in jobs) / 4000 == pytest.approx(0.2, abs=0.02)
    assert {job.deadline_factor for job in jobs} == {1.2, 2.0, 10.0}
    assert 4000 / (jobs[-1].arrival / 3600) == pytest.approx(5.0, rel=0.05)
    longer = sum(job.steps / table.alone(job.type, "v100") >= 60_000 for job in jobs) / 4000
    assert longer == pytest.approx(0.2, abs=0.03)


def test_a_workload_can_be_begun_again():
    """Iterating twice gives the same jobs."""
    workload = Generated(table=built_in_table(), count=20, seed=5).workload()
    assert list(workload.jobs) == list(workload.jobs)
    assert {job.arrival for job in workload.jobs} == {0.0}


TWO_TYPES = table({("a", 1): {"fast": 4.0, "slow": 1.0}, ("b", 1): {"fast": 1.0, "slow": 1.0}})


def test_the_load_of_one_gpu_type_is_its_arrivals_gpu_hours():
    """Jobs of an hour on one GPU and on two, two an hour: three GPUs are busy."""
    load = load_of([job(steps=3600.0), job(gpus=2, steps=3600.0)], {"fast": 6}, FAST, jobs_per_hour=2.0)
    assert load.fastest_gpus == pytest.approx(3.0)
    assert load.least == pytest.approx(0.5)


def test_jobs_that_fit_nowhere_need_nothing():
    """They are refused when they arrive."""
    load = load_of([job(gpus=2)], {"fast": 1}, FAST, jobs_per_hour=5.0)
    assert (load.fastest_gpus, load.least) == (0.0, 0.0)


def test_the_fast_type_is_wanted_by_all():
    """Alone on it the demand would fit; one GPU of it and a slow one are too few all the same."""
    load = load_of([job(steps=3600.0 * 4)], {"fast": 1, "slow": 1}, TWO_TYPES, jobs_per_hour=1.5)
    assert load.fastest_gpus == pytest.approx(1.5)
    # The two do 4 + 1 steps a second, and 1.5 x 4 arrive.
    assert load.least == pytest.approx(6 / 5, rel=0.01)


@pytest.mark.slow
@examples(40)
@given(
    rates=st.lists(st.lists(st.floats(0.1, 10.0), min_size=2, max_size=2), min_size=1, max_size=5),
    gpus=st.tuples(st.integers(1, 20), st.integers(1, 20)),
)
def test_the_bound_is_that_of_the_best_prices(rates, gpus):
    """With two types one can try all prices: never above their best bound, and within a fiftieth of it."""
    rows = {(f"j{i}", 1): {"fast": fast, "slow": slow} for i, (fast, slow) in enumerate(rates)}
    jobs = [job(f"j{i}", steps=3600.0) for i in range(len(rates))]
    counts = dict(zip(("fast", "slow"), gpus, strict=True))
    load = load_of(jobs, counts, table(rows), jobs_per_hour=float(len(rates)))
    hours = 1.0 / np.array(rates)
    share = np.linspace(0, 1, 2001)[:, None, None]
    prices = np.concatenate([share / gpus[0], (1 - share) / gpus[1]], axis=2)
    best = (prices * hours).min(axis=2).sum(axis=1).max()
    assert load.least <= best * 1.001
    assert load.least >= best * 0.98
    assert load.least >= load.fastest_gpus / sum(gpus) * (1 - 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("jobs_per_hour", "grows"), [(3.0, False), (9.0, True)])
def test_the_queue_grows_where_the_load_is_above_one(jobs_per_hour: float, grows: bool):
    """And does not where it is well below: the same jobs, simulated."""
    oracle: ThroughputTable = built_in_table()
    gpus = {"v100": 36, "p100": 36, "k80": 36}
    workload = Generated(table=oracle, jobs_per_hour=jobs_per_hour, seed=0, several_gpus=False).workload()
    load = load_of(itertools.islice(workload.jobs, 2000), gpus, oracle, jobs_per_hour=jobs_per_hour)
    assert (load.least > 1) is grows
    waiting = []
    simulation("whole-rounds", policy="fifo", round_seconds=3600.0, measure=(0, 600))(
        workload,
        SimulatedCluster(gpus=gpus),
        oracle,
        progress=lambda moment: waiting.append(moment.waiting),
    )
    assert (max(waiting) > 100) is grows
