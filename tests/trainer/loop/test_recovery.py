"""Told to stop with a deadline; checkpoints that were damaged; restarts with more ranks than before."""

import json
import signal

import pytest
import torch
from ballast_policies.contract import ExitCode
from ballast_trainer.channel.base import DirectoryChannel
from ballast_trainer.distributed.process_group import World
from ballast_trainer.distributed.stopping import LEAVE_SECONDS, stop_seconds
from ballast_trainer.errors import ConfigurationError

from tests.support.plans import local_plan

PODS = ["job-1-0", "job-1-1", "job-1-2"]
ALONE = World(epoch=1, rank=0, size=1, processes=("local",), device=torch.device("cpu"))


@pytest.fixture
def launch(pods, tmp_path):
    """Start the three pods of a job with a checkpoint folder."""

    def start(config, *, network, environment):
        folder = tmp_path / "channel"
        folder.mkdir()
        saved = {"path": str(tmp_path / "saved"), "everySteps": 5}
        (folder / "config.json").write_text(json.dumps({**config, "checkpoint": saved}))
        DirectoryChannel(folder).publish(local_plan(PODS, network=network))
        for pod in PODS:
            pods.start_pod(pod, folder, environment)
        pods.wait_for_step(3, "job-1-0")

    return start


@pytest.mark.processes
def test_a_spot_notice_is_answered_by_a_checkpoint_within_its_grace_period(
    pods, launch, small_config, tmp_path
):
    """SIGTERM to the pod of one node, with time enough: all save the same step and exit STOPPED."""
    launch(small_config(totalSteps=100_000), network=31, environment={"BALLAST_STOP_SECONDS": "60"})
    pods.signal("job-1-1", signal.SIGTERM)
    assert set(pods.exit_codes().values()) == {ExitCode.STOPPED}, pods.errors()
    (step,) = {pods.termination(pod)["step"] for pod in PODS}
    assert (tmp_path / f"saved/step-{step:08d}/manifest.json").exists()


@pytest.mark.processes
def test_a_state_that_cannot_be_saved_in_time_is_told_before_the_kill(pods, launch, small_config):
    """One rank hangs, another waits inside torch when told to stop: it exits by itself with a message."""
    launch(
        small_config(totalSteps=100_000),
        network=32,
        environment={"BALLAST_STOP_SECONDS": str(LEAVE_SECONDS + 1), "BALLAST_HANG_SECONDS": "80"},
    )
    pods.signal("job-1-2", signal.SIGSTOP)
    pods.signal("job-1-1", signal.SIGTERM)
    assert pods.exit_code("job-1-1") == ExitCode.PEER_LOST, pods.errors()
    message = pods.termination("job-1-1")
    assert "told to stop, but the state is not saved 1 s later" in message["message"]
    assert "terminationGracePeriodSeconds" in message["message"]


@pytest.mark.processes
def test_a_job_resumes_with_more_ranks_than_it_had(gang, small_config, single_process_losses, tmp_path):
    """Two ranks save, four continue: the same curve, the learning rate's decay included."""
    decay = {"warmupSteps": 3, "decay": "cosine", "decaySteps": 16, "learningRate": 0.005}
    config = small_config(totalSteps=16, training=decay)
    saved = {"path": str(tmp_path / "saved"), "everySteps": 8}
    first = gang({**config, "totalSteps": 8, "checkpoint": saved}, ranks=2)
    assert set(first.exit_codes().values()) == {0}, first.errors()
    more = gang({**config, "checkpoint": saved}, ranks=4)
    assert set(more.exit_codes().values()) == {0}, more.errors()
    assert more.events("launch")[0]["resumed_from_step"] == 8
    curve, reference = {**first.losses(), **more.losses()}, single_process_losses(config)
    assert max(abs(curve[step] - reference[step]) for step in reference) < 1e-5


@pytest.mark.parametrize("text", ["soon", "0", "-3", "nan"])
def test_a_deadline_that_is_none_is_refused(text):
    """With the variable's name."""
    with pytest.raises(ConfigurationError, match="BALLAST_STOP_SECONDS"):
        stop_seconds({"BALLAST_STOP_SECONDS": text})
    assert stop_seconds({}) is None
    assert stop_seconds({"BALLAST_STOP_SECONDS": "30"}) == 30.0
