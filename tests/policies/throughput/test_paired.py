"""Speeds of two jobs on one GPU, measured and estimated."""

import pytest
from ballast_policies.throughput.paired import FIRST_GUESS, PairSpeeds
from ballast_policies.throughput.speed_key import SpeedKey
from ballast_policies.throughput.track import Estimate


def speed(value: float) -> Estimate:
    return Estimate(steps_per_second=value, deviation=0.1, source="measured")


def kinds(**pairs: float) -> PairSpeeds:
    """Kinds that do 10 steps/s alone; ``a_b=0.8``: a does 8 beside b."""
    alone = SpeedKey.of("v100", 1)
    found: dict[str, dict[SpeedKey, Estimate]] = {}
    for pair, value in pairs.items():
        kind, partner = pair.split("_")
        found.setdefault(kind, {alone: speed(10.0)})[alone._replace(partner=partner)] = speed(10 * value)
    return PairSpeeds.of(found)


def test_what_was_measured_counts_and_is_never_above_the_speed_alone():
    """By the partner's kind, and for each of the two by itself."""
    known = kinds(a_b=0.8, b_a=1.2)
    assert (known.relative("a", "b", "v100").value, known.relative("a", "b", "v100").measured) == (0.8, True)
    assert known.relative("b", "a", "v100").value == 1.0


def test_before_any_pair_of_a_gpu_type_all_count_alike():
    """Whatever was measured on another type."""
    known = kinds(a_b=0.8).relative("a", "b", "t4")
    assert (known.value, known.measured) == (FIRST_GUESS, False)


def test_a_pair_that_has_not_run_is_estimated_from_those_that_have():
    """A kind that suffers beside all others, and one that others suffer from."""
    known = kinds(a_b=0.9, a_c=0.8, b_a=0.5, b_c=0.4, c_a=0.9)
    estimate = known.relative("c", "b", "v100")
    assert not estimate.measured and 0.8 < estimate.value <= 1.0
    assert known.relative("b", "b", "v100").value < known.relative("a", "a", "v100").value
    assert 0.5 < known.relative("new", "other", "v100").value < 0.9


@pytest.mark.parametrize("value", [0.0, 1e-9, 1e9])
def test_estimates_stay_within_what_is_possible(value: float):
    """Whatever jobs report."""
    known = kinds(a_b=value, b_a=0.5)
    for pair in (("a", "a"), ("b", "b"), ("c", "a"), ("c", "d")):
        assert 0.0 < known.relative(*pair, "v100").value <= 1.0


def test_a_speed_beside_another_says_nothing_without_one_alone():
    """It is kept, and counts once the job has run alone."""
    known = PairSpeeds.of({"a": {SpeedKey.of("v100", 1)._replace(partner="b"): speed(8.0)}})
    assert not known.relative("a", "b", "v100").measured
