"""Ranks that die, hang or are told to leave; configurations that cannot work."""

import json
import signal
import socket

import pytest
from ballast_policies.contract.messages import Ack, ExitCode, Report, Stage
from ballast_policies.contract.plan import Directive
from ballast_trainer.distributed.stopping import LEAVE_SECONDS
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.launch import ValidatedJob

from tests.support.examples import first_daily
from tests.support.one_process import train_here
from tests.support.plans import local_plan
from tests.support.waiting import WAIT_SECONDS, eventually

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
    launch(small_config(totalSteps=100_000), network=23, environment={"BALLAST_HANG_SECONDS": "15"})
    pods.signal(victim, signal.SIGSTOP)
    survivors = [pod for pod in PODS if pod != victim]
    assert {pods.exit_code(pod) for pod in survivors} == {ExitCode.PEER_LOST}, pods.errors()
    # The first to notice leaves, and the other may see its connection close before its own limit is over.
    assert any("has not" in pods.termination(survivor)["message"] for survivor in survivors)


@pytest.mark.parametrize("told", first_daily(PODS[::-1]))
def test_sigterm_to_one_rank_saves_and_stops_all(pods, launch, small_config, told, tmp_path):
    """All ranks leave after the same step, which is saved, with exit code STOPPED; with time enough."""
    config = saving(small_config(totalSteps=100_000), tmp_path)
    launch(config, network=24, environment={"BALLAST_STOP_SECONDS": str(WAIT_SECONDS)})
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


def test_a_job_is_told_to_be_done_long_after_its_other_pods_have_ended(pods, small_config, tmp_path):
    """While the operator cannot be told, the first pod takes those that have ended for done, not for hung."""
    told = tmp_path / "channel/finished-step"
    told.mkdir(parents=True)  # nothing can be written in its place
    hang_seconds = 5
    environment = {"BALLAST_HANG_SECONDS": str(hang_seconds)}
    pods.start_job(told.parent, small_config(totalSteps=2), local_plan(PODS[:2], network=48), environment)
    assert pods.exit_code(PODS[1]) == 0, pods.errors()
    eventually(lambda: "trying again" in pods.errors(), "it tries")
    first = pods.processes[PODS[0]]
    first.join(hang_seconds + 3)
    assert first.exitcode is None, pods.errors()
    told.rmdir()
    assert pods.exit_code(PODS[0]) == 0, pods.errors()
    assert told.read_text() == "2"


def test_a_pod_deleted_while_it_tells_that_its_job_is_done_ends_as_done(pods, small_config, tmp_path):
    """It gives up in half of its grace period, and its termination message has the step."""
    told = tmp_path / "channel/finished-step"
    told.mkdir(parents=True)  # nothing can be written in its place
    environment = {"BALLAST_STOP_SECONDS": "16"}
    pods.start_job(told.parent, small_config(totalSteps=2), local_plan(PODS[:1], network=50), environment)
    eventually(lambda: "trying again" in pods.errors(), "it tries")
    pods.signal(PODS[0], signal.SIGTERM)
    assert pods.exit_code(PODS[0]) == 0, pods.errors()
    message = pods.termination(PODS[0])
    assert (message["reason"], message["step"]) == ("Finished", 2)


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


def test_a_pod_does_not_follow_the_plan_of_an_earlier_pod_of_its_name(pods, small_config, tmp_path):
    """Its create was under way as the operator died, and landed late: the plan is another pod's."""
    plan, other = local_plan(PODS[:1], network=25), {"BALLAST_POD_IP": "127.25.0.99"}
    pods.start_job(tmp_path / "channel", small_config(totalSteps=2), plan, other)
    assert pods.exit_code(PODS[0]) == ExitCode.PEER_LOST, pods.errors()
    message = pods.termination(PODS[0])["message"]
    assert f"at {plan.ranks[0].address}, but this pod is at 127.25.0.99" in message
    assert not (tmp_path / "channel/ack.json").exists()


def test_a_wrong_configuration_ends_with_its_field_named(pods, small_config, tmp_path):
    """Exit code USAGE, reason ConfigurationError, and the field that is wrong."""
    config = {**small_config(totalSteps=2), "model": {"name": "gtp"}}
    pods.start_job(tmp_path / "channel", config, local_plan(PODS[:1], network=26))
    assert pods.exit_code(PODS[0]) == ExitCode.USAGE
    message = pods.termination(PODS[0])
    assert message["reason"] == "ConfigurationError"
    assert message["message"].startswith("model.name")


@pytest.mark.parametrize(
    ("where", "code", "words"),
    [
        ("builder", ExitCode.USAGE, "SystemExit: 0 (awkward_models.py, line"),
        ("layer", ExitCode.ERROR, "SystemExit: 0"),
    ],
)
def test_a_model_that_ends_the_process_has_not_finished(
    pods, gang, small_config, tmp_path, where, code, words
):
    """``sys.exit(0)`` in the user's code is an error, in a pod and under ``run``."""
    model = {"name": "tests.trainer.models.awkward_models:that_leaves", "args": {"where": where}}
    config = {**small_config(totalSteps=2), "model": model}
    alone = gang(config, ranks=1)
    pods.start_job(tmp_path / "channel", config, local_plan(PODS[:1], network=26))
    assert (alone.exit_code("rank-0"), pods.exit_code(PODS[0])) == (code, code)
    assert words in alone.errors()
    assert words in pods.termination(PODS[0])["message"]


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


def test_local_ranks_that_fill_no_pods_are_refused(gang, small_config):
    """Three ranks in pods of two: named before the first step."""
    running = gang(small_config(parallelism={"gpusPerPod": 2}), ranks=3)
    assert set(running.exit_codes().values()) == {2}
    assert "parallelism.gpusPerPod: 3 ranks do not fill pods of 2" in running.errors()


def test_a_gang_starts_with_exactly_the_planned_layers(gang, small_config, tmp_path):
    config = small_config(totalSteps=4, plan={"layers": [1, 5, 2]})
    folder = tmp_path / "channel"
    gang(config, ranks=3, options=["--channel", str(folder)]).succeeded()
    report = Report.from_json((folder / "report.json").read_text())
    assert [stage.end_layer for stage in report.stages] == [1, 6, 8]


@pytest.mark.parametrize(
    ("layers", "ranks", "cut"),
    [([1, 5, 1], 3, False), ([1, 5, 1], 3, True), ([1, 7], 3, False), ([1, 5, 2], 2, False)],
)
def test_a_plan_of_another_model_or_other_ranks_is_refused(small_config, layers, ranks, cut):
    """With what the plan and the model have, where the configuration alone does not know the layers."""
    config = small_config(plan={"layers": layers})
    del config["model"]["layers"]
    config["model"]["args"]["layers"] = 8
    with pytest.raises(ConfigurationError, match=r"plan\.layers: has \d layers in \d stages; 'gpt' has 8"):
        ValidatedJob.from_mapping(config).check_ranks(ranks, cut=cut)


def test_stages_of_other_layers_than_the_models_are_refused(small_config):
    """Before, such a job trained with even stages, and said nothing."""
    plan = local_plan(["job-1-0"]).replace(stages=(Stage(rank=0, first_layer=0, end_layer=7),))
    with pytest.raises(ConfigurationError, match=r"plan 1 has 7 layers on ranks \[0\]; 'gpt' has 8"):
        train_here(small_config(), plan=plan)
