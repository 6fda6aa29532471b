"""Measured layers in the saved state: exact, and read with tolerance."""

import json

import pytest
from ballast_operator.allocator.problem.layer_profiles import KindProfile
from ballast_operator.allocator.saved_state import SavedState, decode, encode, read_layers
from ballast_policies.planning.memory.measured_layers import MeasuredLayers

PROFILE = KindProfile(
    ("team", "job"),
    MeasuredLayers(seconds=(0.25, 0.75), held_bytes=(10**9, 2**53), activation_bytes=(0, 5)),
)


def test_layers_come_back_as_they_were():
    """Whatever was not measured stays empty."""
    bytes_alone = KindProfile(("team", "other"), MeasuredLayers(held_bytes=(7,)))
    weights = KindProfile(("team", "third"), MeasuredLayers(held_bytes=(7,), weight_bytes=(3,)))
    layers = {"a": PROFILE, "b": bytes_alone, "c": weights}
    assert decode(encode(SavedState(layers=layers))).layers == layers


@pytest.mark.parametrize("added", [0, 3])
def test_columns_of_older_operators_are_read(added):
    """Without messages and gradients, and without weights."""
    entry = ["team/job", [], [8, 9], [1, 2], *[[3, 4]] * added]
    layers = read_layers(entry).layers
    assert (layers.held_bytes, layers.activation_bytes) == ((8, 9), (1, 2))
    assert layers.output_bytes == ((3, 4) if added else ())
    assert layers.weight_bytes == ()


def test_a_state_that_is_too_large_gives_layers_up():
    """They are reported again."""
    layers = {str(kind): PROFILE for kind in range(100)}
    assert decode(encode(SavedState(layers=layers), most_bytes=200)).layers == {}


@pytest.mark.parametrize(
    "entry",
    [
        [],
        None,
        ["team/job", [], [], []],
        ["team/job", [1.0], [1, 2], []],
        ["team/job", [], [float("nan")], []],
        ["team/job", [], [-1], []],
        ["team/job", [], ["1"], []],
        ["team/job", [], [True], []],
        [7, [], [1], []],
        ["team/job", [], [1e400], []],
    ],
    ids=json.dumps,
)
def test_entries_that_make_no_sense_are_refused(entry):
    """The reader leaves them out and keeps the others."""
    with pytest.raises((TypeError, ValueError)):
        read_layers(entry)
