"""Speeds of gangs by the nodes that they are on, and of two jobs on one GPU."""

import math

import pytest
from ballast_policies.scheduling.gang_speeds import bounded, packed_speeds, speed_on
from ballast_policies.throughput.estimator import FIRST_GUESS, PairSpeeds
from ballast_policies.throughput.speeds import Estimate, SpeedKey
from hypothesis import given
from hypothesis import strategies as st


def measured(rate: float) -> Estimate:
    return Estimate(steps_per_second=rate, deviation=0.05, source="measured", reports=1)


def speeds(**by_nodes: float) -> dict:
    """``n2=3.0``: four V100s on two nodes do three steps a second."""
    return {SpeedKey.of("v100", 4, int(key[1:])): measured(rate) for key, rate in by_nodes.items()}


V100 = ("v100", 4)


TYPES = st.from_regex(r"[A-Za-z0-9][-A-Za-z0-9_.]{0,20}", fullmatch=True)


@given(
    st.builds(SpeedKey.of, TYPES, st.integers(1, 1000), st.integers(1, 1000))
    | st.builds(SpeedKey, st.tuples(st.tuples(TYPES, st.just(1))), st.just(1), TYPES)
    | st.builds(SpeedKey.of_types, st.lists(st.tuples(TYPES, st.integers(1, 9)), min_size=1))
)
def test_what_is_saved_of_a_key_is_read_back(key):
    """Gangs on one node and several, beside another job, in several pools."""
    assert SpeedKey.read(str(key), key.total) == key


def test_a_key_is_saved_as_operators_have_always_saved_it():
    """States of earlier ones are read."""
    assert str(SpeedKey.of("v100", 4)) == "v100"
    assert str(SpeedKey.of("v100", 4, 2)) == "v100 over 2 nodes"
    assert str(SpeedKey.of("v100", 1)._replace(partner="abc")) == "v100 with abc"
    assert str(SpeedKey.of_types([("v100", 2), ("k80", 1), ("k80", 1)])) == "2 x k80 + 2 x v100"
    assert str(SpeedKey.of_types([("v100", 2), ("v100", 2)])) == "4 x v100"


def test_speeds_in_several_pools_and_beside_other_jobs_are_those_of_no_gang_in_one():
    """Not even where all its GPUs are of one type."""
    others = {
        SpeedKey.of_types([("v100", 2), ("v100", 2)]): measured(3.0),
        SpeedKey.of("v100", 4)._replace(partner="abc"): measured(2.0),
    }
    assert packed_speeds(others, lambda *_: 1).known == {}


def test_a_speed_on_the_fewest_nodes_stands_whatever_was_measured_on_others():
    """Both are kept, neither changes the other."""
    found = packed_speeds(speeds(n1=5.0, n3=2.0), lambda *_: 1)
    assert found.known == {V100: measured(5.0)}
    found = packed_speeds(speeds(n1=5.0, n3=2.0), lambda *_: 3)
    assert found.known == {V100: measured(2.0)}


def test_a_speed_on_more_nodes_is_a_lower_bound_and_one_on_fewer_an_upper_bound():
    """Where two nodes are the fewest, neither one node nor three say how fast it is."""
    found = packed_speeds(speeds(n1=5.0, n3=2.0), lambda *_: 2)
    assert (found.known, found.at_least, found.at_most) == ({}, {V100: measured(2.0)}, {V100: measured(5.0)})
    prior = measured(3.0)
    assert bounded(prior, found.at_least[V100], found.at_most[V100]) is None
    assert bounded(measured(1.0), found.at_least[V100], None).steps_per_second == 2.0
    assert bounded(measured(9.0), None, found.at_most[V100]).steps_per_second == 5.0


def test_what_jobs_of_the_kind_did_on_both_says_how_they_compare():
    """Half as fast on three nodes: measured at two there, four on one. It is an estimate."""
    found = packed_speeds(speeds(n3=2.0), lambda *_: 1, speeds(n1=10.0, n3=5.0)).known[V100]
    assert found.steps_per_second == pytest.approx(4.0)
    assert (found.source, found.reports) == ("prior", 0)
    assert found.deviation > 0.05


def test_without_any_knowledge_of_the_nodes_the_fewest_that_were_measured_count():
    """As in a pool that has no nodes at the moment."""
    assert packed_speeds(speeds(n2=3.0, n4=1.0), lambda *_: None).known == {V100: measured(3.0)}


def test_the_speed_on_more_nodes_is_reported_or_follows_from_others_or_is_not_known_to_be_less():
    common = {"packed": 8.0, "fewest": 1}
    likely = speeds(n1=10.0, n2=5.0)
    assert speed_on(2, "v100", 4, **common, own=speeds(n2=3.0), like=likely) == 3.0
    assert speed_on(2, "v100", 4, **common, own={}, like=likely) == pytest.approx(4.0)
    assert speed_on(3, "v100", 4, **common, own=speeds(n2=3.0), like={}) == 3.0
    assert speed_on(3, "v100", 4, **common, own={}, like=likely) == pytest.approx(4.0)
    assert speed_on(3, "v100", 4, **common, own={}, like={}) == 8.0
    assert speed_on(1, "v100", 4, **common, own=speeds(n2=3.0), like=likely) == 8.0


@given(
    st.dictionaries(st.integers(1, 8), st.floats(0.1, 10.0), min_size=1),
    st.integers(1, 8),
    st.floats(0.1, 10.0),
)
def test_only_a_measurement_on_the_fewest_nodes_is_one(rates, fewest, prior):
    """What else is said keeps within the bounds, and is marked as an estimate."""
    found = packed_speeds(
        {SpeedKey.of("v100", 4, n): measured(r) for n, r in rates.items()}, lambda *_: fewest
    )
    if fewest in rates:
        assert found.known == {V100: measured(rates[fewest])}
        return
    assert not found.known
    at_least, at_most = found.at_least.get(V100), found.at_most.get(V100)
    more, fewer = [n for n in rates if n > fewest], [n for n in rates if n < fewest]
    assert at_least == (measured(rates[min(more)]) if more else None)
    assert at_most == (measured(rates[max(fewer)]) if fewer else None)
    guess = bounded(measured(prior), at_least, at_most)
    assert guess is None or (guess.source == "prior" and math.isfinite(guess.deviation))


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
