"""Objects that are nested more deeply than Python's decoder goes: one of them hides no other."""

import json
import sys

import pytest
from ballast_operator.kube.client import MOST_LEVELS, read_json, shallow
from hypothesis import given
from hypothesis import strategies as st

DEEP = 9_000
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def nested(levels, inside="1"):
    """JSON text, objects and lists in turns, with brackets in a key and in a value."""
    half = levels // 2
    return '{"]{\\"":[' * half + inside + "]}" * half


def depth(value):
    levels = 0
    while isinstance(value, dict | list):
        value, levels = next(iter(value.values() if isinstance(value, dict) else value)), levels + 1
    return levels


@pytest.mark.slow
@given(VALUES)
def test_a_value_of_usual_depth_is_as_it_was(value):
    """To the last character."""
    assert read_json(json.dumps(value).encode()) == value


@pytest.mark.parametrize("levels", [MOST_LEVELS, MOST_LEVELS + 2, DEEP])
def test_a_deep_value_is_cut_and_its_neighbours_are_whole(levels):
    """Python itself would give up on the whole text."""
    text = f'{{"items": [{{"name": "a"}}, {nested(levels)}, {{"name": "b"}}]}}'
    if levels > sys.getrecursionlimit():
        with pytest.raises(RecursionError):
            json.loads(text)
    first, deep, last = read_json(text.encode())["items"]
    assert (first, last) == ({"name": "a"}, {"name": "b"})
    assert depth(deep) == MOST_LEVELS - 2


def test_what_is_no_json_stays_so():
    """A torn answer is an error as before."""
    with pytest.raises(ValueError, match="Expecting"):
        read_json(nested(DEEP)[: DEEP // 2].encode())
    assert shallow("]" * 300) == "]" * 300
