"""Layers hand on tuples, dicts and dataclasses of tensors, and the curve is that of one process."""

import dataclasses
import pickle

import pytest
import torch
from ballast_trainer.layers.boundaries import Boundary, wire
from ballast_trainer.seeding import host_seeded
from ballast_trainer.trees import flatten, mapped, tensors_of, unflatten
from safetensors.torch import load_file

from tests.support.examples import first_daily
from tests.support.gang import assert_same_curve
from tests.support.held_data import Gates
from tests.support.jobs import small_job
from tests.support.one_process import train_here
from tests.support.replans import replan, stages_at
from tests.trainer.models import tree_models

MODULE = "tests.trainer.models.tree_models"


def job(name, steps=8, **fields):
    training = {"learningRate": 0.02, "clipNorm": 0.5}
    return small_job(f"{MODULE}:{name}", steps=steps, microbatches=4, batch=8, training=training, **fields)


def losses_of_plain_modules(name, steps=8):
    """Losses by step without Ballast, without dropout: the layers in a loop, by microbatches."""
    with host_seeded(0):
        model = getattr(tree_models, name)()
    layers = [model.kept_layer(index) for index in range(model.layer_count)]
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    optimizer, losses = torch.optim.AdamW(parameters, lr=0.02), {}
    for step in range(steps):
        inputs, targets = model.batch(0, step, 8)
        total = 0.0
        for source, target in zip(inputs.chunk(4), targets.chunk(4), strict=True):
            loss = model.loss(torch.nn.Sequential(*layers)(source), target) / 4
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses[step + 1] = total
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(("name", "recompute"), [("unet", False), ("unet", True), ("clipped", False)])
def test_one_process_learns_as_plain_modules_do(tmp_path, name, recompute):
    """Skips, gradients that meet in one tensor, or that hooks clip; with repeated forwards, and a stop."""
    config = job(name, checkpoint={"path": str(tmp_path / "saved")})
    config["training"] |= {"recompute": recompute, "weightDecay": 0.01}
    begun, ended = train_here(config, stop_after=5), train_here(config)
    assert_same_curve(begun.losses | ended.losses, losses_of_plain_modules(name))


@pytest.mark.processes
@pytest.mark.parametrize("schedule", first_daily(["1F1B", "ZeroBubbleH1"]))
def test_hooks_see_the_gradients_of_one_process(gang, schedule):
    """Not those of a microbatch's loss alone, on whatever replica and stage."""
    config = job("clipped", parallelism={"data": 2})
    config["training"]["weightDecay"] = 0.01
    config["pipeline"]["schedule"] = schedule
    running = gang(config, ranks=4).succeeded()
    assert_same_curve(running.losses(), losses_of_plain_modules("clipped"))


def test_sizes_are_kept_of_sequences_of_any_length_and_tokens_are_not():
    """What all ranks hear of all layers stays small."""
    lengths = torch.tensor([300_000, 7, 7])
    sizes = (torch.arange(300_000)[:, None] < lengths).sum(1)
    tokens = torch.arange(100_000)
    sent = Boundary.of((sizes, tokens, sizes[:0]), examples=True)
    assert len(pickle.dumps(sent)) < 10_000
    kept, zeros, none = pickle.loads(pickle.dumps(sent)).example(torch.device("cpu"))
    assert torch.equal(kept, sizes)
    assert zeros.shape == tokens.shape
    assert none.shape == (0,)


def losses_of_a_loss_that_learns(steps=8):
    """As above, with torch alone; and what the loss has learnt."""
    with host_seeded(0):
        layers, loss = tree_models.weighted_parts()
    whole = torch.nn.Sequential(*layers)
    parameters = [*whole.parameters(), *loss.parameters()]
    optimizer, losses = torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.01), {}
    for step in range(steps):
        inputs, targets = tree_models.numbers(0, step, 8)
        found = [
            loss(whole(source), target) / 4
            for source, target in zip(inputs.chunk(4), targets.chunk(4), strict=True)
        ]
        sum(found).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses[step + 1] = sum(one.item() for one in found)
    return losses, loss.logs.detach(), layers[-1].weight.detach()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", first_daily(["fp32", "bf16"]))
def test_a_loss_may_have_parameters(tmp_path, dtype):
    """They learn with the last layer, are evaluated with, and are exported by their names and the layer's."""
    exported = {"path": str(tmp_path / "model.safetensors")}
    config = job("weighted", evaluation={"everySteps": 4, "batches": 1}, export=exported)
    config["checkpoint"] = {"path": str(tmp_path / "saved")}
    config["training"] |= {"weightDecay": 0.01, "dtype": dtype, "precision": dtype}
    told, (losses, logs, weight) = train_here(config), losses_of_a_loss_that_learns()
    within = 1e-5 if dtype == "fp32" else 0.1
    assert_same_curve(told.losses, losses, within=within)
    assert all("largest" in event["metrics"] for event in told.events if event["event"] == "evaluation")
    saved = load_file(tmp_path / "model.safetensors")
    assert (logs - torch.tensor([0.5, -0.5])).abs().min() > 0.05
    torch.testing.assert_close(saved["loss.logs"].float(), logs, rtol=0, atol=within)
    torch.testing.assert_close(saved["5.weight"].float(), weight, rtol=0, atol=within)
    assert len(saved) == 13


@pytest.mark.processes
@pytest.mark.parametrize(
    ("functions", "stage"), first_daily([(False, 3), (True, 0), (False, 0), (False, 1), (True, 2)])
)
def test_a_loss_with_parameters_learns_on_replicas_of_two_stages(gang, functions, stage):
    """Its gradients are those of all microbatches, with weights that are shared, too."""
    config = job("weighted", parallelism={"data": 2, "zeroStage": stage})
    config["training"]["weightDecay"] = 0.01
    config["model"]["args"] = {"functions": functions}
    running = gang(config, ranks=4).succeeded()
    # A function makes its layer from other random numbers.
    alone = train_here({**config, "parallelism": {}}).losses
    assert_same_curve(running.losses(), alone if functions else losses_of_a_loss_that_learns()[0])


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "recompute"),
    first_daily(
        [
            ("packed", True),
            ("weighted", True),
            ("clipped", True),
            *(("masked", recompute) for recompute in (False, True)),
            *((name, False) for name in ("unet", "packed")),
        ],
        2,
    ),
)
def test_layers_move_and_a_rank_leaves_as_in_one_process(gang, tmp_path, name, recompute):
    """Masks, positions and documents travel beside hidden states through moves, repack and evaluations."""
    data = {"name": f"{MODULE}:data_of", "args": {"name": name}}
    config = job(name, steps=12, data=data, evaluation={"everySteps": 4, "batches": 1, "data": data})
    config["training"]["recompute"] = recompute
    gates = Gates(tmp_path / "gates", 3, 7)
    held = gates.hold_own(config)
    running = gang(held, ranks=3, options=["--channel", str(tmp_path / "channel")])
    layers = getattr(tree_models, name)().layer_count
    moved = stages_at((0, layers - 2, layers - 1, layers), range(3))
    replan(running, tmp_path, gates, lambda plan: plan.replace(epoch=2, stages=moved))
    replan(running, tmp_path, gates, lambda plan: plan.keep(plan.pods[:2], "another job waits"))
    running.succeeded()
    assert running.events("migrate")
    plain = train_here(held)
    assert_same_curve(running.losses(), plain.losses)
    found = {event["step"]: event["validation_loss"] for event in running.events("evaluation")}
    assert found == pytest.approx(plain.evaluations(), abs=1e-5)
    assert sorted(found) == [4, 8, 12]


def test_a_tree_comes_back_as_it_was_taken_apart():
    """Containers, their order and classes, and constants."""
    tree = tree_models.packed().kept_layer(0)(torch.ones(2, 4, dtype=torch.int64))
    tensors, structure = flatten((tree, [None, {"b": 1, "a": torch.ones(2)}], "text"))
    again, (nothing, named), text = unflatten(structure, iter(tensors))
    assert (type(again), again.shape, again.cache, text, nothing) == (
        tree_models.Carried,
        tree_models.Shape(2, "pairs"),
        None,
        "text",
        None,
    )
    assert list(named) == ["b", "a"]
    assert again.hidden is tree.hidden
    assert mapped(torch.neg, tree).rates["first"] == -1
    assert len(tensors_of(tree)) == 4


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((torch.ones(2), 1), (torch.ones(2), True)),
        ((torch.ones(2), 1), (torch.ones(2), 1.0)),
        ((torch.ones(2), 1), [torch.ones(2), 1]),
        ((torch.ones(2), None), (torch.ones(2),)),
        ({"a": torch.ones(2)}, {"b": torch.ones(2)}),
        ((torch.ones(2), 1), (torch.ones(3), 1)),
    ],
)
def test_a_message_of_another_form_is_told_from_the_one_agreed(one, other):
    """The next rank would make something else of it."""
    boundary = Boundary.of(one)
    assert boundary.takes(*flatten(one))
    assert boundary == Boundary.of(mapped(torch.zeros_like, one))
    assert not boundary.takes(*flatten(other))


def test_what_another_rank_could_not_make_is_refused():
    """Classes that only this process knows, objects that are no constants, trees without tensors."""

    @dataclasses.dataclass
    class Local:
        hidden: torch.Tensor

    with pytest.raises(TypeError, match=r"^Local cannot go to another rank: .* To fix: define the classes"):
        Boundary.of(Local(torch.ones(2)))
    with pytest.raises(TypeError, match=r"^a Linear beside tensors$"):
        flatten((torch.ones(2), torch.nn.Linear(2, 2)))
    with pytest.raises(TypeError, match=r"^dict without a tensor$"):
        flatten({"a": None})


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64, torch.uint16, torch.bfloat16, torch.float64])
def test_tensors_of_every_type_travel_as_their_bits(dtype):
    """Types that a backend does not know are sent as bytes."""
    sent = torch.tensor([[1, 0], [3, 1]]).to(dtype)
    into = torch.zeros_like(sent)
    wire(into).copy_(wire(sent))
    assert torch.equal(into, sent)
