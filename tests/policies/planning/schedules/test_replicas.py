"""Stages on several ranks, round-robin: which schedules know them, and what is refused."""

import pytest
from ballast_policies.planning.schedules.registry import SCHEDULES, build_schedule, replicable_schedules
from ballast_policies.planning.schedules.schedule import Kind, ScheduleError
from ballast_policies.planning.schedules.validate import validate
from hypothesis import given
from hypothesis import strategies as st


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
