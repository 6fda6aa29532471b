"""Ranks that die, hang or are told to leave; configurations that cannot work."""

import json
import signal
import socket

import pytest
from ballast_policies.contract import Ack, Directive, ExitCode
from ballast_trainer.distributed.stopping import LEAVE_SECONDS

from tests.support.examples import first_daily
from tests.support.plans import local_plan
from tests.support.waiting import eventually

pytestmark = pytest.mark.processes

PODS = ["job-1-0", "job-1-1", "job-1-2"]


@pytest.fixture
def launch(pods, tmp_path):
    """Start the three pods of a job on the directory channel, and wait until it trains."""

    def start(config, *, network, environment=None):
        plan = local_plan(PODS, network=network)
        channel = pods.start_job(tmp_path / "channel", config, plan, environment)
        pods.wait_for_step(3, "job-1-0")
        return channel

    return start


def saving(config, tmp_path):
    return {**config, "checkpoint": {"path": str(tmp_path / "saved"), "everySteps": 5}}


@pytest.mark.parametrize("victim", first_daily(["job-1-1", "job-1-0"]))
def test_a_killed_rank_ends_the_others_as_healthy(pods, launch, small_config, victim, tmp_path):
    """The survivors exit PEER_LOST and say so in their termination message."""
    launch(small_config(totalSteps=100_000), network=21)
    pods.signal(victim, signal.SIGKILL)
    codes = pods.exit_codes()
    assert codes.pop(victim) == -signal.SIGKILL
    assert set(codes.values()) == {ExitCode.PEER_LOST}, pods.errors()
    for survivor in codes:
        assert pods.termination(survivor)["reason"] == "PeerLost"


@pytest.mark.parametrize("victim", first_daily(["job-1-0", "job-1-2"]))
def test_a_hung_rank_is_noticed_by_its_heartbeat(pods, launch, small_config, victim):
    """A stopped process, whose connections stay open, costs seconds and not gloo's time-out."""
    launch(small_config(totalSteps=100_000), network=23, environment={"BALLAST_HANG_SECONDS": "6"})
    pods.signal(victim, signal.SIGSTOP)
    survivors = [pod for pod in PODS if pod != victim]
    assert {pods.exit_code(pod) for pod in survivors} == {ExitCode.PEER_LOST}, pods.errors()
    # The first to notice leaves, and the other may see its connection close before its own limit is over.
    assert any("has not" in pods.termination(survivor)["message"] for survivor in survivors)


@pytest.mark.parametrize("told", first_daily(PODS[::-1]))
def test_sigterm_to_one_rank_saves_and_stops_all(pods, launch, small_config, told, tmp_path):
    """All ranks leave after the same step, which is saved, with exit code STOPPED; with time enough."""
    config = saving(small_config(totalSteps=100_000), tmp_path)
    launch(config, network=24, environment={"BALLAST_STOP_SECONDS": "60"})
    pods.signal(told, signal.SIGTERM)
    assert set(pods.exit_codes().values()) == {ExitCode.STOPPED}, pods.errors()
    messages = [pods.termination(pod) for pod in PODS]
    assert {message["reason"] for message in messages} == {"CheckpointedAndStopped"}
    (step,) = {message["step"] for message in messages}
    assert (tmp_path / f"saved/step-{step:08d}/manifest.json").exists()


def test_a_state_that_cannot_be_saved_in_time_is_told_before_the_kill(pods, launch, small_config, tmp_path):
    """One rank hangs, another waits inside torch when told to stop: it exits by itself with a message."""
    environment = {"BALLAST_STOP_SECONDS": str(LEAVE_SECONDS + 1), "BALLAST_HANG_SECONDS": "80"}
    launch(saving(small_config(totalSteps=100_000), tmp_path), network=32, environment=environment)
    pods.signal("job-1-2", signal.SIGSTOP)
    pods.signal("job-1-1", signal.SIGTERM)
    assert pods.exit_code("job-1-1") == ExitCode.PEER_LOST, pods.errors()
    message = pods.termination("job-1-1")
    assert "told to stop, but the state is not saved 1 s later" in message["message"]
    assert "terminationGracePeriodSeconds" in message["message"]


def test_a_plan_with_checkpoint_and_stop_ends_the_job(pods, launch, small_config, tmp_path):
    """The acknowledgement names the step that was saved."""
    channel = launch(saving(small_config(totalSteps=100_000), tmp_path), network=25)
    channel.publish(local_plan(PODS, epoch=2, directive=Directive.CHECKPOINT_AND_STOP, network=25))
    assert set(pods.exit_codes().values()) == {ExitCode.STOPPED}, pods.errors()
    ack = Ack.from_json((tmp_path / "channel/ack.json").read_text())
    assert ack.epoch == 2
    assert (tmp_path / f"saved/step-{ack.checkpoint_step:08d}/manifest.json").exists()


def test_sigterm_before_the_plan_stops_at_once(pods, tmp_path):
    """A pod that still waits for its plan has nothing to save."""
    (tmp_path / "channel").mkdir()
    pods.start_pod("job-1-0", tmp_path / "channel")
    log = pods.folder / "job-1-0.err"
    eventually(lambda: log.exists() and "waiting for a plan" in log.read_text(), "it waits", pods.errors)
    pods.signal("job-1-0", signal.SIGTERM)
    assert pods.exit_code("job-1-0") == ExitCode.STOPPED
    assert pods.termination("job-1-0")["reason"] == "CheckpointedAndStopped"


@pytest.mark.parametrize(
    ("change", "field"),
    first_daily(
        [
            ({"model": {"name": "gtp"}}, "model.name"),
            ({"model": {"name": "gpt", "args": {"dim": 30}}}, "model.args"),
            ({"model": {"name": "gpt", "layers": 2}}, "model.args"),
            ({"pipeline": {"microbatches": 3, "globalBatchSize": 8}}, "pipeline.globalBatchSize"),
            ({"pipeline": {"schedule": "2F2B"}}, "pipeline.schedule"),
            ({"dynamics": [{"kind": "melting", "endStep": 3, "target": 0.5}]}, "dynamics[0].kind"),
            ({"totalSteps": "many"}, "totalSteps"),
            ({"model": {"name": "gpt", "layers": 3}, "pipeline": {"maxStages": 2}}, None),
        ],
        3,
    ),
)
def test_a_wrong_configuration_ends_with_its_field_named(pods, small_config, change, field, tmp_path):
    """Exit code USAGE, reason ConfigurationError, and the field that is wrong."""
    config, names = {**small_config(totalSteps=2), **change}, PODS[:1]
    pods.start_job(tmp_path / "channel", config, local_plan(names, network=26))
    if field is None:
        assert pods.exit_code(names[0]) == ExitCode.OK, pods.errors()
        return
    assert pods.exit_code(names[0]) == ExitCode.USAGE
    message = pods.termination(names[0])
    assert message["reason"] == "ConfigurationError"
    assert message["message"].startswith(field)


def test_more_ranks_than_layers_are_refused(gang, small_config):
    """A stage without a layer cannot be."""
    config = small_config(totalSteps=2)
    config["model"]["layers"] = 3
    running = gang(config, ranks=4)
    assert set(running.exit_codes().values()) == {ExitCode.USAGE}
    assert "4 stages need as many layers" in running.errors()


def test_a_port_that_is_taken_is_named(pods, small_config):
    """Where ranks are to meet: the variable, the address and what to change, without a traceback."""
    path = pods.folder / "config.json"
    path.write_text(json.dumps(small_config(totalSteps=2)))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        environment = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        environment["MASTER_PORT"] = str(taken.getsockname()[1])
        pods.start("rank-0", ["run", "--config", str(path)], environment)
        assert pods.exit_code("rank-0") == ExitCode.USAGE
    assert f"MASTER_PORT: rank 0 cannot listen on 127.0.0.1:{environment['MASTER_PORT']}" in pods.errors()
    assert "Traceback" not in pods.errors()
