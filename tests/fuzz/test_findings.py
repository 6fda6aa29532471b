"""Inputs on which a parser has failed, kept: each is refused with the documented error, or left out."""

import pytest

from tests.fuzz.parsers import BY_NAME

FOUND = {
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


@pytest.mark.slow
@pytest.mark.parametrize(("name", "content"), FOUND.values(), ids=FOUND.keys())
def test_what_was_found_is_refused(name, content):
    """No other exception than the parser's own."""
    parser = BY_NAME[name]
    try:
        parser.read(content)
    except parser.errors as error:
        assert str(error)
