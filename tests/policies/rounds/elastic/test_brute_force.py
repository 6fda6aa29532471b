"""Sizes of concave gangs against the best of all sizes."""

import itertools

import pytest
from ballast_policies.allocation.policy import Surplus
from hypothesis import given
from hypothesis import strategies as st

from tests.policies.rounds.elastic.gangs import CONCAVE, decide, gang, sizes_of
from tests.policies.rounds.played import job, node


def brute_force(tables, gpus):
    """All divisions of the GPUs in which every gang has one of its sizes."""
    return [sizes for sizes in itertools.product(*(sorted(table) for table in tables)) if sum(sizes) <= gpus]


@st.composite
def concave_gangs(draw):
    """Gangs of one pool whose speeds grow by less with each GPU; all fit at their least sizes."""
    tables = []
    for _ in range(draw(st.integers(2, 4))):
        steps = sorted(draw(st.lists(st.floats(0.1, 1.0), min_size=4, max_size=4)), reverse=True)
        tables.append(dict(enumerate(itertools.accumulate(steps), start=1)))
    return tables, draw(st.integers(len(tables), 12))


@given(concave_gangs())
def test_the_least_level_is_the_best_that_brute_force_finds(case):
    """By fairness, where more GPUs always help, and by less each time."""
    tables, gpus = case
    elastic = {f"j{i}": gang(table, speeds=table) for i, table in enumerate(tables)}
    decided = decide([job(name) for name in elastic], [node("a", gpus)], elastic)
    part = gpus / len(tables)
    units = [elastic[name].partition_speed("v100", part) for name in elastic]

    def least(sizes):
        return min(tables[i][size] / units[i] for i, size in enumerate(sizes))

    best = max(least(sizes) for sizes in brute_force(tables, gpus))
    found = sizes_of(decided)
    assert least([found[name] for name in elastic]) == pytest.approx(best)


@given(concave_gangs())
def test_the_sum_of_speeds_is_the_best_that_brute_force_finds(case):
    """By throughput."""
    tables, gpus = case
    elastic = {f"j{i}": gang(table, speeds=table) for i, table in enumerate(tables)}
    decided = decide([job(name) for name in elastic], [node("a", gpus)], elastic, surplus=Surplus.THROUGHPUT)
    best = max(sum(t[s] for t, s in zip(tables, sizes, strict=True)) for sizes in brute_force(tables, gpus))
    found = sizes_of(decided)
    total = sum(table[found[f"j{i}"]] for i, table in enumerate(tables))
    assert total >= best / 1.021  # steps of less than two percent are not taken


@given(concave_gangs())
def test_no_job_has_less_than_on_its_part_of_the_cluster(case):
    """Sharing incentive in whole GPUs: as many as n equal parts have, rounded down, if its speed gains."""
    tables, gpus = case
    tables = [CONCAVE] * len(tables)
    elastic = {f"j{i}": gang(table, speeds=table) for i, table in enumerate(tables)}
    found = sizes_of(decide([job(name) for name in elastic], [node("a", gpus)], elastic))
    assert min(found.values()) >= min(8, gpus // len(tables))
