"""Both loops read and write the bytes in ``golden/``; what is newer is ignored, what is wrong is refused."""

import json
from pathlib import Path

import pytest
from ballast_policies.contract.errors import ContractError
from ballast_policies.contract.messages import Proposal, Report

from tests.contract.examples import EXAMPLES

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_a_message_is_written_as_its_golden_bytes(name):
    """A change of the wire format shows up as a change of a committed file."""
    assert EXAMPLES[name].to_json() == (GOLDEN / f"{name}.json").read_text().rstrip("\n")


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_the_golden_bytes_are_read_as_the_message(name):
    """What one side wrote is the value the other side gets."""
    text = (GOLDEN / f"{name}.json").read_text()
    assert type(EXAMPLES[name]).from_json(text) == EXAMPLES[name]


@pytest.mark.parametrize(
    ("field", "item", "told"),
    [("layerSeconds", -1, 1), ("layerBytes", "a", 1), ("stages", {}, 3), ("stages", {"rank": None}, 3)],
)
def test_of_a_list_by_layer_the_first_wrong_one_is_told(field, item, told):
    """A trainer may send a hundred thousand, with each report."""
    report = {"epoch": 1, "step": 1, "loss": None, "stepsPerSecond": None, field: [item] * 1000}
    with pytest.raises(ContractError, match=rf"Report\.{field}\[0\]") as caught:
        Report.from_json(json.dumps(report))
    assert len(caught.value.problems) == told


def test_a_proposal_cannot_keep_and_release_the_same_pod():
    """A contradiction is refused where it is made."""
    with pytest.raises(ValueError, match="both kept and released"):
        Proposal(
            epoch=1,
            step=1,
            kept_pods=("p",),
            released_pods=("p",),
            stages=(),
            step_seconds_before=1.0,
            step_seconds_after=1.0,
        )
