"""Both loops read and write exactly the bytes in ``golden/``."""

import importlib.util
from pathlib import Path

import pytest

HERE = Path(__file__).parent
_spec = importlib.util.spec_from_file_location("contract_examples", HERE / "examples.py")
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
EXAMPLES = _module.EXAMPLES


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_a_message_is_written_as_its_golden_bytes(name):
    """A change of the wire format shows up as a change of a committed file."""
    assert EXAMPLES[name].to_json() == (HERE / "golden" / f"{name}.json").read_text().rstrip("\n")


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_the_golden_bytes_are_read_as_the_message(name):
    """What one side wrote is the value the other side gets."""
    text = (HERE / "golden" / f"{name}.json").read_text()
    assert type(EXAMPLES[name]).from_json(text) == EXAMPLES[name]
