"""The exact choice of configurations."""

import itertools

import pytest
from ballast_policies.allocation.problem import Configuration
from ballast_policies.elastic import job as elastic_job
from ballast_policies.elastic.job import ElasticCluster, Option, best_assignment, sizes_of
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples

CLUSTER = ElasticCluster(nodes={"v100": 2, "k80": 1}, gpus_per_node={"v100": 4, "k80": 4})

options = st.lists(
    st.builds(
        lambda gpus, worth: Option(
            configuration=Configuration(name=str(gpus), gpus=gpus, throughput=1.0), worth=worth
        ),
        st.dictionaries(st.sampled_from(["v100", "k80"]), st.sampled_from([1, 2, 4]), min_size=1),
        st.integers(1, 1000).map(float),
    ),
    max_size=4,
    unique_by=lambda option: option.configuration,
)


def worth_of(jobs, chosen):
    return sum(
        next(option.worth for option in own if option.configuration == each)
        for own, each in zip(jobs, chosen, strict=True)
        if each is not None
    )


def by_enumeration(jobs, cluster):
    best = 0.0
    for choice in itertools.product(*([None, *own] for own in jobs)):
        sizes = sizes_of([None if option is None else option.configuration for option in choice])
        if all(sum(sizes.get(t, [])) <= gpus for t, gpus in cluster.gpus.items()):
            best = max(best, sum(option.worth for option in choice if option is not None))
    return best


@examples(60, deadline=None)
@given(st.lists(options, max_size=5))
def test_the_choice_is_the_best_of_all(jobs):
    """Powers of two always find places side by side, so the GPUs alone limit the choice."""
    chosen = best_assignment(jobs, CLUSTER)
    assert worth_of(jobs, chosen) == by_enumeration(jobs, CLUSTER)
    assert CLUSTER.fits(sizes_of(chosen))


@examples(60, deadline=None)
@given(st.lists(options, max_size=8))
def test_prices_never_give_out_what_is_not_there(jobs):
    """On clusters too large for the exact choice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elastic_job, "MOST_CELLS", 1)
        chosen = best_assignment(jobs, CLUSTER)
    assert CLUSTER.fits(sizes_of(chosen))
    assert all(
        each is None or any(option.configuration == each for option in own)
        for own, each in zip(jobs, chosen, strict=True)
    )


def test_by_prices_the_choice_is_nearly_the_best_one():
    """Sixty jobs that gain unequally from more GPUs, on two types that suit them unequally."""
    cluster = ElasticCluster(nodes={"v100": 20, "k80": 30}, gpus_per_node={"v100": 4, "k80": 4})
    jobs = [
        [
            Option(
                configuration=Configuration.of_one_type(kind, gpus, 1.0),
                worth=(1 + i % 7) * (1 + i % 5 if kind == "v100" else 2) * gpus ** (0.3 + 0.1 * (i % 6)),
            )
            for kind in ("v100", "k80")
            for gpus in (1, 2, 4, 8)
            if gpus > i % 3
        ]
        for i in range(60)
    ]
    exact = best_assignment(jobs, cluster)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elastic_job, "MOST_CELLS", 1)
        chosen = best_assignment(jobs, cluster)
    assert worth_of(jobs, chosen) >= 0.99 * worth_of(jobs, exact)


@pytest.mark.parametrize(
    ("sizes", "fits"),
    [([4, 4], True), ([6, 2], True), ([3, 3, 2], False), ([5, 3], True), ([3, 3], True), ([8, 1], False)],
)
def test_a_job_takes_whole_nodes_and_its_remainder_on_one_more(sizes, fits):
    """Two nodes of 4."""
    assert ElasticCluster(nodes={"v100": 2}, gpus_per_node={"v100": 4}).fits({"v100": sizes}) is fits


def test_jobs_of_sizes_that_leave_gaps_run_as_far_as_they_find_places():
    """Three jobs of 5 GPUs have GPUs enough on two nodes of 8, and room for two: these run."""
    cluster = ElasticCluster(nodes={"t": 2}, gpus_per_node={"t": 8})
    five = Configuration.of_one_type("t", 5, 2.0)
    jobs = [[Option(configuration=five, worth=worth)] for worth in (1.0, 3.0, 2.0)]
    assert best_assignment(jobs, cluster) == [None, five, five]
