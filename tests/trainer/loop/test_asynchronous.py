"""Schedules without a flush, on real ranks: they learn by their recurrences, and drain where they must."""

import itertools
import json
import signal

import pytest
from ballast_policies.contract import Stage
from ballast_policies.planning.partition import even_partition
from ballast_policies.planning.schedules.builders.asynchronous import pipedream
from ballast_policies.planning.schedules.validate import weight_versions
from ballast_trainer.channel.base import DirectoryChannel

from tests.support.examples import first_daily
from tests.support.plans import local_plan
from tests.support.waiting import eventually
from tests.trainer.loop.recurrence import (
    LAYERS,
    Recurrence,
    assert_equal_to,
)

pytestmark = pytest.mark.processes


@pytest.fixture
def flowing(small_config):
    """Makes a configuration of a schedule without a flush."""

    def make(schedule, *, optimizer="torch.optim:SGD", rate=0.1, **fields):
        fields.setdefault("totalSteps", 6)
        config = small_config(**fields)
        config["pipeline"]["schedule"] = schedule
        config["training"] = {"optimizer": optimizer, "learningRate": rate}
        return config

    return make


def even(stages):
    return even_partition(LAYERS, stages).bounds


@pytest.mark.parametrize(
    ("n", "optimizer", "rate"), first_daily([(4, "adamw", 1e-3), (2, "torch.optim:SGD", 0.1)])
)
def test_stage_s_of_n_learns_with_weights_n_minus_s_updates_late(gang, flowing, tmp_path, n, optimizer, rate):
    """PipeDream: W(t+1) = W(t) - v grad f(W_1(t-n+1), ..., W_n(t)), parameters equal to 1e-6."""
    config = flowing("PipeDream", optimizer=optimizer, rate=rate, checkpoint={"path": str(tmp_path / "c")})
    late = Recurrence(config, even(n), version=lambda s, k: max(0, k - (n - 1 - s)), update_every=[1] * n)
    running = assert_equal_to(late, gang, config, n)
    (drain,) = running.events("drain")
    assert drain["versions_held"] == [n - s for s in range(n)]
    assert drain["in_flight"] == [n - s for s in range(n)]


@pytest.mark.parametrize("n", [3])
def test_vertical_sync_learns_with_all_weights_n_minus_1_updates_late(gang, flowing, tmp_path, n):
    """W(t+1) = W(t) - v grad f(W(t-n+1)), parameters equal to 1e-6."""
    config = flowing("PipeDreamVerticalSync", checkpoint={"path": str(tmp_path / "c")})
    late = Recurrence(config, even(n), version=lambda s, k: max(0, k - n + 1), update_every=[1] * n)
    running = assert_equal_to(late, gang, config, n)
    (drain,) = running.events("drain")
    assert drain["versions_held"] == [n] * n


@pytest.mark.parametrize(
    ("n", "optimizer", "rate"), first_daily([(2, "adamw", 1e-3), (4, "torch.optim:SGD", 0.3)])
)
def test_2bw_learns_with_weights_one_update_late(gang, flowing, tmp_path, n, optimizer, rate):
    """W(t+1) = W(t) - v grad f(W(t-1)); microbatch k uses version max(floor((k-1)/m) - 1, 0), k from 1."""
    config = flowing("PipeDream2BW", optimizer=optimizer, rate=rate, checkpoint={"path": str(tmp_path / "c")})
    m = config["pipeline"]["microbatches"]
    late = Recurrence(config, even(n), version=lambda s, k: max(k // m - 1, 0), update_every=[m] * n)
    running = assert_equal_to(late, gang, config, n)
    (drain,) = running.events("drain")
    assert drain["versions_held"] == [2] * n


def test_replicas_of_a_stage_average_their_gradients_at_each_update(gang, flowing, tmp_path):
    """PipeDream 2-1: the first stage learns from two microbatches at a time, by the schedule's versions."""
    config = flowing("PipeDream", checkpoint={"path": str(tmp_path / "c")})
    config["pipeline"]["replicas"] = [2, 1]
    versions = weight_versions(pipedream([2, 1], 4 * config["totalSteps"]))
    assert [versions[0, k] for k in range(8)] == [0, 0, 0, 0, 1, 1, 2, 2]
    late = Recurrence(config, (0, 6, 8), version=lambda s, k: versions[s, k], update_every=[2, 1])
    assert_equal_to(late, gang, config, 3)


@pytest.mark.parametrize(("schedule", "optimizer", "rate"), [("PipeDream", "torch.optim:SGD", 0.1)])
def test_parallel_pipelines_average_their_gradients_at_each_update(
    gang, flowing, tmp_path, schedule, optimizer, rate
):
    """Weight stashing over two pipelines of two stages: update k is of both pipelines' microbatch k."""
    config = flowing(schedule, optimizer=optimizer, rate=rate, checkpoint={"path": str(tmp_path / "c")})
    config["parallelism"] = {"data": 2}
    late = Recurrence(
        config,
        even(2),
        version=lambda s, k: max(0, k // 2 - (1 - s)),
        update_every=[2, 2],
        pipelines=2,
    )
    running = assert_equal_to(late, gang, config, 4)
    (drain,) = running.events("drain")
    assert drain["versions_held"] == [2, 1]


def test_2bw_over_parallel_pipelines_learns_with_weights_one_update_late(gang, flowing, tmp_path):
    """W(t+1) = W(t) - v grad f(W(t-1)) (2BW, section 3.2), the gradient of all pipelines' microbatches."""
    config = flowing("PipeDream2BW", checkpoint={"path": str(tmp_path / "c")})
    config["pipeline"] |= {"microbatches": 8, "globalBatchSize": 16}
    config["parallelism"] = {"data": 2}
    late = Recurrence(
        config, even(2), version=lambda s, k: max(k // 8 - 1, 0), update_every=[8, 8], pipelines=2
    )
    running = assert_equal_to(late, gang, config, 4)
    (drain,) = running.events("drain")
    assert drain["versions_held"] == [2, 2]


def losses_alone(gang, config):
    running = gang(config, ranks=1, options=["--single-process"])
    assert running.exit_codes() == {"rank-0": 0}, running.errors()
    return running.losses()


FREEZING = {"kind": "freezing", "startStep": 4, "endStep": 12, "everySteps": 4, "target": 0.5}
PRUNING = {"kind": "pruning", "startStep": 4, "endStep": 12, "everySteps": 4, "target": 0.9}


@pytest.mark.parametrize("dynamic", first_daily([FREEZING, PRUNING]), ids=["freezing", "pruning"])
def test_2bw_learns_the_same_however_layers_move_and_change(gang, pods, flowing, tmp_path, dynamic):
    """Three ranks whose layers change and move learn as one process does: all drain at the same steps."""
    config = flowing(
        "PipeDream2BW",
        optimizer="adamw",
        rate=1e-3,
        totalSteps=24,
        dynamics=[dynamic],
        rebalance={"enabled": True, "everySteps": 6, "minGain": 0.0},
    )
    folder = tmp_path / "channel"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    names = ["job-1-0", "job-1-1", "job-1-2"]
    network = 31 if dynamic is FREEZING else 32
    plan = local_plan(names, network=network).replace(stages=stages_at((0, 1, 2, 8)))
    DirectoryChannel(folder).publish(plan)
    for name in names:
        pods.start_pod(name, folder)
    wanted = losses_alone(gang, config)
    assert set(pods.exit_codes().values()) == {0}, pods.errors()
    assert pods.events("migrate", "job-1-0")
    assert [drain["step"] for drain in pods.events("drain", "job-1-0")] == [4, 6, 8, 12, 18, 24]
    got = pods.losses("job-1-0")
    assert sorted(got) == sorted(wanted) == list(range(1, 25))
    assert max(abs(got[step] - wanted[step]) for step in wanted) < 1e-5


def stages_at(bounds):
    return tuple(
        Stage(rank=rank, first_layer=first, end_layer=end)
        for rank, (first, end) in enumerate(itertools.pairwise(bounds))
    )


def test_a_new_plan_drains_the_pipeline_and_moves_layers(gang, flowing, tmp_path):
    """A partition that comes while steps overlap is in force some steps later, and training continues."""
    config = flowing("PipeDream", totalSteps=100_000)
    folder = tmp_path / "channel"
    channel = DirectoryChannel(folder)
    running = gang(config, ranks=2, options=["--channel", str(folder)])
    running.wait_for_step(3)
    channel.publish(channel.read_plan().replace(epoch=2, stages=stages_at((0, 2, 8))))
    eventually(lambda: running.events("migrate"), "layers move", running.errors)
    (moved,) = running.events("migrate")
    running.wait_for_step(moved["step"] + 3)
    running.signal("rank-0", signal.SIGTERM)
    assert set(running.exit_codes().values()) == {75}, running.errors()
    assert moved["layers"] == [2, 3]
    assert moved["step"] in [drain["step"] for drain in running.events("drain")]
    assert sorted(running.losses()) == list(range(1, max(running.losses()) + 1))


def test_a_stopped_job_drains_saves_and_resumes_from_there(gang, flowing, tmp_path):
    """SIGTERM while steps flow: both ranks save after the same step; the next run starts there."""
    config = flowing(
        "PipeDream2BW", totalSteps=100_000, checkpoint={"path": str(tmp_path / "c"), "everySteps": 100_000}
    )
    running = gang(config, ranks=2)
    running.wait_for_step(5)
    running.signal("rank-1", signal.SIGTERM)
    assert set(running.exit_codes().values()) == {75}, running.errors()
    (saved,) = running.events("checkpoint")
    assert saved["step"] == max(running.losses())
    again = gang({**config, "totalSteps": saved["step"] + 4}, ranks=3)
    assert set(again.exit_codes().values()) == {0}, again.errors()
    assert sorted(again.losses()) == list(range(saved["step"] + 1, saved["step"] + 5))


@pytest.mark.parametrize("schedule", first_daily(["PipeDream2BW", "PipeDream"]))
def test_a_job_resumed_from_a_checkpoint_learns_as_if_it_had_never_stopped(gang, flowing, tmp_path, schedule):
    """The pipeline drains at every checkpoint, so a run cut there and a whole one are the same."""
    saved = {"path": str(tmp_path / "whole"), "everySteps": 4}
    whole = gang(flowing(schedule, totalSteps=8, checkpoint=saved), ranks=2)
    cut = {"path": str(tmp_path / "cut"), "everySteps": 4}
    first = gang(flowing(schedule, totalSteps=4, checkpoint=cut), ranks=2)
    assert set(first.exit_codes().values()) == {0}, first.errors()
    second = gang(flowing(schedule, totalSteps=8, checkpoint=cut), ranks=2)
    assert set(second.exit_codes().values()) == {0}, second.errors()
    assert set(whole.exit_codes().values()) == {0}, whole.errors()
    assert {**first.losses(), **second.losses()} == whole.losses()


def test_ranks_leave_a_pipeline_without_a_flush(gang, flowing):
    """Freezing makes layers cheap, two or more of four ranks are released, and all steps are trained."""
    config = flowing(
        "PipeDream2BW",
        totalSteps=100_000,
        dynamics=[FREEZING],
        repack={"enabled": True, "minStages": 2, "everySteps": 10, "maxSlowdown": 5.0},
    )
    running = gang(config, ranks=4)
    eventually(lambda: running.events("repack"), "ranks leave", running.errors)
    repacked = running.events("repack")[0]
    running.wait_for_step(repacked["step"] + 3)
    running.signal("rank-0", signal.SIGTERM)
    assert set(running.exit_codes().values()) == {0, 75}, running.errors()
    assert repacked["ranks_after"] < 4
    held = running.events("drain")[-1]["versions_held"]
    assert held == [2] * running.events("repack")[-1]["ranks_after"]
    assert sorted(running.losses()) == list(range(1, max(running.losses()) + 1))


def test_a_rank_that_dies_while_steps_flow_ends_the_others(gang, flowing):
    """They wait for its messages or for its part of a sum: either says that it is gone."""
    running = gang(flowing("PipeDream", totalSteps=100_000), ranks=3)
    running.wait_for_step(4)
    running.signal("rank-1", signal.SIGKILL)
    codes = running.exit_codes()
    assert (codes["rank-0"], codes["rank-2"]) == (76, 76), running.errors()
