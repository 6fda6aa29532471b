"""What a trainer, a user or the cluster may send: size, depth and range, each refused by name."""

import json
import math

import pytest
from ballast_policies.contract.decode import parse_json
from ballast_policies.contract.errors import ContractError
from ballast_policies.contract.job.job import JobConfig
from ballast_policies.contract.limits import MESSAGE, Limits, nested_deeper
from ballast_policies.contract.messages import Ack, Proposal, Report, read_finished_step
from ballast_policies.contract.plan import Plan
from hypothesis import given
from hypothesis import strategies as st

from tests.contract.examples import EXAMPLES

MESSAGES = {"plan": Plan, "report": Report, "proposal": Proposal, "ack": Ack}


def changed(name: str, **changes: object) -> str:
    """The example with other values; NaN and Infinity as Python writes them."""
    return json.dumps({**json.loads(EXAMPLES[name].to_json()), **changes})


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("report", {"stepsPerSecond": -1}, "Report.stepsPerSecond: -1 is below 0"),
        ("report", {"stepsPerSecond": 1e300}, "is above 1000000000"),
        ("report", {"stepsPerSecond": math.nan}, "NaN is no number of JSON"),
        ("report", {"stepsPerSecond": math.inf}, "Infinity is no number of JSON"),
        ("report", {"step": 10**30}, "beyond 64 bits"),
        ("report", {"step": 2**60}, "Report.step: 1152921504606846976 is above 9007199254740992"),
        ("report", {"step": -1}, "Report.step: -1 is below 0"),
        ("report", {"lastRebalanceStep": 10**16}, "Report.lastRebalanceStep"),
        ("report", {"checkpointStep": 10**16}, "Report.checkpointStep"),
        ("report", {"layerSeconds": [0.1, -0.1]}, "Report.layerSeconds[1]: -0.1 is below 0"),
        ("report", {"layerBytes": [2**60]}, "Report.layerBytes"),
        ("report", {"epoch": 2**40}, "Report.epoch"),
        ("report", {"slowRanks": [{"rank": 2**17, "factor": 2}]}, "Report.slowRanks[0].rank"),
        ("report", {"slowRanks": [{"rank": -1, "factor": 2}]}, "Report.slowRanks[0].rank: -1 is below 0"),
        ("report", {"slowRanks": [{"rank": 0, "factor": 0.5}]}, "Report.slowRanks[0].factor"),
        ("report", {"slowRanks": [{"rank": 0, "factor": math.nan}]}, "NaN is no number of JSON"),
        ("report", {"slowRanks": [{"rank": 0, "factor": 2}] * 65}, "Report.slowRanks"),
        ("report", {"new": json.loads("[" * 33 + "]" * 33)}, "nested deeper than 32 levels"),
        ("report", {"new": "x" * 300_000}, "bytes, above 262144"),
        ("proposal", {"stepSecondsAfter": math.inf}, "Infinity is no number of JSON"),
        ("proposal", {"stepSecondsBefore": 1e300}, "Proposal.stepSecondsBefore"),
        ("proposal", {"stages": [{"rank": 0, "firstLayer": 0, "endLayer": 999_999}]}, "above 100000"),
        ("proposal", {"reason": "x" * 5000}, "has 5000 characters, above 4096"),
        ("ack", {"epoch": 0}, "Ack.epoch: 0 is below 1"),
        ("ack", {"pauseMs": -3}, "Ack.pauseMs"),
        ("plan", {"epoch": 2**40}, "Plan.epoch"),
        ("plan", {"job": "x" * 300}, "Plan.job"),
        ("plan", {"epoch": 0}, "Plan.epoch: 0 is below 1"),
        (
            "plan",
            {"directive": "dance"},
            "Plan.directive: 'dance' is not one of run, checkpointAndStop, shrink, grow",
        ),
        ("plan", {"ranks": []}, "ranks must be 0..n-1"),
        ("plan", {"ranks": [{"rank": 0}]}, "Plan.ranks[0].pod: missing"),
        ("plan", {"stages": [{"rank": 0, "firstLayer": 1, "endLayer": 2}]}, "starts at layer 1, expected 0"),
        ("plan", {"stages": [{"rank": 5, "firstLayer": 0, "endLayer": 2}]}, "the plan has 4 ranks"),
        ("plan", {"stages": [{"rank": 0, "firstLayer": 0, "endLayer": 0}]}, "stages[0].endLayer: 0 is below"),
        ("plan", {"stages": [{"rank": 0, "firstLayer": 2, "endLayer": 2}]}, "needs at least one layer"),
    ],
)
def test_a_message_that_cannot_be_is_refused_by_its_field(name, changes, reason):
    """The sender and the person who looks at the job learn which field, which value, and why."""
    with pytest.raises(ContractError) as caught:
        MESSAGES[name].from_json(changed(name, **changes))
    assert reason in str(caught.value)
    assert len(str(caught.value)) < 400


def test_unknown_keys_are_ignored():
    """An operator one release newer than the trainer is still understood."""
    assert Plan.from_json(changed("plan", colour="blue")) == EXAMPLES["plan"]


@pytest.mark.parametrize("text", ["", "-1", "1.0", "9" * 5000, "9007199254740993", "²", "٣", "1 "])
def test_a_finished_step_is_a_decimal_within_range(text):
    """Whatever Python's int() would take besides, or refuse with an error of its own."""
    with pytest.raises(ContractError):
        read_finished_step(text)
    assert read_finished_step("120") == 120


@pytest.mark.parametrize(
    ("text", "deep"),
    [
        ("[[1, {}], [[]]]", False),
        ("[[[[]]]]", True),
        ('["[[[[[[[[", "\\"[[[["]', False),
        ("[[[[", True),
        ('{"a": {"b": {"c": {}}}}', True),
        ('[{"a": [{}]}]', True),
        ("]]]]", False),
    ],
)
def test_depth_counts_brackets_outside_of_strings(text, deep):
    """Also where they do not match: such a text never reaches the parser's recursion."""
    assert ("nested deeper" in Limits(most_bytes=100, depth=3).problem(text)) is deep


@pytest.mark.parametrize("text", ['"\\' * 100_000, '"' + "\\" * 200_001, '["' * 100_000, "{}" * 100_000])
def test_no_text_takes_long(text):
    """Texts without an end to their strings take one reading, as all others do."""
    with pytest.raises(ContractError):
        parse_json(text, limits=MESSAGE)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@given(data=st.data(), name=st.sampled_from(sorted(MESSAGES)))
def test_any_change_of_a_field_is_read_or_refused(data, name):
    """What is read can be written and is read as the same again."""
    fields = json.loads(EXAMPLES[name].to_json())
    field = data.draw(st.sampled_from(sorted(fields)))
    try:
        read = MESSAGES[name].from_json(json.dumps({**fields, field: data.draw(json_values)}))
    except ContractError:
        return
    assert MESSAGES[name].from_json(read.to_json()) == read


@pytest.mark.slow
@given(
    st.recursive(
        st.text(alphabet='[]{}"\\ab\u00e9'),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(alphabet='[]{}"\\a'), inner, max_size=3)
        ),
    )
)
def test_depth_is_that_of_the_value(value):
    """With brackets, quotes and backslashes in its texts."""

    def depth(part):
        if isinstance(part, str):
            return 0
        return 1 + max(map(depth, part.values() if isinstance(part, dict) else part), default=0)

    levels = depth(value)
    assert not nested_deeper(json.dumps(value), levels)
    assert not nested_deeper(json.dumps(value, ensure_ascii=False), levels)
    assert levels == 0 or nested_deeper(json.dumps(value), levels - 1)


@pytest.mark.parametrize(("levels", "refused"), [(32, False), (33, True), (500, True)])
def test_a_value_of_any_shape_has_as_many_levels_as_a_message(levels, refused):
    """Such as ``model.args``, which the API server would take of any depth."""
    value = 1
    for _ in range(levels):
        value = {"a": value}
    config = {**EXAMPLES["config"].to_dict(), "model": {"name": "gpt", "layers": 8, "args": {"x": value}}}
    if not refused:
        assert JobConfig.from_mapping(config).model.args["x"] == value
        return
    with pytest.raises(ContractError, match=r"model\.args\.x: nested deeper than 32 levels"):
        JobConfig.from_mapping(config)
