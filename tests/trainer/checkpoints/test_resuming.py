"""Checkpoints: resumed by any number of ranks, whole or skipped, few."""

import signal

import pytest
from ballast_policies.contract import ExitCode

from tests.support.examples import first_daily
from tests.support.waiting import eventually

pytestmark = pytest.mark.processes


CHANGES = [
    {"kind": "freezing", "startStep": 2, "endStep": 12, "everySteps": 5, "target": 0.4},
    {"kind": "pruning", "startStep": 2, "endStep": 8, "everySteps": 2, "target": 0.95},
]


def with_checkpoints(config, folder, **fields):
    return {**config, "checkpoint": {"path": str(folder), "everySteps": 5, **fields}}


def assert_resumes(losses, reference, *, after, total):
    assert sorted(losses) == list(range(after + 1, total + 1))
    assert max(abs(losses[step] - reference[step]) for step in losses) < 1e-5


@pytest.mark.parametrize("dynamics", first_daily([CHANGES, []]), ids=["freezing+pruning", "plain"])
def test_four_ranks_save_and_two_three_or_one_resume(
    gang, small_config, single_process_losses, tmp_path, dynamics
):
    """The curve continues with another number of ranks, optimizer state, masks and data position kept."""
    config = small_config(totalSteps=16, dynamics=dynamics)
    reference = single_process_losses(config)
    first = with_checkpoints(config, tmp_path / "saved")
    assert set(gang({**first, "totalSteps": 10}, ranks=4).exit_codes().values()) == {0}
    resumed = []
    for ranks in (2, 3, 1):
        copy = tmp_path / f"copy-{ranks}"
        copy_tree(tmp_path / "saved", copy)
        resumed.append(gang(with_checkpoints(config, copy), ranks=ranks))
    for running in resumed:
        assert set(running.exit_codes().values()) == {0}, running.errors()
        assert running.events("launch")[0]["resumed_from_step"] == 10
        assert_resumes(running.losses(), reference, after=10, total=16)


@pytest.mark.parametrize("killed", first_daily(["rank-0", "rank-1"]))
def test_a_rank_killed_while_a_checkpoint_is_written_costs_that_checkpoint(
    gang, small_config, single_process_losses, tmp_path, killed
):
    """The gang that follows goes on from the last whole one, and the curve is that of one process."""
    folder = tmp_path / "saved"
    config = with_checkpoints(small_config(totalSteps=100_000), folder, everySteps=2)
    running = gang(config, ranks=2, folder=tmp_path / "first")
    eventually(lambda: any(folder.glob("step-*")), "a checkpoint is whole", running.errors)
    eventually(lambda: any(folder.glob(".step-*.partial")), "the next one is begun", running.errors)
    running.signal(killed, signal.SIGKILL)
    codes = running.exit_codes()
    assert codes[killed] == -signal.SIGKILL
    newest = max(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))
    config["totalSteps"] = newest + 6
    again = gang(config, ranks=2, folder=tmp_path / "second")
    assert set(again.exit_codes().values()) == {0}, again.errors()
    assert again.events("launch")[0]["resumed_from_step"] == newest
    curve = single_process_losses(config)
    assert all(abs(loss - curve[step]) < 1e-5 for step, loss in again.losses().items())
    assert not list(folder.glob(".step-*.partial"))


def test_a_checkpoint_of_another_model_is_refused(gang, small_config, tmp_path):
    """It says what differs and what to change, and does not train on."""
    config = with_checkpoints(small_config(totalSteps=5), tmp_path / "saved")
    assert gang(config, ranks=1).exit_codes() == {"rank-0": 0}
    other = {**config, "model": {"name": "gpt", "layers": 6, "args": {"dim": 32, "heads": 2}}}
    running = gang(other, ranks=1)
    assert running.exit_codes() == {"rank-0": ExitCode.ERROR}
    assert "checkpoint of 8 layers, the model has 6" in running.errors()


def test_a_checkpoint_of_another_optimizer_is_refused(gang, small_config, tmp_path):
    """Its moments are not the other's: neither dropped in silence nor found missing at the first step."""
    config = with_checkpoints(small_config(totalSteps=5), tmp_path / "saved")
    assert gang(config, ranks=1).exit_codes() == {"rank-0": 0}
    other = {**config, "training": {**config.get("training", {}), "optimizer": "sgd"}}
    running = gang(other, ranks=2)
    assert set(running.exit_codes().values()) == {ExitCode.ERROR}
    assert "checkpoint of the optimizer adamw, training.optimizer is sgd" in running.errors()
    assert "Traceback" not in running.errors()


def test_a_checkpoint_of_other_shapes_is_refused_with_the_reason(gang, small_config, tmp_path):
    """As many layers, but wider ones: the layer, the tensor and what to change, without a traceback."""
    config = with_checkpoints(small_config(totalSteps=5), tmp_path / "saved")
    assert gang(config, ranks=1).exit_codes() == {"rank-0": 0}
    running = gang(
        {**config, "model": {"name": "gpt", "layers": 8, "args": {"dim": 64, "heads": 2}}}, ranks=1
    )
    assert running.exit_codes() == {"rank-0": ExitCode.ERROR}
    assert "does not fit layer 0" in running.errors()
    assert "Traceback" not in running.errors()


def test_a_place_that_cannot_be_written_is_found_before_the_first_step(gang, small_config, tmp_path):
    """Not after the hours until the first checkpoint."""
    (tmp_path / "saved").write_text("a file")
    running = gang(with_checkpoints(small_config(totalSteps=5), tmp_path / "saved"), ranks=2)
    assert set(running.exit_codes().values()) == {ExitCode.ERROR}
    assert running.losses() == {}
    assert "To fix: let checkpoint.path be a directory" in running.errors()
    assert "Traceback" not in running.errors()


def copy_tree(source, target):
    import shutil

    shutil.copytree(source, target)
