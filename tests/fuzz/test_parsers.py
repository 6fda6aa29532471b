"""No parser raises anything but its documented error, whatever it is given (longer: ``scripts/fuzz``)."""

import contextlib

import pytest
from ballast_operator.api.read import read_job_status
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.fuzz import seeds
from tests.fuzz.parsers import BY_NAME, PARSERS, attempt
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


def test_the_status_that_is_changed_has_every_field():
    """A field of the status that the example lacks is never changed."""
    status = read_job_status({"status": seeds.STATUS})
    assert status.model_dump(by_alias=True) == status.model_dump(by_alias=True, exclude_unset=True)


def _numbers(seed):
    """A fixed stream of numbers (Knuth's multiplicative generator)."""
    value = seed + 1
    while True:
        value = (value * 6364136223846793005 + 1442695040888963407) % 2**64
        yield value >> 33


_OF_NO_PART = [{**seeds.STATUS["allocation"]["parts"][0], "pods": []}, seeds.STATUS["allocation"]["parts"][1]]
FOUND = {
    "a gang in several pools whose last pod is in none": (
        "job-status",
        {"status": {**seeds.STATUS, "allocation": {**seeds.STATUS["allocation"], "parts": _OF_NO_PART}}},
    ),
    "nodes.yaml that is no text": ("nodes-file", "\ud800nodes: []"),
    "nodes.yaml with a date that cannot be": ("nodes-file", "nodes: [{name: 2030-13-41}]"),
    "nodes.yaml nested deeply": ("nodes-file", "[" * 20_000),
    "a configuration with a date that cannot be": ("trainer-file", "totalSteps: 2030-13-41"),
    "a configuration nested deeply": ("trainer-file", "[" * 20_000),
    "a profile with a date that cannot be": ("profile-file", "layers: 2030-13-41"),
    "a profile nested deeply": ("profile-file", "[" * 20_000),
    "a plan of an endless epoch": ("client-plan", '{"epoch": Infinity, "ranks": [], "directive": "run"}'),
    "a lock nested deeply": ("folder-owner", "[" * 20_000),
    "an index that keeps a value far away": (
        "checkpoint-index",
        b"\x80\x04Nr" + (2**24).to_bytes(4, "little") + b".",
    ),
    "a lock with a launch that is no number": (
        "folder-owner",
        '{"token":"t","run":"team/a","launch":"x","host":"h","machine":"m","pid":1,"started":"1"}',
    ),
}
"""Inputs on which a parser has failed."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "content"), FOUND.values(), ids=FOUND.keys())
def test_what_was_found_is_read_or_refused(name, content):
    """No other exception than the parser's own."""
    parser = BY_NAME[name]
    try:
        parser.read(content)
    except parser.errors as error:
        assert str(error)
