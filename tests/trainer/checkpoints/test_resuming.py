"""Checkpoints: resumed by any number of ranks, whole or skipped, few."""

import shutil
import signal
from collections import OrderedDict

import pytest
import torch
from ballast_policies.contract.messages import ExitCode
from ballast_trainer.checkpoints import tensors
from ballast_trainer.errors import CheckpointError
from ballast_trainer.models.protocol import Model

from tests.support.examples import first_daily
from tests.support.gang import assert_same_curve
from tests.support.one_process import train_here
from tests.support.waiting import eventually
from tests.trainer.layers.trained_layers import ALONE, all_layers

pytestmark = pytest.mark.processes


CHANGES = [
    {"kind": "freezing", "startStep": 2, "endStep": 12, "everySteps": 5, "target": 0.4},
    {"kind": "pruning", "startStep": 2, "endStep": 8, "everySteps": 2, "target": 0.95},
]


def with_checkpoints(config, folder, **fields):
    return {**config, "checkpoint": {"path": str(folder), "everySteps": 5, **fields}}


@pytest.mark.parametrize("dynamics", first_daily([CHANGES, []]), ids=["freezing+pruning", "plain"])
def test_three_ranks_save_and_four_or_one_resume(
    gang, small_config, single_process_losses, tmp_path, dynamics
):
    """The curve continues with other ranks: optimizer state, learning rate, masks and data position kept."""
    decay = {"warmupSteps": 3, "decay": "cosine", "decaySteps": 16, "learningRate": 0.005}
    config = small_config(totalSteps=16, dynamics=dynamics, training=decay)
    reference = single_process_losses(config)
    first = with_checkpoints(config, tmp_path / "saved")
    assert set(gang({**first, "totalSteps": 10}, ranks=3).exit_codes().values()) == {0}
    resumed = []
    for ranks in (4, 1):
        copy = tmp_path / f"copy-{ranks}"
        shutil.copytree(tmp_path / "saved", copy)
        resumed.append(gang(with_checkpoints(config, copy), ranks=ranks))
    for running in resumed:
        running.succeeded()
        assert running.events("launch")[0]["resumed_from_step"] == 10
        assert_same_curve(running.losses(), {step: reference[step] for step in range(11, 17)})


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
    again = gang(config, ranks=2, folder=tmp_path / "second").succeeded()
    assert again.events("launch")[0]["resumed_from_step"] == newest
    curve = single_process_losses(config)
    assert all(abs(loss - curve[step]) < 1e-5 for step, loss in again.losses().items())
    assert not list(folder.glob(".step-*.partial"))


def test_one_rank_resumes_with_buffers_that_are_not_persistent(small_config, tmp_path):
    """Those that a forward writes are in its checkpoints, as in those of several ranks."""
    model = {"name": "tests.trainer.models.awkward_models:counting_forwards"}
    config = with_checkpoints(small_config(totalSteps=3, model=model), tmp_path / "saved")
    train_here(config)
    resumed = train_here({**config, "totalSteps": 6}).losses
    whole = train_here(small_config(totalSteps=6, model=model)).losses
    assert resumed == {step: whole[step] for step in (4, 5, 6)}


OTHERS = [
    ({"model": {"name": "gpt", "layers": 6}}, "checkpoint of 8 layers, the model has 6"),
    ({"training": {"optimizer": "sgd"}}, "of the optimizer adamw, training.optimizer is sgd"),
    (
        {"model": {"name": "gpt", "layers": 8, "args": {"dim": 64, "heads": 2}}},
        r"not fit layer 0: other shapes have ",
    ),
    ({"training": {"seed": 5}}, "a checkpoint of seed 0, the job has 5"),
]


def test_a_checkpoint_of_another_job_is_refused(small_config, tmp_path):
    """Before the first step, with what differs and what to change: nothing of it is dropped in silence."""
    config = with_checkpoints(small_config(totalSteps=1), tmp_path / "saved")
    train_here(config)
    for fields, words in OTHERS:
        with pytest.raises(CheckpointError, match=f"{words}.*To fix: "):
            train_here(config | fields | {"totalSteps": 5})


def renamed(name):
    """Two layers, of which the first has a module by this name."""
    first = torch.nn.Sequential(OrderedDict({name: torch.nn.Linear(2, 2), "gate": torch.nn.Linear(2, 2)}))
    return Model.from_layers(
        [first, torch.nn.Linear(2, 2)],
        loss=torch.nn.functional.mse_loss,
        batch=lambda seed, step, size: (torch.ones(size, 2), torch.ones(size, 2)),
    )


def test_a_checkpoint_of_modules_by_other_names_is_refused_by_these_names(small_config, tmp_path):
    """Which tensors there are on either side, not torch's words about a state_dict."""
    config = with_checkpoints(small_config(totalSteps=1), tmp_path / "saved")
    config["model"] = {"name": f"{__name__}:renamed", "args": {"name": "up"}}
    train_here(config)
    config["model"]["args"]["name"] = "up_proj"
    words = (
        r"not fit layer 0: the checkpoint has no up_proj\.weight, up_proj\.bias; "
        r"the model has no up\.weight, up\.bias\. To fix: "
    )
    with pytest.raises(CheckpointError, match=words):
        train_here(config | {"totalSteps": 2})


def test_a_tensor_that_several_ranks_stored_is_compared_as_a_whole():
    """Its parts have names of their own in a checkpoint: these are not what a model lacks."""
    layers = all_layers(Model.from_layers([torch.nn.Linear(2, 2)], loss=torch.nn.functional.mse_loss))
    parts = {f"layers.0.module.weight@{index}/2:0x1": torch.ones(1, 2) for index in range(2)}
    words = r"layer 0: the checkpoint has no bias; the model has no shift\. "
    with pytest.raises(CheckpointError, match=words):
        tensors.fill(ALONE, layers, parts | {"layers.0.module.shift": torch.ones(2)}, "it")


def test_a_place_that_cannot_be_written_is_found_before_the_first_step(gang, small_config, tmp_path):
    """Not after the hours until the first checkpoint."""
    (tmp_path / "saved").write_text("a file")
    running = gang(with_checkpoints(small_config(totalSteps=5), tmp_path / "saved"), ranks=2)
    assert set(running.exit_codes().values()) == {ExitCode.ERROR}
    assert running.losses() == {}
    assert "To fix: let checkpoint.path be a directory" in running.errors()
    assert "Traceback" not in running.errors()
