"""A parameter that several stages share learns as the one parameter that it is, wherever layers move."""

from pathlib import Path

import pytest
import torch
from ballast_trainer.errors import CheckpointError
from ballast_trainer.models.registry import load_callable
from ballast_trainer.seeding import host_seeded, seed_build
from safetensors.torch import load_file
from torch.distributed import checkpoint

from tests.support.examples import first_daily
from tests.support.gang import assert_same_curve
from tests.support.held_data import Gates
from tests.support.jobs import small_job
from tests.support.one_process import train_here
from tests.support.plans import local_plan
from tests.support.replans import grow, replan_at_random
from tests.trainer.models import tied_models

MODULE = "tests.trainer.models.tied_models"
TRAINING = {"learningRate": 0.02, "weightDecay": 0.1, "clipNorm": 0.5}


def job(name, steps=8):
    """A model of this folder, its norms clipped."""
    return small_job(f"{MODULE}:{name}", steps=steps, microbatches=4, batch=8, training=TRAINING)


def losses_without_ballast(name, steps=8):
    """The same model as plain modules, one optimizer over all of them, on whole batches."""
    with host_seeded(0):
        model = load_callable("model.name", f"{MODULE}:{name}")()
        layers = []
        for index in range(model.layer_count):
            kept = model.kept_layer(index)
            seed_build(seed=0, layer=index)
            layers.append(model.build_layer(index) if kept is None else kept)
    if name == "stated":
        layers[5].weight = layers[0].weight
    whole = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.02, weight_decay=0.1)
    losses = {}
    for step in range(steps):
        words, targets = tied_models.batch(0, step, 8)
        loss = tied_models.loss(whole(words), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses[step + 1] = float(loss.detach())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("build", tied_models.BUILDERS, ids=lambda build: build.__name__)
def test_one_process_learns_as_plain_modules_do(build):
    """However the parameter comes to be shared: copies on one rank are one parameter, norms count once."""
    assert_same_curve(train_here(job(build.__name__)).losses, losses_without_ballast(build.__name__))


@pytest.mark.processes
def test_three_ranks_learn_as_plain_modules_do(gang):
    """A block may be on all ranks, beside the ends, each of which is on one."""
    running = gang(job("one_block"), ranks=3).succeeded()
    assert_same_curve(running.losses(), losses_without_ballast("one_block"))


def tied_gpt(small_config, **fields):
    config = small_config(**fields)
    config["model"]["args"]["tied"] = True
    return config


def assert_copies_are_equal(folder, config):
    """In every checkpoint of a gpt both layers have the same bits; returns how many there are."""
    keys = ("layers.0.module.token.weight", f"layers.{config['model']['layers'] - 1}.module.out.weight")
    checkpoints = sorted(Path(folder).glob("step-*"))
    for path in checkpoints:
        found = {key: torch.empty(256, config["model"]["args"]["dim"]) for key in keys}
        checkpoint.load(found, checkpoint_id=path, no_dist=True)
        assert torch.equal(*found.values()), path
    return len(checkpoints)


@pytest.mark.processes
@pytest.mark.parametrize("schedule", first_daily(["ZeroBubbleV", "1F1B"]))
def test_copies_stay_equal_wherever_the_layers_move(gang, small_config, same_curve, schedule, tmp_path):
    """Both ends on one rank or on two: the curve of one process, and the same bits in each checkpoint."""
    saved = tmp_path / "saved"
    config = tied_gpt(
        small_config,
        totalSteps=12,
        training={"clipNorm": 0.5, "recompute": True, "weightDecay": 0.1},
        checkpoint={"path": str(saved), "everySteps": 2, "keep": 20},
        evaluation={"everySteps": 3, "batches": 1},
    )
    config["pipeline"]["schedule"] = schedule
    ranks, placement = (3, (0, 1, 2)) if schedule == "1F1B" else (2, (0, 1, 1, 0))
    gates = Gates(tmp_path / "gates", 3, 8)
    held = gates.hold(config)
    held["evaluation"] |= {"data": {"name": "tests.support.held_data:text", "args": {"context": 16}}}
    running = gang(held, ranks=ranks, options=["--channel", str(tmp_path / "channel")])
    replan_at_random(running, tmp_path, gates, seed=7, epochs=4, placement=placement)
    same_curve(running, without_evaluation(config))
    assert running.events("migrate")
    assert assert_copies_are_equal(saved, config) == 6


def without_evaluation(config):
    return {key: value for key, value in config.items() if key != "evaluation"}


@pytest.mark.processes
def test_other_ranks_continue_from_a_checkpoint(gang, small_config, single_process_losses, tmp_path):
    """Three ranks, then two; then exported: both names, equal. A model that is not tied is refused."""
    saved, exported = tmp_path / "saved", tmp_path / "model.safetensors"
    config = tied_gpt(small_config, totalSteps=4, checkpoint={"path": str(saved), "everySteps": 4})
    first = gang(config, ranks=3).succeeded()
    longer = {**config, "totalSteps": 8}
    second = gang({**longer, "export": {"path": str(exported)}}, ranks=2).succeeded()
    reference = single_process_losses(longer)
    assert_same_curve({**first.losses(), **second.losses()}, reference)
    assert assert_copies_are_equal(saved, config) >= 1
    found = load_file(exported)
    assert torch.equal(found["0.token.weight"], found["7.out.weight"])
    longer["model"]["args"].pop("tied")
    named = "'token.weight' of layer 0 and 'out.weight' of layer 7"
    with pytest.raises(CheckpointError, match=f"{named}.*this one has no tied weights. To fix"):
        train_here(longer)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("ranks", "fields"),
    first_daily(
        [
            (4, {"parallelism": {"data": 2}}),
            (4, {"parallelism": {"tensor": 2}}),
            (4, {"pipeline": {"replicas": [2, 1, 1]}}),
            (3, {"pipeline": {"replicas": [1, 2]}}),
        ],
        2,
    ),
    ids=["data", "tensor", "replicas of the owner", "replicas of the copy"],
)
def test_replicas_and_parts_of_a_stage_keep_the_tie(gang, small_config, same_curve, ranks, fields):
    """Every rank of a column and every replica has the same sum."""
    config = tied_gpt(small_config, totalSteps=5, training={"clipNorm": 0.5})
    config["pipeline"] |= fields.get("pipeline", {})
    plain = {**config, "pipeline": {k: v for k, v in config["pipeline"].items() if k != "replicas"}}
    config |= {key: value for key, value in fields.items() if key != "pipeline"}
    same_curve(gang(config, ranks=ranks), plain)


@pytest.mark.processes
@pytest.mark.parametrize("model", first_daily(["functions", "gpt"]))
def test_a_job_that_grows_and_shrinks_keeps_the_tie(pods, small_config, same_curve, model, tmp_path):
    """A pod joins and takes the head, which it has been told is tied; then the first two remain.

    Of functions it builds no embedding, of which the head is made.
    """
    config = tied_gpt(small_config, totalSteps=14)
    if model == "functions":
        config["model"] = {"name": f"{MODULE}:by_cache"}
        config["data"] = {"name": f"{MODULE}:batches", "args": {}}
    gates = Gates(tmp_path / "gates", 4, 8)
    folder = tmp_path / "channel"
    held = gates.hold(config) if model == "gpt" else gates.hold_own(config)
    names = ["job-1-0", "job-1-1", "job-1-2"]
    channel = pods.start_job(folder, held, local_plan(names[:2], network=61))
    pods.wait_for_step(3, names[0])
    grow(pods, folder, local_plan(names, epoch=2, network=61))
    gates.open()
    pods.wait_for_step(7, names[0])
    channel.publish(channel.read_plan().keep(tuple(names[:2]), "another job waits"))
    pods.wait_for_plan(3, names[0])
    gates.open()
    same_curve(pods, config, names[0])
    sizes = [
        (e["ranks_before"], e["ranks_after"]) for k in ("grow", "repack") for e in pods.events(k, names[0])
    ]
    assert sizes == [(2, 3), (3, 2)]
