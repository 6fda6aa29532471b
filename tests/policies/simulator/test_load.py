"""What arriving jobs need of a cluster, before any is simulated."""

import itertools

import numpy as np
import pytest
from ballast_policies.simulator.settings import SimulatedCluster
from ballast_policies.simulator.workloads import continuous, load_of
from ballast_policies.throughput.table import ThroughputTable, built_in_table
from hypothesis import given
from hypothesis import strategies as st

from tests.policies.simulator.test_engine import FAST, job, table
from tests.support.examples import examples
from tests.support.simulations import simulation

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
    workload = continuous(oracle, jobs_per_hour=jobs_per_hour, seed=0, several_gpus=False)
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
