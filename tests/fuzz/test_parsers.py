"""No parser raises anything but its documented error, whatever it is given (longer: ``scripts/fuzz``)."""

import contextlib

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.fuzz.parsers import PARSERS, attempt
from tests.support.examples import examples


@pytest.mark.slow
@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_hostile_input_is_read_or_refused_as_documented(parser):
    """What is valid but for a few changes that an enemy or a fault would make."""

    @examples(60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.integers(0, 2**16), max_size=30))
    def reads(choices):
        left = iter(choices)
        attempt(parser, lambda below: next(left, 0) % below)

    reads()


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_the_example_is_read(parser):
    """What is changed is valid to begin with: most changes are not refused at the first field."""
    for seed in range(60):
        numbers = iter(_numbers(seed))
        with contextlib.suppress(*parser.errors):
            parser.read(parser.make(lambda below, numbers=numbers: next(numbers) % below))
            return
    pytest.fail("nothing was read")


def _numbers(seed):
    """A fixed stream of numbers (Knuth's multiplicative generator)."""
    value = seed + 1
    while True:
        value = (value * 6364136223846793005 + 1442695040888963407) % 2**64
        yield value >> 33
