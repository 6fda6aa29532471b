"""The decoder of JSON: strict types, hostile input, paths in every refusal."""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

import pytest
from ballast_policies.contract.decode import decode, decode_text, parse_json
from ballast_policies.contract.errors import ContractError


class Colour(enum.StrEnum):
    RED = "red"
    GREEN = "green"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    size: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    name: str
    speed: float = 1.0
    on: bool = False
    colour: Colour = Colour.RED
    parts: tuple[Inner, ...] = ()
    pair: tuple[float, float] | None = None
    by_name: Mapping[str, float] = dataclasses.field(default_factory=dict)
    anything: Any = None

    def __post_init__(self) -> None:
        if self.name == "forbidden":
            raise ValueError("name 'forbidden' is taken")


def problems(value: Any, **options: Any) -> list[str]:
    with pytest.raises(ContractError) as caught:
        decode(Outer, value, **options)
    return [str(problem) for problem in caught.value.problems]


def test_a_value_of_every_type():
    """A whole number is a float where one is expected; lists become tuples."""
    read = decode(
        Outer,
        {
            "name": "a",
            "speed": 2,
            "on": True,
            "colour": "green",
            "parts": [{"size": 3}],
            "pair": [1, 2.5],
            "byName": {"x": 1},
            "anything": [{"deep": None}],
        },
    )
    assert read == Outer(
        name="a",
        speed=2.0,
        on=True,
        colour=Colour.GREEN,
        parts=(Inner(size=3),),
        pair=(1.0, 2.5),
        by_name={"x": 1.0},
        anything=[{"deep": None}],
    )
    assert isinstance(read.speed, float)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ([], "expected an object, got []"),
        ({}, "name: missing. To fix: give it a value"),
        ({"name": 3}, "name: expected text, got 3"),
        ({"name": "a", "speed": True}, "speed: expected a number, got True"),
        ({"name": "a", "speed": "fast"}, "speed: expected a number, got 'fast'"),
        ({"name": "a", "speed": float("inf")}, "speed: expected a number, got inf"),
        ({"name": "a", "anything": [float("nan")]}, "anything[0]: expected a number, got nan"),
        ({"name": "a", "speed": 10**400}, "speed: a whole number of 1329 bits is beyond 64 bits"),
        ({"name": "a", "on": 1}, "on: expected true or false, got 1"),
        ({"name": "a", "colour": "blue"}, "colour: 'blue' is not one of red, green"),
        ({"name": "a", "colour": ["red"]}, "colour: ['red'] is not one of red, green"),
        (
            {"name": "a", "parts": [{"size": 1}, {"size": 1.0}]},
            "parts[1].size: expected a whole number, got 1.0",
        ),
        ({"name": "a", "parts": [{"size": False}]}, "parts[0].size: expected a whole number, got False"),
        ({"name": "a", "parts": "ab"}, "parts: expected a list, got 'ab'"),
        ({"name": "a", "pair": [1]}, "pair: expected a list of 2, got [1]"),
        ({"name": "a", "byName": {1: 2}}, "byName: expected keys of text, got 1"),
        ({"name": "forbidden"}, "name 'forbidden' is taken"),
    ],
)
def test_a_value_that_does_not_fit(value, problem):
    """Is refused with its path, what is expected, what it is, and what to change."""
    (found,) = problems(value)
    assert found.startswith(problem)
    assert "To fix: " in found or "taken" in found


def test_an_unknown_key_is_refused_in_a_file_and_ignored_in_a_message():
    """Refused in what people write, with the nearest known key; ignored in messages."""
    assert problems({"name": "a", "sped": 3})[0].startswith(
        "sped: there is no such field. To fix: leave it out"
    )
    assert "did you mean 'speed'?" in problems({"name": "a", "sped": 3})[0]
    assert decode(Outer, {"name": "a", "sped": 3}, unknown="ignore") == Outer(name="a")


def test_all_problems_of_a_value_are_found():
    """With the path of the value itself in front."""
    assert problems({"speed": "x", "parts": [{}]}, path="job") == [
        "job.name: missing. To fix: give it a value",
        "job.speed: expected a number, got 'x'. To fix: a number",
        "job.parts[0].size: missing. To fix: give it a value",
    ]


def test_of_very_many_problems_some_are_told():
    """A hostile text may have a hundred thousand; a null beside the key of a field is none, however many."""
    found = problems({"name": "a", "parts": [{"size": "x"}] * 250})
    assert len(found) == 101 and found[-1] == "150 more problems"
    parts = [{"size": number, "more": None} for number in range(500)]
    assert decode(Outer, {"name": "a", "speed": None, "parts": parts}, unknown="ignore").speed == 1.0
    with pytest.raises(ContractError) as caught:
        parse_json('[{"a": 1, "a": 2}' + ', {"a": 1, "a": 2}' * 249 + "]")
    assert len(caught.value.problems) == 100
    nulls = [{"size": None}] * 250
    assert problems({"name": "a", "parts": nulls})[0].startswith("parts[0].size: missing")


@pytest.mark.slow
def test_a_value_that_refers_to_one_part_many_times_is_refused_soon():
    """A few aliases of YAML name billions of values."""
    value: Any = 1
    for _ in range(10):
        value = [value] * 10
    with pytest.raises(ContractError, match=r"more than 2000000 values. To fix: .*aliases"):
        decode(Outer, {"name": "a", "anything": value})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not JSON"),
        ('{"name": "a"', "not JSON"),
        ('{"name": "a", "name": "b"}', "name: given twice"),
        ('{"name": "a", "anything": {"x": 1, "x": 2}}', "anything.x: given twice"),
        ('{"name": "a", "speed": NaN}', "NaN is no number of JSON"),
        ('{"name": "a", "anything": -Infinity}', "-Infinity is no number of JSON"),
        ("[" * 100_000, "nested deeper than 32 levels"),
        ('{"name": "a", "new": ' + "[" * 40 + "]" * 40 + "}", "nested deeper than 32 levels"),
        ('{"name": "a", "anything": ' + "9" * 5000 + "}", "beyond 64 bits"),
        ('{"name": "a", "anything": -9223372036854775808}', "beyond 64 bits"),
        ('{"name": "a", "anything": 1e999}', "1e999 is beyond what a computer's number holds"),
        ('{"name": "a", "anything": ' + "9" * 250 + "e99}", "99 is beyond what a computer's number holds"),
        ('{"name": "' + "a" * 64 * 1024 * 1024 + '"}', "67108876 bytes, above 67108864"),
        ('"\\ud800"', "half of a pair of surrogates"),
        ('{"name": "\\ud800"}', "half of a pair of surrogates"),
    ],
    ids=[
        "empty",
        "cut",
        "twice",
        "twice inside",
        "NaN",
        "infinity",
        "deep",
        "deep in an unknown key",
        "digits",
        "65 bits",
        "infinite",
        "infinite by its digits",
        "long",
        "lone surrogate",
        "lone surrogate in a field",
    ],
)
def test_hostile_text_is_refused(text, reason):
    """Never a crash: the text may come from an annotation that anybody can write."""
    with pytest.raises(ContractError, match=reason):
        decode_text(Outer, text)


def test_a_long_value_is_cut_in_the_message():
    """A condition has room for 32 KiB only."""
    (problem,) = problems({"name": list(range(10_000))})
    assert len(problem) < 200
