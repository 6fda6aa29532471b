"""While the optimizer's state of layers that moved is under way, nothing is lost and nothing is wrong."""

import dataclasses
import functools
import shutil

import pytest
from ballast_trainer.channel.directory import DirectoryChannel

from tests.support.held_data import Gates
from tests.support.replans import has_acked, stages_at, until

pytestmark = pytest.mark.processes

EVALUATED = {
    "everySteps": 1,
    "batches": 1,
    "data": {"name": "tests.support.held_data:text", "args": {"context": 16}},
}
TOTAL = 9


def assert_same_curve(losses, reference, first=1):
    assert sorted(losses) == list(range(first, TOTAL + 1))
    assert max(abs(losses[step] - reference[step]) for step in losses) < 1e-5


PRUNING = {"kind": "pruning", "startStep": 3, "endStep": 7, "everySteps": 1, "target": 0.95}


@pytest.mark.parametrize(
    ("schedule", "dynamics", "tied"), [("1F1B", [], True), ("ZeroBubbleV", [PRUNING], False)]
)
def test_a_shrink_in_the_step_after_a_rebalance_keeps_curve_and_checkpoints(
    gang, small_config, single_process_losses, tmp_path, schedule, dynamics, tied
):
    """Evaluated and saved after every step; a job that resumes from the checkpoint has the same losses.

    Layers come to the ranks that stay from one another, and from the rank that leaves.
    """
    config = small_config(totalSteps=TOTAL, dynamics=dynamics)
    config["pipeline"]["schedule"] = schedule
    # The head's weight is the embedding's.
    config["model"]["args"]["tied"] = tied
    saved = tmp_path / "saved"
    held = config | {"evaluation": EVALUATED, "checkpoint": {"path": str(saved), "everySteps": 1, "keep": 20}}
    gates = Gates(tmp_path / "gates", 3, 4)
    channel = DirectoryChannel(tmp_path / "channel")
    running = gang(gates.hold(held), ranks=3, options=["--channel", str(tmp_path / "channel")])
    running.wait_for_step(3)
    moved, fewer = stages_at((0, 2, 6, 8), range(3)), stages_at((0, 4, 8), range(2))
    if schedule == "ZeroBubbleV":
        moved = stages_at((0, 1, 2, 4, 6, 7, 8), (0, 1, 2, 2, 1, 0))
        fewer = stages_at((0, 2, 4, 6, 8), (0, 1, 1, 0))
    channel.publish(dataclasses.replace(channel.read_plan(), epoch=2, stages=moved))
    until(running, functools.partial(running.has_read, 2))
    gates.open()
    until(running, functools.partial(has_acked, tmp_path, 2))
    kept = channel.read_plan().keep(channel.read_plan().pods[:2], "another job waits")
    channel.publish(dataclasses.replace(kept, stages=fewer))
    until(running, functools.partial(running.has_read, 3))
    gates.open()
    assert set(running.exit_codes().values()) == {0}, running.errors()
    reference = single_process_losses(config)
    assert_same_curve(running.losses(), reference)
    assert [event["step"] for event in running.events("migrate")] == [4, 5]
    assert [event["step"] for event in running.events("evaluation")] == list(range(1, TOTAL + 1))
    for newer in range(6, TOTAL + 1):
        shutil.rmtree(saved / f"step-{newer:08}")
    again = gang(config | {"checkpoint": {"path": str(saved), "everySteps": 20}}, ranks=1)
    assert set(again.exit_codes().values()) == {0}, again.errors()
    assert_same_curve(again.losses(), reference, first=6)
