"""Our orders are torch's: what is checked and simulated here is what its runtime runs."""

from types import SimpleNamespace

import pytest
from ballast_policies.planning.schedules.builders.synchronous import (
    interleaved_one_forward_one_backward,
    interleaved_zero_bubble,
)
from ballast_policies.planning.schedules.builders.v_shaped import dual_pipe_v, zero_bubble_v
from ballast_policies.planning.schedules.exports import schedule_csv

# One worker of pytest-xdist imports torch's pipelining, which takes seconds, and only if it runs these.
pytestmark = pytest.mark.xdist_group("torch pipelining")


@pytest.fixture(scope="module")
def torch_schedules():
    """The module with torch's schedules."""
    return pytest.importorskip("torch.distributed.pipelining.schedules")


def torch_order(kind, ranks, microbatches, chunks):
    """torch's own action lists, without building stages: its method on a stand-in that has the counts."""
    rounds = max(1, microbatches // ranks)
    counts = SimpleNamespace(
        pp_group_size=ranks,
        n_local_stages=chunks,
        _n_microbatches=microbatches,
        microbatches_per_round=microbatches // rounds,
        num_stages=ranks * chunks,
    )
    for rank in range(ranks):
        actions = kind._calculate_single_rank_operations(counts, rank)
        yield [str(action) for action in actions if action is not None]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (interleaved_one_forward_one_backward, "ScheduleInterleaved1F1B"),
        (interleaved_zero_bubble, "ScheduleInterleavedZeroBubble"),
        (lambda ranks, microbatches, chunks: zero_bubble_v(ranks, microbatches), "ScheduleZBVZeroBubble"),
    ],
)
def test_the_order_is_torchs(ours, theirs, ranks, rounds, chunks, torch_schedules):
    chunks = 2 if theirs == "ScheduleZBVZeroBubble" else chunks
    schedule = ours(ranks, ranks * rounds, chunks)
    want = list(torch_order(getattr(torch_schedules, theirs), ranks, ranks * rounds, chunks))
    assert [[str(action) for action in row] for row in schedule.actions] == want


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("extra", [0, 1, 5])
def test_the_order_of_dual_pipe_v_is_torchs_with_overlapped_pairs_one_after_the_other(
    ranks, extra, torch_schedules
):
    schedule = dual_pipe_v(ranks, 2 * ranks + extra)
    counts = SimpleNamespace(pp_group_size=ranks, _n_microbatches=2 * ranks + extra)
    for rank, row in enumerate(schedule.actions):
        want = []
        for action in torch_schedules.ScheduleDualPipeV._calculate_single_rank_operations(counts, rank):
            want += map(str, action.sub_actions or [action])
        assert [str(action) for action in row] == want


def test_torch_reads_our_csv(torch_schedules):
    """Each entry is an action of torch's own, and says the same."""
    text = schedule_csv(zero_bubble_v(4, 8))
    read = [
        [str(torch_schedules._Action.from_str(entry)) for entry in line.split(",")]
        for line in text.splitlines()
    ]
    assert "".join(",".join(row) + "\n" for row in read) == text
