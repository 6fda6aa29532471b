"""What travels between ranks when layers move, and when links are measured; none of it is lost."""

import dataclasses
import functools
import shutil

import hypothesis
import pytest
import torch
import torch.distributed as dist
from ballast_policies.contract.job.model import ModelConfig
from ballast_policies.contract.job.training import Precision, TrainingConfig, WeightType
from ballast_policies.planning.launch import stages_over
from ballast_policies.planning.partition import Partition
from ballast_trainer.distributed.mesh import Mesh
from ballast_trainer.layers.layer import OPTIMIZER
from ballast_trainer.layers.packing import as_bytes, pack, unpack
from ballast_trainer.loop.migrate import migrate, plan_moves
from ballast_trainer.models.registry import build_model
from ballast_trainer.profiling.rank_speeds import TRIALS, link_seconds
from hypothesis import strategies
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.examples import first_daily
from tests.support.gang import assert_same_curve
from tests.support.held_data import EVALUATED, Gates
from tests.support.replans import has_acked, replan, stages_at, until
from tests.trainer.tensor_parallel.ranks import held_layers, on_ranks

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


@pytest.mark.processes
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


class Quantized(torch.optim.Optimizer):
    """Keeps state as quantizing optimizers do: codes with scales, by numbers that are no tensors, too."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["count"] = state.get("count", 0) + 1
            state["codes"] = torch.arange(parameter.numel(), dtype=torch.uint8).view(parameter.shape)
            state["scales"] = torch.full((3, 1), 0.5, dtype=torch.bfloat16)
            state["signs"] = parameter > 0
            state["small"] = torch.full((4, 2), 1.25).to(torch.float8_e4m3fn)
            state["turned"] = torch.arange(6.0, dtype=torch.float64).view(2, 3).t()
            state["none"] = torch.empty(0)


class Computed(TorchDispatchMode):
    """Counts what is computed or copied; messages are not."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace == "aten"
        return func(*args, **(kwargs or {}))


def moved_in_two_messages(world, optimizer, dtype, on_gpu):
    """Layer 3 moves as in a rebalance; what each rank waits for, and the layer's state before and after.

    ``on_gpu``: its tensors follow as if they were there.
    """
    config = TrainingConfig(optimizer=optimizer, dtype=WeightType(dtype), precision=Precision(dtype))
    layers = held_layers(build_model(MODEL), BEFORE, world.rank, config)
    if world.rank == 1:
        layers[3].module.register_buffer("counted", torch.arange(5), persistent=False)
    before = {key: value.clone() for key, value in layers[3].state().items()} if world.rank == 1 else {}
    messages, places = [], {"isend": set(), "irecv": set()}

    def noted(name, real):
        def transfer(tensor, *args, **kwargs):
            places[name].add(tensor.untyped_storage().data_ptr())
            if name == "isend":
                messages.append((tensor.nbytes, kwargs.get("group") is world.patient_group))
            return real(tensor, *args, **kwargs)

        return transfer

    for name in places:
        setattr(dist, name, noted(name, getattr(dist, name)))
    moves = plan_moves(*(stages_over(Partition(bounds=bounds), (0, 1, 2)) for bounds in (BEFORE, AFTER)))
    migration = migrate(world, layers, moves, overlap=moves)
    agreed = len(messages)
    with Computed() as computed:
        device = torch.device("cuda" if on_gpu else "cpu")
        migration.send_rest(dataclasses.replace(world, device=device), layers, moves)
    under_way, own = len(layers.under_way), {}
    if world.rank == 1:
        own = layers[3].state()
        layers.drop([3])
    layers.settle()
    after = layers[3].state() if world.rank == 0 else {}
    kept = {
        value.untyped_storage().data_ptr()
        for name, value in (own | after).items()
        if name.startswith(OPTIMIZER) and value.dim() and value.numel() and value.is_contiguous()
    }
    return {
        "before": before,
        "after": after,
        "counted": layers[3].module.counted.tolist() if world.rank == 0 else [],
        "messages": [message for message in messages[:agreed] if message[0] > AGREEING],
        "rest": messages[agreed:],
        "computed": computed.count,
        "elsewhere": len(kept.difference(*places.values())),
        "bytes": migration.byte_count,
        "under_way": (under_way, len(layers.under_way)),
    }


@pytest.mark.processes
@pytest.mark.parametrize(
    ("optimizer", "dtype", "on_gpu"),
    first_daily(
        [
            ("adamw", "bf16", False),
            (f"{__name__}:Quantized", "fp32", True),
            ("adamw", "fp32", True),
            ("torch.optim:Adamax", "fp32", False),
            ("torch.optim:Adafactor", "fp32", False),
            ("sgd", "fp32", False),
        ],
        2,
    ),
)
def test_the_optimizers_state_follows_a_moved_layer(optimizer, dtype, on_gpu):
    """After the move is agreed, from memory of the one optimizer to that of the other; the same bit for bit.

    On CPUs in a group of their own; on GPUs by the backend that the weights have taken.
    """
    receiver, sender, neither = on_ranks(moved_in_two_messages, 3, optimizer, dtype, on_gpu, mesh=Mesh())
    assert sender["before"].keys() == receiver["after"].keys()
    for name, value in sender["before"].items():
        assert value.dtype == receiver["after"][name].dtype
        assert torch.equal(as_bytes(value), as_bytes(receiver["after"][name])), name
    assert receiver["counted"] == [0, 1, 2, 3, 4], "a buffer that no checkpoint has"
    ((weights, patient),) = sender["messages"]
    assert not patient and {patient for _, patient in sender["rest"]} == {not on_gpu}
    assert [rank["computed"] for rank in (receiver, sender, neither)] == [0, 0, 0]
    assert [rank["elsewhere"] for rank in (receiver, sender)] == [0, 0]
    rest = sum(sent for sent, _ in sender["rest"])
    assert {rank["bytes"] for rank in (receiver, sender, neither)} == {weights + rest}
    assert [rank["under_way"] for rank in (receiver, sender, neither)] == [(1, 0), (1, 0), (0, 0)]


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


@pytest.mark.processes
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


@pytest.mark.processes
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
    running.succeeded()
    reference = single_process_losses(config)
    assert_same_curve(running.losses(), reference)
    assert [event["step"] for event in running.events("migrate")] == [4, 5]
    assert [event["step"] for event in running.events("evaluation")] == list(range(1, TOTAL + 1))
    for newer in range(6, TOTAL + 1):
        shutil.rmtree(saved / f"step-{newer:08}")
    again = gang(config | {"checkpoint": {"path": str(saved), "everySteps": 20}}, ranks=1).succeeded()
    assert_same_curve(again.losses(), {step: reference[step] for step in range(6, TOTAL + 1)})


SHAPES = strategies.lists(strategies.integers(0, 5), max_size=3).map(tuple)
DTYPES = strategies.sampled_from(
    [
        *(torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64),
        *(torch.int64, torch.int16, torch.bool, torch.uint8),
    ]
)


@hypothesis.given(
    strategies.dictionaries(
        strategies.text(min_size=1, max_size=5),
        strategies.tuples(SHAPES, DTYPES, strategies.floats(0, 1)),
        max_size=4,
    ),
    strategies.integers(0, 2**31),
)
def test_what_is_packed_is_unpacked_bit_for_bit(shapes, seed):
    """Any names, shapes, types and densities."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (shape, dtype, density) in shapes.items():
        values = (torch.randn(shape, generator=generator) * 100).clamp(-448, 448)
        tensors[name] = torch.where(torch.rand(shape, generator=generator) < density, values, 0.0).to(dtype)
    unpacked = unpack(pack(tensors))
    assert list(unpacked) == list(tensors)
    for name, tensor in tensors.items():
        assert unpacked[name].dtype == tensor.dtype
        assert torch.equal(as_bytes(unpacked[name]), as_bytes(tensor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("view", [torch.clone, torch.conj])
def test_negative_zero_and_not_a_number_survive(dtype, view):
    """The bits are kept, not only the values."""
    special = view(torch.tensor([0.0, -0.0, float("nan"), float("inf"), 0.0, 0.0, 0.0, 0.0]).to(dtype))
    assert torch.equal(as_bytes(unpack(pack({"x": special}))["x"]), as_bytes(special))


def test_zeros_are_not_sent():
    """A tensor of 5 % takes a bit per element and the values that are left."""
    tensor = torch.zeros(64_000)
    tensor[::20] = 1.5
    assert pack({"x": tensor}).numel() < 0.25 * tensor.nbytes


def test_a_message_cut_short_is_refused():
    """A failed move must not load half a layer."""
    message = pack({"x": torch.randn(100)})
    with pytest.raises(ValueError, match="the message ends"):
        unpack(message[:-4])
