"""Schedules as values: complete, free of deadlock, with the papers' versions and replicas of a stage."""

import pytest
from ballast_policies.planning.schedules.builders.asynchronous import double_buffered, pipedream
from ballast_policies.planning.schedules.builders.synchronous import (
    interleaved_one_forward_one_backward,
    one_forward_one_backward,
)
from ballast_policies.planning.schedules.costs import StageCosts, even_costs
from ballast_policies.planning.schedules.registry import (
    SCHEDULES,
    build_schedule,
    replicable_schedules,
    stages_of,
)
from ballast_policies.planning.schedules.schedule import (
    Action,
    Kind,
    Schedule,
    ScheduleError,
    WeightRule,
    loop_schedule,
)
from ballast_policies.planning.schedules.simulate import simulate
from ballast_policies.planning.schedules.validate import validate
from hypothesis import given
from hypothesis import strategies as st

seconds = st.floats(0.01, 5.0)


def forward_only(ranks, microbatches):
    rows = [[Action(rank, Kind.FORWARD, k) for k in range(microbatches)] for rank in range(ranks)]
    return loop_schedule("forward only", ranks, 1, microbatches, rows)


@given(name=st.sampled_from(sorted(SCHEDULES)), ranks=st.integers(1, 6), rounds=st.integers(1, 4))
def test_every_schedule_is_valid_for_every_size(name, ranks, rounds):
    """Each microbatch passes each stage once, on its rank, without deadlock."""
    rounds = max(2, rounds) if name == "DualPipeV" else rounds
    schedule = build_schedule(name, ranks=ranks, microbatches=ranks * rounds, chunks=3)
    facts = validate(schedule)
    assert schedule.stages == stages_of(name, ranks, chunks=3)
    assert max(facts.stage_in_flight) <= schedule.microbatches


@pytest.mark.parametrize(("workers", "replicas", "want"), [(4, 1, 4), (3, 2, 2), (16, 15, 2), (8, 8, 1)])
def test_pipedream_noam_is_workers_over_replicas_of_the_input_stage(workers, replicas, want):
    """NUM_OPT_ACTIVE_MINIBATCHES of straight, 2-1, 15-1 and data-parallel configurations."""
    rest = [] if workers == replicas else [1] * (workers - replicas)
    schedule = pipedream([replicas, *rest], replicas * 4)
    assert validate(schedule).in_flight[0] == want


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_pipedream_1f1b_has_at_most_p_minus_stage_in_flight(ranks):
    """Activations of stage s (from 0): p - s microbatches, however many there are."""
    facts = validate(one_forward_one_backward(ranks, 3 * ranks))
    assert facts.in_flight == tuple(ranks - stage for stage in range(ranks))


@given(
    forward=st.lists(seconds, min_size=1, max_size=5),
    data=st.data(),
    m=st.integers(1, 10),
)
def test_forward_pipeline_equals_amps_step_time(forward, data, m):
    """T = (m - 1) max t + sum t + sum e, where transfers overlap."""
    transfer = data.draw(st.lists(seconds, min_size=len(forward) - 1, max_size=len(forward) - 1))
    costs = StageCosts(forward=tuple(forward), backward=tuple(forward), transfer=tuple(transfer))
    got = simulate(forward_only(len(forward), m), costs).makespan
    assert got == pytest.approx((m - 1) * max(forward) + sum(forward) + sum(transfer), rel=1e-9)


def test_a_serial_link_carries_one_transfer_at_a_time():
    """With transfers longer than the compute, the link is the bottleneck."""
    costs = StageCosts(forward=(1.0, 1.0), backward=(1.0, 1.0), transfer=(3.0,), serial_links=True)
    assert simulate(forward_only(2, 4), costs).makespan == pytest.approx(1 + 4 * 3 + 1)


def test_replicas_of_a_slow_stage_keep_the_pace():
    """The dissertation's 2-1 example: a stage of 6 units on two ranks beside one of 3 units."""
    costs = StageCosts(forward=(2.0, 1.0), backward=(4.0, 2.0))
    alone = simulate(pipedream([1, 1], 40), costs).makespan
    replicated = simulate(pipedream([2, 1], 40), costs).makespan
    assert alone / replicated > 1.9


def test_a_stage_update_waits_for_all_its_replicas():
    schedule = pipedream([2, 1], 2)
    spans = {(span.rank, str(span.action)): span for span in simulate(schedule, even_costs(2)).spans}
    assert spans[0, "0U0"].start == spans[1, "0U0"].start == spans[1, "0B1"].end


def test_the_flush_ends_with_each_stages_update():
    """Seconds of the optimizer come after the last backward."""
    costs = StageCosts(forward=(1.0, 1.0), backward=(2.0, 2.0), update=(0.5, 0.25))
    trace = simulate(one_forward_one_backward(2, 2), costs)
    assert trace.makespan == pytest.approx(9.5)
    assert [str(span.action) for span in trace.spans if span.rank == 1][-1] == "1U0"


def broken(*rows, stage_ranks=((0,), (1,)), microbatches=2, weights=WeightRule.FLUSH):
    return Schedule(
        name="broken",
        microbatches=microbatches,
        stage_ranks=stage_ranks,
        actions=tuple(tuple(Action.parse(text) for text in row.split()) for row in rows),
        weights=weights,
        update_every=microbatches,
    )


@pytest.mark.parametrize(
    ("schedule", "want"),
    [
        (broken("0F0 0F1 0B0", "1F0 1B0 1F1 1B1"), "microbatch 1 on stage 0 has 0 B"),
        (broken("0F0 0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"), "0F0 is there 2 times"),
        (broken("0F0 0B0 0B1", "1F0 1B0 1F1 1B1"), "0F1 is missing"),
        (broken("0F0 0F1 0B0 0B1 1F0", "1B0 1F1 1B1"), "1F0, which belongs to rank 1"),
        (broken("0F0 0B1 0F1 0B0", "1F0 1B0 1F1 1B1"), "0B1 comes before 0F1"),
        (broken("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"), "deadlock: rank 0 before 0B0, rank 1 before 1F1"),
        (broken("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1I1"), "0 B, 1 I, 0 W"),
        (broken("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1B0 1F1 1B1"), "0F2 is beyond the 2 microbatches"),
        (
            broken("0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3", microbatches=4, stage_ranks=((0,),)),
            None,
        ),
    ],
)
def test_a_broken_schedule_is_refused_with_the_action(schedule, want):
    """The reader learns which action is wrong and why."""
    if want is None:
        validate(schedule)
        return
    with pytest.raises(ScheduleError, match=want):
        validate(schedule)


@pytest.mark.parametrize(
    ("build", "want"),
    [
        (lambda: build_schedule("1f1b", ranks=2, microbatches=2), "is not one of 1F1B, GPipe"),
        (lambda: interleaved_one_forward_one_backward(4, 9, 2), "use 8 or 12"),
        (lambda: one_forward_one_backward(0, 4), "stages is 0"),
        (lambda: pipedream([2, 1], 5), "5 microbatches do not divide over 2 replicas"),
        (lambda: pipedream([2, 1], 4, vertical_sync=True), "use weight stashing"),
        (lambda: build_schedule("DualPipeV", ranks=4, microbatches=6), "use 8 or more"),
        (lambda: double_buffered(4, 6, update_every=3), "update every 4 or more"),
        (lambda: double_buffered(2, 5, update_every=2), "use 6"),
        (lambda: StageCosts(forward=(1.0,), backward=(1.0, 2.0)), "backward has 2 values for 1 stages"),
        (lambda: StageCosts(forward=(1.0,), backward=(-1.0,)), "at least 0"),
        (lambda: simulate(one_forward_one_backward(2, 2), even_costs(3)), "costs of 3 stages"),
    ],
)
def test_impossible_counts_are_refused_with_what_to_change(build, want):
    """Every refusal says what would work."""
    with pytest.raises(ScheduleError, match=want):
        build()


@given(
    name=st.sampled_from(replicable_schedules()),
    replicas=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    microbatches=st.integers(3, 20),
)
def test_microbatch_k_is_on_replica_k_mod_r_both_ways(name, replicas, microbatches):
    """Forward and backward of a microbatch meet the same replica, and every schedule is free of deadlock.

    With a flush, also where some replicas have a microbatch more than others.
    """
    if SCHEDULES[name].asynchronous:
        microbatches *= 6
    schedule = build_schedule(name, ranks=sum(replicas), microbatches=microbatches, replicas=replicas)
    validate(schedule)
    for stage, holders in enumerate(schedule.stage_ranks):
        assert len(holders) == replicas[stage]
        for replica, rank in enumerate(holders):
            done = [a for a in schedule.actions[rank] if a.kind is not Kind.UPDATE]
            assert {a.microbatch % len(holders) for a in done} == {replica}
            assert {a.stage for a in done} == {stage}


@pytest.mark.parametrize(
    ("name", "replicas", "microbatches", "reason"),
    [
        ("ZeroBubbleV", [2, 1], 4, "has no replicas of a stage"),
        ("PipeDream2BW", [2, 1], 4, "has no replicas of a stage"),
        ("1F1B", [2, 2], 4, "need 4 ranks, there are 3"),
        ("PipeDream", [2, 1], 5, "5 microbatches do not divide over 2 replicas"),
        ("1F1B", [2, 1], 1, "a stage's 2 replicas are more than the microbatches, 1"),
    ],
)
def test_unsuitable_replicas_are_refused_with_the_reason(name, replicas, microbatches, reason):
    """Unfit schedules, ranks and microbatches."""
    with pytest.raises(ScheduleError, match=reason):
        build_schedule(name, ranks=3, microbatches=microbatches, replicas=replicas)


@given(
    name=st.sampled_from(["PipeDream", "PipeDreamVerticalSync", "PipeDream2BW"]),
    ranks=st.integers(1, 4),
    steps=st.integers(1, 4),
    more=st.integers(1, 3),
)
def test_a_run_without_a_flush_cut_short_is_the_shorter_run(name, ranks, steps, more):
    """So a run can end early, once no further microbatch is admitted: no other order is needed to drain."""
    short = build_schedule(name, ranks=ranks, microbatches=steps * ranks)
    long = build_schedule(name, ranks=ranks, microbatches=(steps + more) * ranks)
    for wanted, row in zip(short.actions, long.actions, strict=True):
        updates = sum(action.kind is Kind.UPDATE for action in wanted)
        kept = [a for a in row if a.microbatch < (updates if a.kind is Kind.UPDATE else steps * ranks)]
        assert tuple(kept) == wanted
