"""The demo as `ballast demo` plays it: allocation, rebalance, repack, the waiting job on freed GPUs."""

import itertools
import os
import signal
import subprocess
import sys

import pytest
from ballast_localcluster.supervision.processes import marked_processes
from ballast_operator.demo.report import summarise
from ballast_operator.demo.run import run_demo

from tests.e2e.test_real_kubelets import needed
from tests.support.examples import first_daily
from tests.support.waiting import WAIT_SECONDS, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.parametrize("number", first_daily([signal.SIGTERM, signal.SIGKILL, signal.SIGHUP]))
def test_a_demo_that_is_ended_leaves_no_process_and_no_files(number, tmp_path):
    """Its operator ends, too; killed, it leaves logs."""
    command = [sys.executable, "-m", "ballast_operator.cli", "demo"]
    own = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=own, stderr=subprocess.PIPE, text=True) as demo:
        assert any("kubectl apply" in line for line in demo.stderr), "no job was made"
        demo.send_signal(number)
        assert demo.wait(WAIT_SECONDS) == (128 + number if number != signal.SIGKILL else -number)
        eventually(lambda: not marked_processes(f"TMPDIR={tmp_path}"), "every process to end")
    assert not list(tmp_path.glob("ballast-cluster-*" if number == signal.SIGKILL else "*"))


REAL = pytest.param(
    True, id="real nodes", marks=[pytest.mark.nightly, pytest.mark.timeout(20 * WAIT_SECONDS)]
)


@pytest.fixture(scope="module", params=[pytest.param(False, id="process nodes"), REAL])
def played(request):
    if request.param:
        needed()
    recorder = run_demo(
        real_nodes=request.param,
        time_limit_seconds=(4 if request.param else 2) * WAIT_SECONDS,
        announce=lambda text: None,
        on_change=lambda recorder: None,
    )
    return recorder.story, summarise(recorder.story)


def test_every_job_trains_to_its_end_and_learns(played):
    """All succeed without a restart, and each loss falls."""
    _, summary = played
    assert set(summary["jobs"]) == {"transformer", "recommender", "recurrent"}
    for job in summary["jobs"].values():
        assert job["state"] == "Succeeded"
        assert job["restarts"] == 0
        assert job["loss_last"] < job["loss_first"] - 1.0


def test_each_model_runs_on_the_gpu_type_that_suits_it(played):
    """The recommender is fastest on P100s, although V100s were handed out first to another."""
    _, summary = played
    assert summary["jobs"]["transformer"]["gpuType"] == "v100"
    assert summary["jobs"]["recommender"]["gpuType"] == "p100"
    assert summary["jobs"]["recurrent"]["gpuType"] == "v100"


def test_the_transformer_repacks_onto_the_same_pods_with_the_same_uids(played):
    """Survivors keep name, UID and process; exactly the named others are deleted."""
    story, summary = played
    assert summary["repacks"]
    launched = {pod.name for pod in story.pods_of("transformer")}
    assert len(launched) == 4
    gone = set(itertools.chain.from_iterable(repack["released_pods"] for repack in summary["repacks"]))
    last = summary["repacks"][-1]
    assert gone | set(last["survivors"]) == launched
    assert not gone & set(last["survivors"])
    for repack in summary["repacks"]:
        assert repack["survivor_uids_unchanged"]
        assert repack["pause_ms"] > 0
    by_name = {pod.name: pod for pod in story.pods_of("transformer")}
    finished = next(at for at, state in story.job_states["transformer"] if state == "Succeeded")
    for name in gone:
        assert by_name[name].deleted is not None
        assert by_name[name].deleted < finished


def test_layers_move_while_training_and_the_load_is_measured_before_and_after(played):
    """That a move evens out the load is tested with known costs: here it is measured beside other work."""
    _, summary = played
    assert summary["rebalances"]
    for entry in summary["rebalances"]:
        assert entry["pause_ms"] > 0
        assert entry["imbalance_before"] > 0
        assert entry["imbalance_after"] >= 0


def test_the_waiting_job_starts_on_the_freed_gpus_after_they_are_free(played):
    """It has no pod before the released ones are gone, and trains on the nodes they left."""
    story, summary = played
    assert summary["waiting_job_started_after_repack_s"] is not None
    released = {name for repack in summary["repacks"] for name in repack["released_pods"]}
    freed = [pod for pod in story.pods_of("transformer") if pod.name in released]
    waited = story.pods_of("recurrent")
    assert min(pod.created for pod in waited) >= sorted(p.deleted for p in freed)[len(waited) - 1]
    assert {pod.node for pod in waited} <= {pod.node for pod in freed}


def test_never_more_gpus_are_handed_out_than_exist(played):
    """At every pod event of the API server, on every node."""
    _, summary = played
    assert summary["max_gpus_in_use_over_capacity"] <= 0


def test_the_allocation_beats_the_heterogeneity_agnostic_one(played):
    """The least-served job is better off, each by its own normalised throughput."""
    _, summary = played
    aware, agnostic = summary["allocation"], summary["type_blind_allocation"]
    assert min(aware["normalised"].values()) > min(agnostic["normalised"].values()) * 1.2
