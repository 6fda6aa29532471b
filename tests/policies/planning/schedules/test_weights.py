"""Versions of the weights: which one a microbatch meets, how many a stage holds."""

import pytest
from ballast_policies.planning.schedules.builders.asynchronous import double_buffered, pipedream
from ballast_policies.planning.schedules.costs import even_costs
from ballast_policies.planning.schedules.schedule import Action, Kind, Schedule, ScheduleError, WeightRule
from ballast_policies.planning.schedules.simulate import simulate
from ballast_policies.planning.schedules.validate import validate, weight_versions
from hypothesis import given
from hypothesis import strategies as st


def test_weight_stashing_is_p_minus_1_minus_s_updates_late():
    """Stage s (from 0) computes microbatch t with max(0, t - (p - 1 - s)) updates, and holds p - s."""
    p, m = 4, 12
    schedule = pipedream([1] * p, m)
    assert weight_versions(schedule) == {(s, t): max(0, t - (p - 1 - s)) for s in range(p) for t in range(m)}
    assert validate(schedule).versions_held == (4, 3, 2, 1)


def test_vertical_sync_uses_the_input_stages_version_everywhere():
    """All stages use t - p + 1 updates, so all hold p versions."""
    p, m = 4, 12
    schedule = pipedream([1] * p, m, vertical_sync=True)
    assert weight_versions(schedule) == {(s, t): max(0, t - p + 1) for s in range(p) for t in range(m)}
    assert validate(schedule).versions_held == (4, 4, 4, 4)


def played(schedule, learning_rate=0.1):
    """Weights of each stage after each update, training sum(weights) to 1 in the simulated order of actions.

    Forwards see the weights of that moment (weight stashing); the gradient is the same for all stages.
    """
    weights = [[0.3 * (stage + 1)] for stage in range(schedule.stages)]
    used = {}
    for span in sorted(simulate(schedule, even_costs(schedule.stages)).spans, key=lambda span: span.start):
        stage, kind, k = span.action.stage, span.action.kind, span.action.microbatch
        if kind is Kind.FORWARD:
            used[stage, k] = weights[stage][-1]
        elif kind is Kind.UPDATE:
            gradient = sum(used[s, k] for s in range(schedule.stages)) - 1
            weights[stage].append(weights[stage][-1] - learning_rate * gradient)
    return weights


def test_weight_stashing_trains_by_its_recurrence():
    """W(t+1) = W(t) - v grad f(W_1(t-p+1), W_2(t-p+2), ..., W_p(t)) (dissertation 2.4.3), to 1e-12."""
    p, m = 4, 30
    got = played(pipedream([1] * p, m))
    want = [[weights[0]] for weights in got]
    for t in range(m):
        gradient = sum(want[s][max(0, t - (p - 1 - s))] for s in range(p)) - 1
        for weights in want:
            weights.append(weights[-1] - 0.1 * gradient)
    for mine, theirs in zip(got, want, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-12)


def test_2bw_versions_are_those_of_the_papers_table():
    """m = 4: microbatches 1 to 8 use version 0, 9 to 12 version 1; never more than two versions."""
    schedule = double_buffered(4, 16, update_every=4)
    versions = weight_versions(schedule)
    assert [versions[2, k] for k in range(16)] == [0] * 8 + [1] * 4 + [2] * 4
    assert validate(schedule).versions_held == (2, 2, 2, 2)


@given(p=st.integers(1, 6), extra=st.integers(0, 4), updates=st.integers(1, 5))
def test_2bw_never_holds_more_than_two_versions(p, extra, updates):
    """Also where an update covers more microbatches than there are ranks."""
    schedule = double_buffered(p, (p + extra) * updates, update_every=p + extra)
    assert max(validate(schedule).versions_held) <= 2


def test_a_version_that_does_not_exist_yet_is_refused():
    """2BW with all forwards first asks for updates that were not made."""
    row = tuple(Action.parse(text) for text in ["0F0", "0F1", "0F2", "0B0", "0B1", "0B2"])
    schedule = Schedule(
        name="too early",
        microbatches=3,
        stage_ranks=((0,),),
        actions=(row,),
        weights=WeightRule.DOUBLE_BUFFERED,
        update_every=1,
    )
    with pytest.raises(ScheduleError, match="0F2 needs version 1 of stage 0, which is at 0"):
        validate(schedule)
