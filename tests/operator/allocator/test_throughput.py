"""Estimates of speed: known, scaled by what is measured, or guessed."""

import pytest
from ballast_operator.allocator.throughput import estimate

from tests.operator.views.builders import a_spec

KNOWN = {"v100": {4: 4.0, 2: 2.2}, "k80": {4: 1.0}}


def test_known_speeds_are_taken_as_they_are_before_the_job_has_run():
    """The spec's table, at the gang's size."""
    assert estimate(a_spec(throughput=KNOWN), {}, ("v100", "k80"), 4) == {"v100": 4.0, "k80": 1.0}


def test_a_job_that_got_faster_got_faster_everywhere():
    """Measured twice the known speed on one type: the ratio carries over."""
    measured = {("v100", 4): 8.0}
    assert estimate(a_spec(throughput=KNOWN), measured, ("v100", "k80"), 4) == {"v100": 8.0, "k80": 2.0}


def test_another_number_of_stages_is_in_proportion_to_the_nearest_known_one():
    """k80 is known with four stages only: three give three quarters."""
    assert estimate(a_spec(throughput=KNOWN), {}, ("k80",), 3)["k80"] == pytest.approx(0.75)


def test_a_known_zero_stays_zero():
    """The user says that it cannot run there."""
    assert estimate(a_spec(throughput={"k80": {4: 0.0}}), {}, ("k80", "v100"), 4) == {"k80": 0.0, "v100": 1.0}


def test_without_any_knowledge_all_types_are_alike():
    """Indifferent, not impossible."""
    assert estimate(a_spec(), {}, ("v100", "k80"), 2) == {"v100": 1.0, "k80": 1.0}


def test_an_unknown_type_is_guessed_from_what_was_measured():
    """What ran at 3 steps/s on one type is taken to do so on another, until it has run there."""
    assert estimate(a_spec(), {("v100", 2): 3.0}, ("v100", "k80"), 2) == {"v100": 3.0, "k80": 3.0}
