"""Both loops read and write the bytes in ``golden/``; what is newer is ignored, what is wrong is refused."""

import json
from pathlib import Path

import pytest
from ballast_policies.contract.errors import ContractError
from ballast_policies.contract.messages import Proposal, Report, Stage
from ballast_policies.contract.plan import Plan
from hypothesis import given
from hypothesis import strategies as st

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


def plan_dict(**changes):
    ranks = [
        {"rank": 0, "pod": "a-1-0", "address": "127.0.0.2", "gpuType": "v100"},
        {"rank": 1, "pod": "a-1-1", "address": "127.0.0.3", "gpuType": "v100"},
    ]
    plan = {
        "job": "a",
        "epoch": 1,
        "launch": 1,
        "directive": "run",
        "ranks": ranks,
        "stages": [],
        "reason": "",
    }
    return plan | changes


def test_unknown_keys_are_ignored():
    """An operator one release newer than the trainer is still understood."""
    assert Plan.from_json(json.dumps(plan_dict(colour="blue"))).job == "a"


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        (
            {"directive": "dance"},
            "Plan.directive: 'dance' is not one of run, checkpointAndStop, shrink, grow",
        ),
        ({"epoch": 0}, "Plan.epoch: 0 is below 1"),
        ({"ranks": []}, "ranks must be 0..n-1"),
        ({"ranks": [{"rank": 0}]}, "Plan.ranks[0].pod: missing"),
        ({"stages": [{"rank": 0, "firstLayer": 1, "endLayer": 2}]}, "starts at layer 1, expected 0"),
        ({"stages": [{"rank": 5, "firstLayer": 0, "endLayer": 2}]}, "the plan has 2 ranks"),
        ({"stages": [{"rank": 0, "firstLayer": 0, "endLayer": 0}]}, "Plan.stages[0].endLayer: 0 is below 1"),
        ({"stages": [{"rank": 0, "firstLayer": 2, "endLayer": 2}]}, "needs at least one layer"),
    ],
)
def test_a_bad_plan_is_refused_with_field_and_reason(changes, want):
    """The reader learns which field, which value, and why."""
    with pytest.raises(ContractError) as caught:
        Plan.from_json(json.dumps(plan_dict(**changes)))
    assert want in str(caught.value)


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


finite = st.floats(allow_nan=False, allow_infinity=False)


@given(
    step=st.integers(0, 10**9),
    loss=st.none() | finite,
    seconds=st.lists(st.floats(0, 1e3), max_size=5),
    cuts=st.lists(st.integers(1, 5), min_size=0, max_size=4),
)
def test_any_report_survives_the_wire(step, loss, seconds, cuts):
    """Numbers come back exactly as they were sent."""
    stages, first = [], 0
    for rank, width in enumerate(cuts):
        stages.append(Stage(rank=rank, first_layer=first, end_layer=first + width))
        first += width
    report = Report(
        epoch=1,
        step=step,
        loss=loss,
        steps_per_second=None,
        layer_seconds=tuple(seconds),
        stages=tuple(stages),
    )
    assert Report.from_json(report.to_json()) == report
