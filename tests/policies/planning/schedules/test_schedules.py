"""Schedules as values: complete, free of deadlock, and with the bubbles and versions of the papers."""

import dataclasses
import itertools

import pytest
from ballast_policies.planning.schedules import (
    SCHEDULES,
    Action,
    Kind,
    Schedule,
    ScheduleError,
    StageCosts,
    WeightRule,
    bubble_of_data_parallel,
    build_schedule,
    chimera_bubble,
    double_buffered,
    even_costs,
    forward_only,
    interleaved_one_forward_one_backward,
    interleaved_zero_bubble,
    one_forward_one_backward,
    one_forward_one_backward_replicated,
    optimal_active_minibatches,
    pipedream,
    pipeline_bubble,
    simulate,
    split_bubble,
    split_measured_bubble,
    stages_of,
    validate,
    weight_versions,
    zero_bubble_v,
)
from hypothesis import given
from hypothesis import strategies as st

seconds = st.floats(0.01, 5.0)


@given(name=st.sampled_from(sorted(SCHEDULES)), ranks=st.integers(1, 6), rounds=st.integers(1, 4))
def test_every_schedule_is_valid_for_every_size(name, ranks, rounds):
    """Each microbatch passes each stage once, on its rank, without deadlock."""
    rounds = max(2, rounds) if name == "DualPipeV" else rounds
    schedule = build_schedule(name, ranks=ranks, microbatches=ranks * rounds, chunks=3)
    facts = validate(schedule)
    assert schedule.stages == stages_of(name, ranks, chunks=3)
    assert max(facts.stage_in_flight) <= schedule.microbatches


@given(data=st.data(), replicas=st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_d2_round_robin_sends_forward_and_backward_to_the_same_replica(data, replicas):
    """1F1B-RR: microbatch k is on replica k mod r, both ways; nothing deadlocks, flush or not."""
    microbatches = 6 * data.draw(st.integers(1, 3))
    for schedule in (
        one_forward_one_backward_replicated(replicas, microbatches),
        pipedream(replicas, microbatches),
    ):
        validate(schedule)
        for rank, row in enumerate(schedule.actions):
            for action in row:
                if action.kind is not Kind.UPDATE:
                    holders = schedule.stage_ranks[action.stage]
                    assert holders[action.microbatch % len(holders)] == rank


@pytest.mark.parametrize(("workers", "replicas", "want"), [(4, 1, 4), (3, 2, 2), (16, 15, 2), (8, 8, 1)])
def test_d2_noam_is_workers_over_replicas_of_the_input_stage(workers, replicas, want):
    """NUM_OPT_ACTIVE_MINIBATCHES of straight, 2-1, 15-1 and data-parallel configurations."""
    assert optimal_active_minibatches(workers, replicas) == want
    rest = [] if workers == replicas else [1] * (workers - replicas)
    schedule = pipedream([replicas, *rest], replicas * 4)
    assert validate(schedule).in_flight[0] == want


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_d2_d5_1f1b_has_at_most_p_minus_stage_in_flight(ranks):
    """Activations of stage s (from 0): p - s microbatches, however many there are."""
    facts = validate(one_forward_one_backward(ranks, 3 * ranks))
    assert facts.in_flight == tuple(ranks - stage for stage in range(ranks))


@pytest.mark.parametrize(
    ("p", "m", "v"), [c for c in itertools.product((4, 8), (8, 16), (1, 2, 3)) if c[1] % c[0] == 0]
)
def test_d7_bubble_is_p_minus_1_over_v_m(p, m, v):
    """The simulated idle time over the ideal time of interleaved 1F1B equals the formula."""
    schedule = interleaved_one_forward_one_backward(p, m, v)
    trace = simulate(schedule, even_costs(p * v, forward=1 / v, backward=2 / v))
    ideal = 3 * m
    assert (trace.makespan - ideal) / ideal == pytest.approx(pipeline_bubble(p, m, v), rel=1e-12)


@pytest.mark.parametrize("name", ["1F1B", "GPipe", "LoopedBFS"])
def test_d7_gpipe_and_1f1b_have_the_same_bubble(name):
    """(p - 1) / m."""
    p, m = 4, 8
    schedule = build_schedule(name, ranks=p, microbatches=m)
    trace = simulate(schedule, even_costs(p))
    assert trace.makespan / (3 * m) - 1 == pytest.approx(pipeline_bubble(p, m), rel=1e-12)


def test_d7_zero_bubble_schedules_have_the_bubbles_measured_of_torch():
    """With F = I = W: of (p, m) = (4, 16), H1 (p - 1) / 3m, and ZB-V 1 / 16 of a third."""
    p, m = 4, 16
    h1 = simulate(interleaved_zero_bubble(p, m), even_costs(p, forward=1.0, backward=2.0, backward_input=1.0))
    assert h1.makespan / (3 * m) - 1 == pytest.approx((p - 1) / (3 * m), rel=1e-12)
    assert max(validate(interleaved_zero_bubble(p, m)).in_flight) == p
    v = simulate(zero_bubble_v(p, m), even_costs(2 * p, forward=0.5, backward=1.0, backward_input=0.5))
    assert v.makespan < h1.makespan


def test_bubble_of_data_parallel_pipelines_is_n_minus_d_over_b():
    """(n/d - 1) / (b'/d) (dissertation 4.3.3)."""
    n, d, b = 32, 4, 128
    assert bubble_of_data_parallel(n, d, b) == pytest.approx(pipeline_bubble(n // d, b // d))


@pytest.mark.parametrize(("ranks", "want"), [(4, 0.2500), (8, 1 / 3), (16, 14 / 38)])
def test_b1_chimera_bubble_without_transfers_is_chimeras_own_formula(ranks, want):
    """Tc = 0, Tb = 2 Tf: (P - 2) / (1.5 P + P - 2)."""
    assert chimera_bubble(ranks, forward=1.0, backward=2.0) == pytest.approx(want)
    assert want == pytest.approx((ranks - 2) / (1.5 * ranks + ranks - 2))


def test_b1_chimera_bubble_needs_an_even_number_of_ranks():
    """An odd P has no two opposite pipelines."""
    with pytest.raises(ValueError, match="even number of ranks, got 5"):
        chimera_bubble(5, forward=1.0, backward=2.0)


@given(
    forward=st.lists(seconds, min_size=4, max_size=4),
    ratio=st.floats(0.5, 3.0),
    m=st.integers(1, 12),
)
def test_b2_inherent_and_dynamic_bubble_add_up_to_the_idle_time(forward, ratio, m):
    """Even stages have no dynamic part, and the inherent one is (p - 1) / (m + p - 1)."""
    schedule = one_forward_one_backward(4, m)
    costs = StageCosts(forward=tuple(forward), backward=tuple(ratio * f for f in forward))
    split = split_bubble(schedule, costs)
    trace = simulate(schedule, costs)
    idle = sum(trace.makespan - busy for busy in trace.busy) / (4 * trace.makespan)
    assert split.inherent + split.dynamic == pytest.approx(idle, abs=1e-9)
    even = split_bubble(schedule, even_costs(4))
    assert even.dynamic == pytest.approx(0, abs=1e-12)
    assert split.inherent == pytest.approx(3 / (m + 3), abs=1e-9)


def test_b2_over_many_microbatches_the_dynamic_bubble_is_what_the_slowest_rank_costs():
    """Idle time tends to 1 - mean load / largest load, and nearly all of it is imbalance."""
    costs = StageCosts(forward=(1.0, 2.0, 4.0, 1.0), backward=(2.0, 4.0, 8.0, 2.0))
    split = split_bubble(one_forward_one_backward(4, 400), costs)
    assert split.idle == pytest.approx(1 - 2 / 4, abs=0.01)
    assert split.dynamic == pytest.approx(split.idle, abs=0.01)


def test_b2_a_measured_step_is_split_like_a_simulated_one():
    """From busy seconds and the step alone."""
    schedule = one_forward_one_backward(4, 8)
    costs = StageCosts(forward=(1.0, 2.0, 1.0, 1.0), backward=(2.0, 4.0, 2.0, 2.0))
    trace = simulate(schedule, costs)
    measured = split_measured_bubble(schedule, busy_seconds=trace.busy, step_seconds=trace.makespan)
    want = split_bubble(schedule, costs)
    assert measured.idle == pytest.approx(want.idle)
    assert measured.inherent == pytest.approx(want.inherent)
    assert measured.dynamic == pytest.approx(want.dynamic)
    with pytest.raises(ValueError, match="3 busy times"):
        split_measured_bubble(schedule, busy_seconds=[1.0] * 3, step_seconds=1.0)


@given(
    forward=st.lists(seconds, min_size=1, max_size=5),
    data=st.data(),
    m=st.integers(1, 10),
)
def test_a1_forward_pipeline_equals_amps_step_time(forward, data, m):
    """T = (m - 1) max t + sum t + sum e, where transfers overlap."""
    transfer = data.draw(st.lists(seconds, min_size=len(forward) - 1, max_size=len(forward) - 1))
    costs = StageCosts(forward=tuple(forward), backward=tuple(forward), transfer=tuple(transfer))
    got = simulate(forward_only(len(forward), m), costs).makespan
    assert got == pytest.approx((m - 1) * max(forward) + sum(forward) + sum(transfer), rel=1e-9)


def test_a_serial_link_carries_one_transfer_at_a_time():
    """With transfers longer than the compute, the link is the bottleneck."""
    costs = StageCosts(forward=(1.0, 1.0), backward=(1.0, 1.0), transfer=(3.0,), serial_links=True)
    assert simulate(forward_only(2, 4), costs).makespan == pytest.approx(1 + 4 * 3 + 1)


def test_d3_weight_stashing_is_p_minus_1_minus_s_updates_late():
    """Stage s (from 0) computes microbatch t with max(0, t - (p - 1 - s)) updates, and holds p - s."""
    p, m = 4, 12
    schedule = pipedream([1] * p, m)
    assert weight_versions(schedule) == {(s, t): max(0, t - (p - 1 - s)) for s in range(p) for t in range(m)}
    assert validate(schedule).versions_held == (4, 3, 2, 1)


def test_d3_vertical_sync_uses_the_input_stages_version_everywhere():
    """All stages use t - p + 1 updates, so all hold p versions."""
    p, m = 4, 12
    schedule = pipedream([1] * p, m, vertical_sync=True)
    assert weight_versions(schedule) == {(s, t): max(0, t - p + 1) for s in range(p) for t in range(m)}
    assert validate(schedule).versions_held == (4, 4, 4, 4)


def test_d4_2bw_version_table():
    """m = 4: microbatches 1 to 8 use version 0, 9 to 12 version 1; never more than two versions."""
    schedule = double_buffered(4, 16, update_every=4)
    versions = weight_versions(schedule)
    assert [versions[2, k] for k in range(16)] == [0] * 8 + [1] * 4 + [2] * 4
    assert validate(schedule).versions_held == (2, 2, 2, 2)


@given(p=st.integers(1, 6), extra=st.integers(0, 4), updates=st.integers(1, 5))
def test_d4_2bw_never_holds_more_than_two_versions(p, extra, updates):
    """Also where an update covers more microbatches than there are ranks."""
    schedule = double_buffered(p, (p + extra) * updates, update_every=p + extra)
    assert max(validate(schedule).versions_held) <= 2


def test_without_a_flush_the_bubble_is_paid_once():
    """PipeDream's idle time does not grow with the run; 1F1B's does with every flush."""

    def idle(schedule):
        return simulate(schedule, even_costs(4)).makespan - 3 * schedule.microbatches

    assert idle(pipedream([1] * 4, 8)) == idle(pipedream([1] * 4, 80)) == pytest.approx(9)
    assert 10 * idle(one_forward_one_backward(4, 8)) == pytest.approx(90)


def test_replicas_of_a_slow_stage_keep_the_pace():
    """The dissertation's 2-1 example: a stage of 6 units on two ranks beside one of 3 units."""
    costs = StageCosts(forward=(2.0, 1.0), backward=(4.0, 2.0))
    alone = simulate(pipedream([1, 1], 40), costs).makespan
    replicated = simulate(pipedream([2, 1], 40), costs).makespan
    assert alone / replicated > 1.9


def test_a_stage_update_waits_for_all_its_replicas():
    """The gradients of both replicas are in the update."""
    schedule = pipedream([2, 1], 2)
    spans = {(span.rank, str(span.action)): span for span in simulate(schedule, even_costs(2)).spans}
    assert spans[0, "0U0"].start == spans[1, "0U0"].start == spans[1, "0B1"].end


def test_the_flush_ends_with_each_stages_update():
    """Seconds of the optimizer come after the last backward."""
    costs = StageCosts(forward=(1.0, 1.0), backward=(2.0, 2.0), update=(0.5, 0.25))
    trace = simulate(one_forward_one_backward(2, 2), costs)
    assert trace.makespan == pytest.approx(9.5)
    assert [str(span.action) for span in trace.spans if span.rank == 1][-1] == "1U0"


@given(stage=st.integers(0, 99), kind=st.sampled_from(Kind), microbatch=st.integers(0, 999))
def test_actions_read_back_from_their_text(stage, kind, microbatch):
    """``2F0`` is stage 2, forward, microbatch 0."""
    action = Action(stage, kind, microbatch)
    assert Action.parse(str(action)) == action
    assert str(Action(2, Kind.FORWARD, 0)) == "2F0"


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


def test_a_version_that_does_not_exist_yet_is_refused():
    """2BW with all forwards first asks for updates that were not made."""
    schedule = broken(
        "0F0 0F1 0F2 0B0 0B1 0B2", microbatches=3, stage_ranks=((0,),), weights=WeightRule.DOUBLE_BUFFERED
    )
    with pytest.raises(ScheduleError, match="0F2 needs version 1 of stage 0, which is at 0"):
        validate(dataclasses.replace(schedule, update_every=1))


@pytest.mark.parametrize(
    ("build", "want"),
    [
        (lambda: build_schedule("1f1b", ranks=2, microbatches=2), "use one of 1F1B, GPipe"),
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
