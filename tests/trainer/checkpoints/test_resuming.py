"""Checkpoints: resumed by any number of ranks, whole or skipped, few."""

import signal

import pytest
from ballast_policies.contract import ExitCode

from tests.support.examples import first_daily
from tests.support.waiting import eventually

pytestmark = pytest.mark.processes

FULL_DISK = """
import resource
from pathlib import Path

from ballast_trainer.data.corpus import text_batch


def batches(full, first, last):
    def batch(seed, step, size):
        # From step to step this rank can write files of 20 kB at most.
        if step in (first, last):
            most = 20_000 if step == first else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
        return text_batch(seed, step, size, 16)

    return batch
"""

VANISHED_FOLDER = """
import shutil
from pathlib import Path

from ballast_trainer.data.corpus import text_batch


def batches(folder):
    def batch(seed, step, size):
        # In step 8 a file takes the place of the folder, until step 13.
        path = Path(folder)
        if step == 8 and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
            path.write_text("a file")
        if step == 12:
            path.unlink(missing_ok=True)
        return text_batch(seed, step, size, 16)

    return batch
"""

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


@pytest.mark.nightly
def test_a_corrupt_checkpoint_is_skipped_with_a_message(gang, small_config, single_process_losses, tmp_path):
    """A flipped byte is found by its checksum, and the one before is used."""
    config = small_config(totalSteps=15)
    first = gang(with_checkpoints({**config, "totalSteps": 10}, tmp_path / "saved"), ranks=2)
    assert set(first.exit_codes().values()) == {0}, first.errors()
    shard = tmp_path / "saved/step-00000010/__1_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 0xFF
    shard.write_bytes(bytes(data))
    running = gang(with_checkpoints(config, tmp_path / "saved"), ranks=2)
    assert set(running.exit_codes().values()) == {0}, running.errors()
    assert "skipping the corrupt checkpoint" in running.errors()
    assert "__1_0.distcp" in running.errors()
    assert running.events("launch")[0]["resumed_from_step"] == 5
    assert_resumes(running.losses(), single_process_losses(config), after=5, total=15)


@pytest.mark.nightly
def test_a_checkpoint_cut_short_is_not_seen(gang, small_config, tmp_path):
    """What a killed writer left under the temporary name is never loaded."""
    (tmp_path / "saved/.step-00000007.partial").mkdir(parents=True)
    running = gang(with_checkpoints(small_config(totalSteps=5), tmp_path / "saved"), ranks=1)
    assert running.exit_codes() == {"rank-0": 0}, running.errors()
    assert running.events("launch")[0]["resumed_from_step"] is None


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


@pytest.mark.nightly
def test_only_the_newest_are_kept(gang, small_config, tmp_path):
    """``checkpoint.keep`` bounds the disk."""
    running = gang(with_checkpoints(small_config(totalSteps=20), tmp_path / "saved", keep=2), ranks=2)
    assert set(running.exit_codes().values()) == {0}, running.errors()
    kept = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert kept == ["step-00000015", "step-00000020"]


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


@pytest.mark.nightly
def test_a_full_disk_is_survived_and_the_checkpoint_comes_when_there_is_room(
    gang, small_config, single_process_losses, tmp_path
):
    """A warning and an event with the reason, and the same curve; tried again before the next period."""
    folder = tmp_path / "gang"
    folder.mkdir()
    (folder / "full_disk.py").write_text(FULL_DISK)
    config = small_config(totalSteps=14)
    reference = single_process_losses(config)
    data = {"name": "full_disk:batches", "args": {"full": True, "first": 8, "last": 11}}
    saved = with_checkpoints({**config, "data": data}, tmp_path / "saved", asyncMode="disabled")
    running = gang(saved, ranks=2, folder=folder)
    assert set(running.exit_codes().values()) == {0}, running.errors()
    (failed, *_) = running.events("checkpointFailed")
    assert failed["step"] == 10
    assert failed["newest"] == 5
    assert "cannot write a checkpoint" in failed["reason"]
    assert "Traceback" not in running.errors()
    assert [event["step"] for event in running.events("checkpoint")][:2] == [5, 12]
    assert running.losses().keys() == reference.keys()
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["step-00000012", "step-00000014"]


@pytest.mark.nightly
def test_a_warning_names_no_checkpoint_that_has_vanished_with_its_folder(gang, small_config, tmp_path):
    """Those written before are gone: there is none, until the next one is written."""
    folder = tmp_path / "gang"
    folder.mkdir()
    (folder / "vanished_folder.py").write_text(VANISHED_FOLDER)
    saved = tmp_path / "saved"
    config = small_config(
        totalSteps=14, data={"name": "vanished_folder:batches", "args": {"folder": str(saved)}}
    )
    running = gang(with_checkpoints(config, saved, asyncMode="disabled"), ranks=1, folder=folder)
    assert set(running.exit_codes().values()) == {0}, running.errors()
    (failed, *_) = running.events("checkpointFailed")
    assert (failed["step"], failed["newest"]) == (10, None)
    assert "step 10 is not saved, there is none: " in running.errors()
    assert sorted(path.name for path in saved.iterdir()) == ["step-00000013", "step-00000014"]


@pytest.mark.nightly
def test_a_run_that_cannot_read_its_checkpoints_does_not_start_from_step_0(gang, small_config, tmp_path):
    """Exit code 1 with the reasons; all of them are there afterwards, and one brought back is used."""
    config = with_checkpoints(small_config(totalSteps=10), tmp_path / "saved", retrySeconds=0)
    assert gang(config, ranks=1).exit_codes() == {"rank-0": 0}
    longer = {**config, "totalSteps": 12}
    for step in (5, 10):
        (tmp_path / f"saved/step-{step:08d}/manifest.json").rename(tmp_path / f"hidden-{step}")
    running = gang(longer, ranks=2)
    assert set(running.exit_codes().values()) == {ExitCode.ERROR}
    assert running.losses() == {}
    assert "Traceback" not in running.errors()
    assert "none can be used" in running.errors()
    (tmp_path / "hidden-5").rename(tmp_path / "saved/step-00000005/manifest.json")
    again = gang(longer, ranks=1)
    assert again.exit_codes() == {"rank-0": 0}, again.errors()
    assert again.events("launch")[0]["resumed_from_step"] == 5


@pytest.mark.nightly
def test_a_second_run_on_a_folder_in_use_is_refused(gang, small_config, tmp_path):
    """With the process that uses it; the first one trains on and saves."""
    config = with_checkpoints(small_config(totalSteps=100_000), tmp_path / "saved")
    first = gang(config, ranks=1)
    first.wait_for_step(3)
    second = gang(config, ranks=2)
    assert set(second.exit_codes().values()) == {ExitCode.ERROR}
    assert f"in use by another run: process {first.processes['rank-0'].pid}" in second.errors()
    assert second.losses() == {}
    first.signal("rank-0", signal.SIGTERM)
    assert first.exit_codes() == {"rank-0": ExitCode.STOPPED}, first.errors()
    (stopped,) = first.events("ended")
    assert (tmp_path / f"saved/step-{stopped['step']:08d}/manifest.json").exists()


@pytest.mark.nightly
def test_pruning_is_switched_on_for_a_dense_checkpoint_and_off_again(gang, small_config, tmp_path):
    """The usual workflow: train dense, prune, train on; what was pruned starts from zero."""
    config = with_checkpoints(small_config(totalSteps=5), tmp_path / "saved")
    pruning = {"kind": "pruning", "startStep": 5, "endStep": 7, "everySteps": 2, "target": 0.95}
    for total, dynamics, ranks in ((5, [], 1), (10, [pruning], 2), (12, [], 1)):
        running = gang({**config, "totalSteps": total, "dynamics": dynamics}, ranks=ranks)
        assert set(running.exit_codes().values()) == {0}, running.errors()
        assert max(running.losses()) == total
        assert running.events("launch")[0]["resumed_from_step"] in {None, 5, 10}
