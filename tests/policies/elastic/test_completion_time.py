"""Weights and units of ``completion-time``."""

import dataclasses

import pytest
from ballast_policies.allocation.problem import Configuration
from ballast_policies.elastic.completion_time import (
    BASE,
    CompletionTime,
    advanced,
    changed,
    hesrpt_weights,
    unit_of_speed,
)
from ballast_policies.elastic.job import ElasticCluster, ElasticJob, JobState

GPUS = 100
CLUSTER = ElasticCluster(nodes={"v100": 1}, gpus_per_node={"v100": GPUS})


def job(name: str, work: float, exponent: float) -> JobState:
    """A job that k GPUs speed up by k^p."""
    configurations = tuple(
        Configuration.of_one_type("v100", gpus, gpus**exponent) for gpus in range(1, GPUS + 1)
    )
    elastic = ElasticJob(
        name=name, arrival=0.0, work=work, restart_seconds=1e-3, configurations=configurations
    )
    return JobState(job=elastic, remaining=work)


def test_hesrpt_gives_the_kth_longest_job_the_papers_part():
    """The k-th longest of m jobs gets (k/m)^q - ((k-1)/m)^q of the GPUs, whatever their lengths (q = 2)."""
    states = [job(name, work, 0.5) for name, work in (("a", 9000.0), ("b", 100_000.0), ("c", 40_000.0))]
    weights = hesrpt_weights([state.remaining for state in states], [1.0] * 3, 0.5)
    parts = [weight**2 / sum(each**2 for each in weights) for weight in weights]
    assert parts == pytest.approx([5 / 9, 1 / 9, 3 / 9])


@pytest.mark.parametrize("exponent", [0.3, 0.5, 0.7])
def test_the_shortest_of_like_jobs_has_the_largest_part(exponent):
    """No job waits, and the shorter a job is, the more GPUs it gets."""
    states = [job(str(i), 1000.0 * 3**i, exponent) for i in range(4)]
    chosen = CompletionTime(cluster=CLUSTER, round_seconds=60.0)(states, 0.0)
    sizes = [each.gpus["v100"] for each in chosen]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) == GPUS
    assert min(sizes) >= 1


@pytest.mark.parametrize(
    ("works", "weights", "first"), [((9e3, 9e3), (1.5, 1.0), 0), ((1e3, 1e5), (1.0, 3.0), 0)]
)
@pytest.mark.parametrize("order", [1, -1])
def test_the_shorter_for_its_weight_of_two_jobs_has_the_only_gpu(works, weights, first, order):
    """1.5 x 9,000 s + 18,000 s is less than the other way around; so is 1,000 s + 3 x 101,000 s."""
    states = []
    for name, (work, weight) in enumerate(zip(works, weights, strict=True)):
        state = job(str(name), work, 0.5)
        alone = dataclasses.replace(state.job, weight=weight, configurations=state.job.configurations[:1])
        states.append(dataclasses.replace(state, job=alone))
    one = ElasticCluster(nodes={"v100": 1}, gpus_per_node={"v100": 1})
    chosen = CompletionTime(cluster=one, round_seconds=60.0).choice(states[::order], BASE)
    assert chosen[::order][first] is not None


def test_one_job_has_the_weight_one_and_many_have_no_cancellation():
    """k^q - (k-1)^q for large k and q."""
    assert hesrpt_weights([5.0], [1.0], 0.9) == [1.0]
    weights = hesrpt_weights([float(i + 1) for i in range(10_000)], [1.0] * 10_000, 0.99)
    assert all(0 < weight <= 10_000.5 for weight in weights)
    assert sorted(weights, reverse=True) == weights


def test_the_unit_of_speed_lies_between_the_fastest_and_the_most_efficient_use():
    """Twice as fast on all configurations: twice the unit."""
    state = job("a", 1000.0, 0.5)
    unit = unit_of_speed(state.job, CLUSTER)
    assert GPUS**0.5 <= unit <= GPUS


def test_a_job_restarts_whenever_it_starts_again_and_waits_for_it_first():
    """Its first start is no restart; a start that takes longer than it runs does no work."""
    state = job("a", 1000.0, 0.5)
    state = dataclasses.replace(state, job=dataclasses.replace(state.job, restart_seconds=30.0))
    one, two, *_ = state.job.configurations
    started = changed(state, one)
    assert advanced(started, 20.0) == dataclasses.replace(started, restart_left=10.0)
    trained = advanced(started, 50.0)
    assert (trained.restart_left, trained.remaining) == (0.0, 980.0)
    stopped = changed(trained, None)
    again = [changed(trained, two), changed(stopped, one)]
    assert [each.restarts for each in (started, stopped, *again)] == [0, 0, 1, 1]
