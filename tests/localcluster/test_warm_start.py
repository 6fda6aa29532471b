"""Trainers forked from one process that has torch imported: each pod is as it would be without."""

from pathlib import Path

import pytest
from ballast_localcluster.nodes.containers.warm_start import WARM_START_VARIABLE, WarmStart
from ballast_policies.contract.messages import ExitCode

from tests.localcluster.test_pod_ends import pid_of
from tests.support.waiting import eventually, is_alive

pytestmark = pytest.mark.api

FAST = {"nodeSelector": {"ballast.dev/pool": "fast"}}


def trainer(name, *words, **env):
    variables = {"BALLAST_JOB": "j", "BALLAST_POD_NAME": name, "BALLAST_CHANNEL": "/channel", **env}
    return {
        "command": ["ballast-train", "pod", *words],
        "env": [{"name": key, "value": value} for key, value in variables.items()],
        "volumeMounts": [{"name": "channel", "mountPath": "/channel"}],
    }


def start(pods, name, *words, **env):
    volumes = [{"name": "channel", "emptyDir": {}}]
    pods.create(name, container=trainer(name, *words, **env), volumes=volumes, **FAST)


def ends(pods, name):
    status = pods.wait_for_phase(name, "Succeeded", "Failed")
    return status["containerStatuses"][0]["state"]["terminated"]["exitCode"]


def imports_torch(process):
    return "libtorch" in Path(f"/proc/{process}/maps").read_text()


def test_forked_trainers_have_their_own_environment_log_signals_and_exit_code(pods):
    """Two pods at once: each knows its own name, and SIGTERM to one leaves the other alone."""
    for name in ("a", "b"):
        start(pods, name)
    for name in ("a", "b"):
        pods.wait_for_log(name, f"waiting for a plan that names {name}")
        assert not imports_torch(pid_of(pods, name)), "its own process only waits for the fork"
    stays = pid_of(pods, "b")
    leaves = pid_of(pods, "a")
    pods.kubectl("delete", "pod", "a", "--wait=true")
    eventually(lambda: not is_alive(leaves), "its process to be gone")
    assert is_alive(stays)
    assert "told to stop" not in pods.logs("b")
    start(pods, "c", "--nonsense")
    assert ends(pods, "c") == ExitCode.USAGE
    assert "No such option" in pods.logs("c")


def test_a_pod_may_do_without(pods):
    """With the variable set to nothing it imports torch itself."""
    start(pods, "a", **{WARM_START_VARIABLE: ""})
    pods.wait_for_log("a", "waiting for a plan")
    eventually(lambda: imports_torch(pid_of(pods, "a")), "its own import of torch")


async def test_only_trainer_pods_start_the_server(tmp_path):
    """Other programs find no socket in their environment, and nothing is imported for them."""
    warm = WarmStart(tmp_path / "socket", tmp_path / "log")
    for argv in (("sh", "-c", "ballast-train pod"), ("ballast-train", "profile"), ("ballast-train",)):
        assert await warm.variables(argv, {}) == {}
    assert await warm.variables(("ballast-train", "pod"), {WARM_START_VARIABLE: ""}) == {}
    assert not (tmp_path / "log").exists()


async def test_a_server_that_was_killed_is_started_again(tmp_path):
    """The next pod finds a fresh one, at the same place."""
    warm = WarmStart(tmp_path / "socket", tmp_path / "log")
    try:
        given = await warm.variables(("/x/ballast-train", "pod", "--flag"), {})
        assert given == {WARM_START_VARIABLE: str(tmp_path / "socket")}
        first = warm.process_id
        await warm.close()
        assert await warm.variables(("ballast-train", "pod"), {}) == given
        assert warm.process_id != first
    finally:
        await warm.close()


async def test_where_the_server_cannot_listen_pods_start_as_usual(tmp_path, caplog):
    """A socket's path that is too long for the kernel, for one; the log says so, once."""
    warm = WarmStart(tmp_path / ("x" * 100), tmp_path / "log")
    for _ in range(2):
        assert await warm.variables(("ballast-train", "pod"), {}) == {}
    assert [record.message for record in caplog.records if "over 100 bytes. To fix" in record.message] == [
        f"{tmp_path / ('x' * 100)} has over 100 bytes. To fix: a cluster's folder nearer to /"
    ]
