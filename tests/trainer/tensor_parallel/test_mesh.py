"""Tensor, pipeline and data axes on one mesh: the loss curve is that of one process."""

import functools

import pytest
import torch
from ballast_policies.contract.plan import Directive
from ballast_trainer.channel.base import DirectoryChannel
from ballast_trainer.distributed.mesh import Mesh, Place
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.launch import ValidatedJob
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import first_daily
from tests.support.gang import assert_same_curve
from tests.support.held_data import Gates
from tests.support.one_process import train_here
from tests.support.replans import has_acked, replan, stages_at, until
from tests.trainer.tensor_parallel.ranks import DIM, on_ranks, pipelined_step

MESHES = {
    "pipeline 2 x tensor 2": (4, {"tensor": 2}),
    "tensor 2": (2, {"tensor": 2}),
    "tensor 4": (4, {"tensor": 4}),
    "data 2 x tensor 2": (4, {"tensor": 2, "data": 2}),
    "pipeline 2 x data 2": (4, {"data": 2}),
    "data 2 x tensor 2, ZeRO-3": (4, {"tensor": 2, "data": 2, "zeroStage": 3}),
}


def with_heads(config, heads=4):
    config["model"]["args"]["heads"] = heads
    return config


@pytest.mark.processes
@pytest.mark.parametrize("mesh", first_daily(MESHES))
def test_a_mesh_learns_as_one_process_does(gang, small_config, same_curve, mesh):
    """Any mesh gives the losses of one process to 1e-5, with dropout, clipping and frozen layers."""
    ranks, parallelism = MESHES[mesh]
    freezing = {"kind": "freezing", "startStep": 2, "endStep": 6, "everySteps": 2, "target": 0.5}
    config = with_heads(small_config(totalSteps=10, dynamics=[freezing]))
    same_curve(gang({**config, "parallelism": parallelism}, ranks=ranks), config)


@pytest.mark.processes
@pytest.mark.parametrize(
    "column", first_daily([{"data": 2, "zeroStage": 3}, {"tensor": 2}, {"data": 2}]), ids=str
)
def test_layers_move_and_ranks_leave_by_whole_columns(gang, small_config, same_curve, tmp_path, column):
    """A rebalance moves the same layers in every column; a shrink keeps or releases a position's two ranks.

    A plan that tears a position's ranks apart is not followed, and training continues.
    """
    config = with_heads(small_config(totalSteps=16))
    gates = Gates(tmp_path / "gates", 3, 7, 11)
    held = gates.hold({**config, "parallelism": {**column, "gpusPerPod": 1}})
    running = gang(held, ranks=4, options=["--channel", str(tmp_path / "channel")])
    moved = stages_at((0, 6, 8), range(2))
    replan(running, tmp_path, gates, lambda plan: plan.replace(epoch=2, stages=moved))
    until(running, functools.partial(has_acked, tmp_path, 2))

    def shrunk(plan, epoch, kept):
        ranks = tuple(plan.ranks[old].replace(rank=new) for new, old in enumerate(kept))
        return plan.replace(epoch=epoch, directive=Directive.SHRINK, ranks=ranks, stages=())

    whole = DirectoryChannel(tmp_path / "channel").read_plan()
    replan(running, tmp_path, gates, lambda plan: shrunk(plan, 3, (0, 2)))
    until(running, lambda: "position 0 together" in running.errors())
    replan(running, tmp_path, gates, lambda _: shrunk(whole, 4, (0, 1)))
    same_curve(running, config)
    (repacked,) = running.events("repack")
    assert repacked["released"] == ["rank-2", "rank-3"]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_world_ranks_are_laid_out_pipeline_then_data_then_tensor(tensor, data, positions):
    """World rank = (position x data + d) x tensor + t; the lines along each axis partition the ranks."""
    mesh = Mesh(tensor=tensor, data=data)
    ranks = positions * data * tensor
    for rank in range(ranks):
        place = mesh.place(rank)
        assert (place.position * data + place.data) * tensor + place.tensor == rank
    for axis, size in (("position", positions), ("data", data), ("tensor", tensor)):
        lines = mesh.lines(axis, ranks)
        assert sorted(rank for line in lines for rank in line) == list(range(ranks))
        assert {len(line) for line in lines} == {size}
    assert mesh.positions(ranks) == positions
    assert mesh.place(0) == Place(position=0, data=0, tensor=0)


def test_ranks_that_do_not_fill_the_mesh_are_refused(small_config):
    """Three ranks for tensor 2 name the field and what to start."""
    job = ValidatedJob.from_mapping(with_heads({**small_config(), "parallelism": {"tensor": 2}}))
    with pytest.raises(ConfigurationError, match=r"parallelism.*no multiple.*start 2, 4"):
        job.check_ranks(3)


def test_replicas_with_fewer_microbatches_than_stages_are_refused(small_config):
    """Torch would refuse them after the ranks have met, without naming the field."""
    job = ValidatedJob.from_mapping({**small_config(), "parallelism": {"data": 2}})
    job.check_ranks(4)
    with pytest.raises(
        ConfigurationError, match=r"pipeline\.microbatches: 1F1B: 2 micro.*its 3 ranks.*fewer ranks"
    ):
        job.check_ranks(6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"parallelism": {"tensor": 3}}, "4 heads do not divide over 3"),
        ({"parallelism": {"tensor": 2}, "model": {"name": "recurrent", "layers": 4}}, "can be cut"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_with_the_reason(small_config, change, words):
    """Before any rank starts, with the field and what to change."""
    with pytest.raises(ConfigurationError, match=words):
        ValidatedJob.from_mapping({**with_heads(small_config()), **change})


@pytest.mark.processes
def test_a_checkpoint_of_one_mesh_continues_on_another(gang, small_config, single_process_losses, tmp_path):
    """Saved by tensor 2 x data 2, continued by pipeline 2 x tensor 2, then by one process: the same curve.

    In between replicas share optimizer state and weights (ZeRO-3), state alone, or gradients, too (ZeRO-2).

    Each part is written once: four ranks' checkpoint is about as large as one process's.
    """
    config = with_heads(small_config(totalSteps=9))
    expected = single_process_losses(config)
    # Each run saves its last step.
    config["checkpoint"] = {"path": str(tmp_path / "saved"), "everySteps": 9, "keep": 9}
    losses = {}
    for steps, ranks, parallelism in (
        (3, 4, {"tensor": 2, "data": 2}),
        (5, 4, {"tensor": 2, "data": 2, "zeroStage": 3}),
        (6, 2, {"data": 2, "zeroStage": 1}),
        (7, 2, {"data": 2, "zeroStage": 2}),
        (8, 4, {"tensor": 2}),
    ):
        running = gang({**config, "totalSteps": steps, "parallelism": parallelism}, ranks=ranks).succeeded()
        losses |= running.losses()
    assert_same_curve(losses | train_here(config).losses, expected)
    sizes = {
        step: sum(file.stat().st_size for file in (tmp_path / f"saved/step-{step:08d}").glob("*.distcp"))
        for step in (3, 6, 9)
    }
    # Each tensor has a kilobyte of its own beside its numbers.
    assert sizes[3] < 1.25 * sizes[9]
    assert sizes[6] < 1.6 * sizes[9], "shares are tensors of their own"


@pytest.mark.processes
def test_scatter_gather_sends_bsh_over_t_between_stages():
    """Each tensor rank sends b s h / t numbers a microbatch, each way; all tensors stay identical.

    Without it each of the t = 2 ranks sends all of b s h (Narayanan, section 4.4.1).
    """
    whole = on_ranks(pipelined_step, 4, False, mesh=Mesh(tensor=2))
    parts = on_ranks(pipelined_step, 4, True, mesh=Mesh(tensor=2))
    microbatches, b, s, t = 2, 2, 6, 2
    for rank in range(4):
        assert whole[rank]["sent"] == [4 * b * s * DIM] * microbatches
        assert parts[rank]["sent"] == [4 * b * s * DIM // t] * microbatches
        assert whole[rank]["gathered"] == 0
        assert parts[rank]["gathered"] == 4 * b * s * DIM // t * microbatches
        assert parts[rank]["loss"] == whole[rank]["loss"]
        for name, gradient in whole[rank]["gradients"].items():
            assert torch.equal(parts[rank]["gradients"][name], gradient), name
