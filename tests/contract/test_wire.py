"""Reading is strict about what is known and forgiving about what is newer."""

import json

import pytest
from ballast_policies.contract import Ack, ContractError, Directive, Plan, Proposal, Rank, Report, Stage
from hypothesis import given
from hypothesis import strategies as st


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
        ({"epoch": "1"}, "Plan.epoch: expected a whole number, got '1'"),
        ({"epoch": True}, "Plan.epoch: expected a whole number, got True"),
        ({"epoch": 0}, "Plan.epoch: 0 is below 1"),
        ({"ranks": []}, "ranks must be 0..n-1"),
        ({"ranks": {}}, "Plan.ranks: expected a list"),
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


def test_text_that_is_not_json_is_refused():
    """A truncated annotation is an error of the contract, not a crash."""
    with pytest.raises(ContractError, match="not JSON"):
        Ack.from_json('{"epoch": 1')


def test_a_plan_knows_the_rank_of_a_pod():
    """A pod finds its place by name and learns that it has left by its absence."""
    plan = Plan.from_json(json.dumps(plan_dict()))
    assert plan.rank_of("a-1-1") == 1
    assert plan.rank_of("a-1-7") is None


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


@pytest.mark.slow
@given(pods=st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=6, unique=True))
def test_any_plan_survives_the_wire(pods):
    """Names may hold any character."""
    ranks = tuple(Rank(rank=i, pod=p, address="127.0.0.1", gpu_type="k80") for i, p in enumerate(pods))
    plan = Plan(job="j", epoch=3, launch=1, directive=Directive.RUN, ranks=ranks)
    assert Plan.from_json(plan.to_json()) == plan
