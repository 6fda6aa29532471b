"""What travels between ranks when layers move, and when links are measured; none of it is lost."""

import functools
import shutil

import pytest
import torch
import torch.distributed as dist
from ballast_policies.contract.job.model import ModelConfig
from ballast_policies.planning.partition import Partition
from ballast_policies.planning.stages import stages_over
from ballast_trainer.distributed.mesh import Mesh
from ballast_trainer.layers.packing import pack
from ballast_trainer.loop.migrate import migrate, plan_moves
from ballast_trainer.models.registry import build_model
from ballast_trainer.profiling.rank_speeds import TRIALS, link_seconds

from tests.support.examples import first_daily
from tests.support.gang import assert_same_curve
from tests.support.held_data import EVALUATED, Gates
from tests.support.replans import has_acked, replan, stages_at, until
from tests.trainer.tensor_parallel.ranks import held_layers, on_ranks

pytestmark = pytest.mark.processes

MODEL = ModelConfig(name="gpt", args={"layers": 8, "dim": 32, "heads": 2, "context": 8})
AGREEING = 64
"""Bytes that a rank may send for all to agree that a move has worked, and on its size."""
BEFORE, AFTER = (0, 3, 5, 8), (0, 4, 5, 8)


def moved_and_counted(world):
    """Layer 3 moves from rank 1 to rank 0, optimizer state and all; what this rank gave to the network."""
    model = build_model(MODEL)
    layers = held_layers(model, BEFORE, world.rank)
    size = pack(layers[3].state()).numel() if world.rank == 1 else 0
    messages, real_send, real_isend = [], dist.send, dist.isend

    def send(tensor, dst, *args, **kwargs):
        messages.append((dst, tensor.nbytes))
        return real_send(tensor, dst, *args, **kwargs)

    def isend(tensor, dst, *args, **kwargs):
        messages.append((dst, tensor.nbytes))
        return real_isend(tensor, dst, *args, **kwargs)

    dist.send, dist.isend = send, isend
    summed, real_all_reduce = [], dist.all_reduce

    def all_reduce(tensor, *args, **kwargs):
        summed.append(tensor.nbytes)
        return real_all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    before, after = (stages_over(Partition(bounds=bounds), (0, 1, 2)) for bounds in (BEFORE, AFTER))
    migration = migrate(world, layers, plan_moves(before, after))
    held = {layer.index: sum(p.numel() for p in layer.module.parameters()) for layer in layers}
    moved = [message for message in messages if message[1] > AGREEING]
    agreeing = sum(summed) + sum(message[1] for message in messages if message[1] <= AGREEING)
    return {
        "size": size,
        "moved": moved,
        "agreeing": agreeing,
        "bytes": migration.byte_count,
        "held": held,
    }


def test_only_the_bytes_of_moved_layers_travel():
    """One message from the old rank to the new one, of the size reported; agreeing takes a few bytes."""
    ranks = on_ranks(moved_and_counted, 3, mesh=Mesh())
    size = ranks[1]["size"]
    assert [rank["moved"] for rank in ranks] == [[], [(0, size)], []]
    assert {rank["bytes"] for rank in ranks} == {size}
    assert max(rank["agreeing"] for rank in ranks) <= AGREEING
    # Weights and both moments of AdamW, and a description.
    weights = 4 * ranks[0]["held"][3]
    assert 3 * weights <= size < 3 * weights + 4096
    # The sender keeps its own until the plan has been tried.
    assert [sorted(rank["held"]) for rank in ranks] == [[0, 1, 2, 3], [3, 4], [5, 6, 7]]


def moved_in_two_messages(world):
    """Layer 3 moves as in a rebalance; what each rank waits for, and the layer's state before and after."""
    layers = held_layers(build_model(MODEL), BEFORE, world.rank)
    if world.rank == 1:
        layers[3].module.register_buffer("counted", torch.arange(5), persistent=False)
    before = {key: value.clone() for key, value in layers[3].state().items()} if world.rank == 1 else {}
    messages, real_isend = [], dist.isend

    def isend(tensor, *args, **kwargs):
        if tensor.nbytes > AGREEING:
            messages.append((tensor.nbytes, kwargs["group"] is world.patient_group))
        return real_isend(tensor, *args, **kwargs)

    dist.isend = isend
    moves = plan_moves(*(stages_over(Partition(bounds=bounds), (0, 1, 2)) for bounds in (BEFORE, AFTER)))
    migration = migrate(world, layers, moves, overlap=moves)
    migration.send_rest(world, layers, moves)
    under_way = len(layers.under_way)
    if world.rank == 1:
        # The sender no longer needs it: what is under way is a copy.
        for value in layers[3].state().values():
            value.zero_()
        layers.drop([3])
    layers.settle()
    return {
        "before": before,
        "after": layers[3].state() if world.rank == 0 else {},
        "counted": layers[3].module.counted.tolist() if world.rank == 0 else [],
        "messages": messages,
        "bytes": migration.byte_count,
        "under_way": (under_way, len(layers.under_way)),
    }


def test_the_optimizers_state_follows_a_moved_layer():
    """Two thirds of the bytes, in a group of their own, after the move is agreed; the same bit for bit."""
    receiver, sender, neither = on_ranks(moved_in_two_messages, 3, mesh=Mesh())
    assert sender["before"].keys() == receiver["after"].keys()
    assert any(name.endswith(".exp_avg_sq") for name in sender["before"])
    for name, value in sender["before"].items():
        assert torch.equal(value, receiver["after"][name]), name
    assert receiver["counted"] == [0, 1, 2, 3, 4], "a buffer that no checkpoint has"
    (first, first_patient), (second, second_patient) = sender["messages"]
    assert (first_patient, second_patient) == (False, True)
    assert second > 1.5 * first
    assert {rank["bytes"] for rank in (receiver, sender, neither)} == {first + second}
    assert [rank["under_way"] for rank in (receiver, sender, neither)] == [(1, 0), (1, 0), (0, 0)]
    assert receiver["messages"] == neither["messages"] == []


def links_measured(world):
    """Seconds of each link, and what this rank sent to find them."""
    sent = []
    real_send = dist.send

    def send(tensor, peer, *args, **kwargs):
        if tensor.nbytes > AGREEING:
            sent.append((peer, tensor.nbytes))
        return real_send(tensor, peer, *args, **kwargs)

    dist.send = send
    # The last position's own message goes nowhere, and must not count.
    return {"seconds": link_seconds(world, (1000, 3000, 10**9)[world.position]), "sent": sent}


@pytest.mark.parametrize("data", first_daily([2, 1]))
def test_links_are_measured_with_the_messages_they_carry(data):
    """To and fro between neighbours, of the size of a microbatch's activations; all ranks know the same."""
    ranks = on_ranks(links_measured, 3 * data, mesh=Mesh(data=data))
    assert len({tuple(rank["seconds"]) for rank in ranks}) == 1
    assert len(ranks[0]["seconds"]) == 2
    assert min(ranks[0]["seconds"]) > 0
    for rank, found in enumerate(ranks):
        position, own = divmod(rank, data)
        right = [((position + 1) * data + own, (1000, 3000)[position])] if position < 2 else []
        left = [((position - 1) * data + own, (1000, 3000)[position - 1])] if position > 0 else []
        assert found["sent"] == TRIALS * left + TRIALS * right


TOTAL = 9


PRUNING = {"kind": "pruning", "startStep": 3, "endStep": 7, "everySteps": 1, "target": 0.95}


@pytest.mark.parametrize(
    ("schedule", "dynamics", "tied"), first_daily([("1F1B", [], True), ("ZeroBubbleV", [PRUNING], False)])
)
def test_a_shrink_in_the_step_after_a_rebalance_keeps_curve_and_checkpoints(
    gang, small_config, single_process_losses, tmp_path, schedule, dynamics, tied
):
    """Evaluated and saved after every step; a job that resumes from the checkpoint has the same losses.

    Layers come to the ranks that stay from one another, and from the rank that leaves.
    """
    config = small_config(totalSteps=TOTAL, dynamics=dynamics)
    config["pipeline"]["schedule"] = schedule
    # The head's weight is the embedding's.
    config["model"]["args"]["tied"] = tied
    saved = tmp_path / "saved"
    held = config | {"evaluation": EVALUATED, "checkpoint": {"path": str(saved), "everySteps": 1, "keep": 20}}
    gates = Gates(tmp_path / "gates", 3, 4)
    running = gang(gates.hold(held), ranks=3, options=["--channel", str(tmp_path / "channel")])
    # Before, an evaluation is under way, between two batches of which a plan takes effect, too.
    until(running, gates.waiting)
    moved, fewer = stages_at((0, 2, 6, 8), range(3)), stages_at((0, 4, 8), range(2))
    if schedule == "ZeroBubbleV":
        moved = stages_at((0, 1, 2, 4, 6, 7, 8), (0, 1, 2, 2, 1, 0))
        fewer = stages_at((0, 2, 4, 6, 8), (0, 1, 1, 0))
    replan(running, tmp_path, gates, lambda plan: plan.replace(epoch=2, stages=moved))
    until(running, functools.partial(has_acked, tmp_path, 2))
    until(running, gates.waiting)
    replan(running, tmp_path, gates, lambda plan: plan.keep(plan.pods[:2], "to go").replace(stages=fewer))
    assert set(running.exit_codes().values()) == {0}, running.errors()
    reference = single_process_losses(config)
    assert_same_curve(running.losses(), reference)
    assert [event["step"] for event in running.events("migrate")] == [4, 5]
    assert [event["step"] for event in running.events("evaluation")] == list(range(1, TOTAL + 1))
    for newer in range(6, TOTAL + 1):
        shutil.rmtree(saved / f"step-{newer:08}")
    again = gang(config | {"checkpoint": {"path": str(saved), "everySteps": 20}}, ranks=1)
    assert set(again.exit_codes().values()) == {0}, again.errors()
    assert_same_curve(again.losses(), {step: reference[step] for step in range(6, TOTAL + 1)})
