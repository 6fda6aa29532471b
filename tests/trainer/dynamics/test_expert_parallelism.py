"""Experts shared by the replicas of a stage: tokens travel, and the loss curve is that of one process."""

import itertools
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ballast_policies.contract.job.dynamics import DynamicConfig, ExpertsSettings
from ballast_policies.contract.job.training import TrainingConfig
from ballast_policies.planning.profile import routed_both_ways
from ballast_trainer.checkpoints.tensors import changed_by_optimizer, fill, needed, stored
from ballast_trainer.cli.forecasting import ForecastInput
from ballast_trainer.config import read_job_config
from ballast_trainer.distributed.axis import Axis
from ballast_trainer.distributed.mesh import Mesh
from ballast_trainer.dynamics.mixture_of_experts import Experts, OwnExperts, share_experts
from ballast_trainer.dynamics.registry import build_dynamic
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.forecast import Machines, forecasts
from ballast_trainer.launch import ValidatedJob
from ballast_trainer.layers.optimize import update
from ballast_trainer.layers.running import CURRENT_FORWARD
from ballast_trainer.layers.shared_experts import (
    better_placement,
    by_expert,
    first_placement,
    is_elsewhere,
    rank_loads,
    shared_experts,
)
from ballast_trainer.models.gpt import build_gpt
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.examples import first_daily
from tests.support.gang import assert_same_curve
from tests.support.jobs import small_job
from tests.trainer.distributed.waits import Waits
from tests.trainer.layers.trained_layers import ALONE, all_layers
from tests.trainer.models import families
from tests.trainer.tensor_parallel.ranks import on_ranks

OWN = "qwen3_moe with its routers' loss"
EXPERTS = {"count": 5, "topK": 2, "everyBlocks": 1, "parallel": True}

GPT = {"name": "gpt", "layers": 4, "args": {"dim": 24, "heads": 2, "context": 6}}


def experts(**fields):
    return [{"kind": "mixtureOfExperts", "experts": {**EXPERTS, **fields}}]


@given(tokens=st.lists(st.integers(0, 1000), min_size=2, max_size=32), ranks=st.integers(1, 8))
def test_a_better_placement_is_better(tokens, ranks):
    """Never fuller than the one in force, as many experts on each rank; and it stays once it is found."""
    before = first_placement(len(tokens), ranks)
    after = better_placement(before, tokens, ranks)
    fullest = [max(rank_loads(each, tokens, ranks)) for each in (before, after)]
    assert after == before or fullest[1] < fullest[0] * 0.95
    held = [after.count(rank) for rank in range(ranks)]
    assert max(held) - min(held) <= 1
    assert better_placement(after, tokens, ranks) == after


@given(tokens=st.lists(st.integers(0, 100), min_size=4, max_size=4))
@example(tokens=[90, 10, 40, 40])
def test_two_experts_on_each_of_two_ranks_are_the_best_ones(tokens):
    """The fullest with the emptiest: no other two have less; and experts stay for gains below a twentieth."""
    after = better_placement((0, 1, 0, 1), tokens, 2)
    every = (of for of in itertools.product(range(2), repeat=4) if sum(of) == 2)
    best = min(max(rank_loads(placement, tokens, 2)) for placement in every)
    assert max(rank_loads(after, tokens, 2)) <= best / 0.95


class FusedExperts(torch.nn.Module):
    """Two linear maps in one tensor, as transformers has them."""

    num_experts = 2

    def __init__(self):
        super().__init__()
        self.maps = torch.nn.Parameter(torch.randn(2, 4, 4))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        every = torch.einsum("nd,ekd->nek", hidden_states, self.maps)
        chosen = every.gather(1, top_k_index.unsqueeze(-1).expand(-1, -1, every.shape[-1]))
        return (chosen * top_k_weights.unsqueeze(-1)).sum(1)


def gradients_above_frozen_layers(world, kind, size):
    """Of the maps of two experts shared by ``size`` replicas, the last of which computes no rows."""
    torch.manual_seed(0)
    hidden = torch.randn(3, 6, 4)[world.data.index % 3]
    if kind == "own":
        part = FusedExperts()
        OwnExperts(part)
        arguments = (torch.zeros(6, 1, dtype=torch.int64), torch.ones(6, 1))
    else:
        part = Experts(torch.nn.Linear(4, 4), 4, ExpertsSettings(count=3, top_k=1, parallel=True))
        with torch.no_grad():
            part.router.weight[1:] = 0
            part.router.weight[0] = hidden.mean(0)
        arguments = ()
    if size > 1:
        share_experts(part, world.data)
    CURRENT_FORWARD.set(0, 0)
    part(hidden, *arguments).square().sum().backward()
    of_experts = (
        part.maps if kind == "own" else part.experts["0" if size == 1 else str(world.data.index)].weight
    )
    grad = torch.zeros_like(of_experts) if of_experts.grad is None else of_experts.grad
    return grad[:1] if kind == "own" else grad


@pytest.mark.processes
@pytest.mark.parametrize(("kind", "size"), [("own", 2), ("copies", 3)])
def test_a_rank_without_rows_exchanges_gradients_above_frozen_layers(kind, size):
    """The inputs need no gradient there; the first rank's are the sum of what the replicas compute alone."""
    shared = on_ranks(gradients_above_frozen_layers, size, kind, size, mesh=Mesh(data=size))
    alone = on_ranks(gradients_above_frozen_layers, size, kind, 1, mesh=Mesh(data=size))
    assert torch.count_nonzero(shared[-1]) == 0
    torch.testing.assert_close(shared[0], sum(alone))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("ranks", "data", "fields", "training"),
    first_daily(
        [
            (2, 2, {"balance": "loss"}, {"recompute": True}),
            (3, 3, {"balance": "none", "dropTokens": True, "capacityFactor": 1.0}, {}),
            # A step of Adam is as large for a gradient of rounding errors, and would change who goes where.
            (4, 2, {"balance": "bias", "balanceWeight": 0.05}, {"optimizer": "sgd", "learningRate": 0.05}),
        ],
        1,
    ),
    ids=["two replicas", "three replicas that drop tokens", "two stages of two replicas"],
)
def test_shared_experts_learn_as_one_process_does(
    gang, small_config, same_curve, ranks, data, fields, training
):
    """Tokens, results and gradients travel between the ranks; layers move, experts change places, ranks
    leave, and the loads are told by expert and by rank.
    """
    config = small_config(totalSteps=8, training=training)
    config["pipeline"] |= {"microbatches": 6, "globalBatchSize": 12}
    config["rebalance"] = {"everySteps": 3, "minGain": 0.0}
    if ranks > data:
        config["repack"] = {"enabled": True, "minStages": 1, "everySteps": 5, "maxSlowdown": 9.0}
    alone = experts(**fields)
    alone[0]["experts"]["parallel"] = False
    running = gang({**config, "dynamics": experts(**fields), "parallelism": {"data": data}}, ranks=ranks)
    same_curve(running, {**config, "dynamics": alone})
    if ranks == data:
        return
    assert running.events("repack")
    newest = running.events("tokenImbalance")[-1]
    for layer, loads in newest["rankLoads"].items():
        assert len(loads) == data and sum(loads) == 2 * sum(newest["loads"][layer])
        assert max(newest["placement"][layer]) < data
    assert sum(newest["placed"].values()) > 0


def layers_of(kind, replicas, axis, **shared):
    """Layers with four experts each, of ours or of transformers, of which a replica has its own."""
    if kind == "own":
        from ballast_trainer.models.hugging_face import from_config

        model = from_config(**families.arguments(OWN))
    else:
        model = build_gpt(layers=4, dim=8, heads=2, context=4)
    change = build_dynamic(DynamicConfig(kind="mixtureOfExperts", experts=ExpertsSettings(parallel=True)), 4)

    def prepare(index, module):
        return share_experts(change.prepare(index, module), axis)

    return change, all_layers(model, TrainingConfig(), prepare, replicas=replicas, **shared)


def with_state(layers):
    """A first update of random gradients, by which optimizers get their state."""
    for layer in layers:
        for name, _ in layer.module.named_parameters():
            if (learnt := layer.learnt(name)) is not None:
                learnt.grad = torch.randn_like(learnt)
        update([layer])


def states(world, layers):
    """Of all replicas, by layer and name: tensors of one expert, and which experts' each rank has."""
    own = {
        f"{layer.index}.{name}": value.clone()
        for layer in layers
        for name, value in by_expert(layer.state(), layer.module).items()
        if is_elsewhere(name, shared_experts(layer.module)) is not None
    }
    every = world.data.gather_objects(own)
    assert len({name for of in every for name in of}) == sum(map(len, every)), "an expert is on one rank"
    return {name: value for of in every for name, value in of.items()}


def assert_same(now, before):
    assert now.keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in now.items())


def moved(world, kind, stage):
    """Experts after a step, moves between ranks and steps of tokens, and as others load them."""
    replicas = world.data if stage else None
    change, layers = layers_of(kind, replicas, world.data)
    torch.manual_seed(world.data.index)
    with_state(layers)
    first, draw, moves = states(world, layers), random.Random(0), 0
    for _ in range(20):
        for layer in layers:
            for shared in shared_experts(layer.module).values():
                shared.tokens = [draw.randrange(100) for _ in range(4)]
        change.after_optimizer(layers)
        assert_same(states(world, layers), first)
    for layer in layers:
        for path, shared in shared_experts(layer.module).items():
            moves += shared.moved
            assert sorted(map(shared.placement.count, range(2))) == [2, 2]
            here = {expert for name in layer.state() if (expert := shared.expert_of(name, path)) is not None}
            assert kind == "own" or sorted(here) == shared.own
        # As a rank receives it from another stage.
        again = layers.make(layer.index)
        again.load(layer.moving_state())
        for name, value in layer.state().items():
            torch.testing.assert_close(again.state()[name], value, atol=0, rtol=0)
    assert moves > 0
    at_once = (mine := stored(world, layers)).keys() - changed_by_optimizer(layers, mine)
    assert not any(".experts." in key for key in at_once), "each row is copied beside the next step"
    saved = {
        key: value for of in world.data.gather_objects(stored(world, layers)) for key, value in of.items()
    }
    alone = layers_of(kind, None, Axis())[1]
    fill(ALONE, alone, {key: saved[key] for key in needed(ALONE, alone, saved)}, "a checkpoint")
    whole = stored(ALONE, alone)
    _, anew = layers_of(kind, replicas, world.data)
    fill(world, anew, {key: whole[key] for key in needed(world, anew, whole)}, "a checkpoint")
    assert_same(states(world, anew), first)
    if stage:
        # Of a job whose replicas had a part of each expert's state.
        shares = layers_of(kind, replicas, Axis())[1]
        fill(world, shares, {key: whole[key] for key in needed(world, shares, whole)}, "a checkpoint")
        every = world.data.gather_objects(stored(world, shares))
        cut = {key: value for of in every for key, value in of.items()}
        assert any(key.endswith("%1/2") for key in cut)
        fill(world, anew, {key: cut[key] for key in needed(world, anew, cut)}, "a checkpoint")
        assert_same(states(world, anew), first)


def every_move(world):
    for kind, stage in itertools.product(("copies", "own"), (0, 1)):
        moved(world, kind, stage)


@pytest.mark.processes
def test_moved_experts_are_on_one_rank_each_with_their_optimizer_state():
    """Bit for bit, over moves, from stage to stage, and through checkpoints of other numbers of ranks."""
    pytest.importorskip("transformers")
    on_ranks(every_move, 2, mesh=Mesh(data=2))


@pytest.mark.processes
@pytest.mark.parametrize("kind", first_daily(["own", "copies"], 1))
def test_a_job_goes_on_with_another_number_of_replicas(gang, small_config, tmp_path, kind):
    """Experts of one replica, of two that share them, of one again, of two pipelines of two: one curve."""
    # As above: of Adam rounding errors would change who goes where.
    training = {"optimizer": "sgd", "learningRate": 0.05} if kind == "copies" else {}
    config = small_config(training=training)
    alone, shared = experts(parallel=False, balance="none"), experts(balance="none")
    if kind == "own":
        pytest.importorskip("transformers")
        config["model"] = families.model(OWN)
        config["data"] = {"name": "tests.trainer.models.families:batches"}
        alone, shared = [], [{"kind": "mixtureOfExperts", "experts": {"parallel": True}}]
    config["pipeline"] |= {"microbatches": 4, "globalBatchSize": 8}
    config["checkpoint"] = {"path": str(tmp_path / "saved"), "everySteps": 2}
    losses = {}
    launches = ((1, 1, 1, alone), (3, 2, 2, shared), (4, 1, 2, alone), (6, 2, 4, shared))
    for steps, data, ranks, dynamics in launches:
        running = gang(
            {**config, "totalSteps": steps, "dynamics": dynamics, "parallelism": {"data": data}}, ranks=ranks
        ).succeeded()
        losses |= running.losses()
    del config["checkpoint"]
    reference = gang({**config, "totalSteps": 6, "dynamics": alone}, ranks=1).succeeded()
    assert_same_curve(losses, reference.losses())


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "count"), [(0, 8), (1, 8), (0, 6)])
def test_a_forecast_has_the_bytes_of_a_rank_with_its_experts(stage, count):
    """What `simulate` prints as held is within 5 % of the fullest replica's, and far below all experts'."""
    shared = {"parallelism": {"data": 4, "zeroStage": stage}, "dynamics": experts(count=count)}
    config = small_job(GPT, microbatches=4, **shared)
    job = read_job_config(config)
    rows = ForecastInput(config_path=Path()).layers(config, job)
    (forecast, *_) = forecasts(job, rows, ranks=4)
    change = build_dynamic(job.dynamics[0], 4)
    model = build_gpt(layers=4, dim=24, heads=2, context=6)

    def counted(axis):
        def prepare(index, module):
            return share_experts(change.prepare(index, module), axis)

        layers = all_layers(model, job.training, prepare, replicas=axis if stage else None)
        with_state(layers)
        return sum(layer.byte_count() for layer in layers)

    own = counted(Axis(ranks=(0, 1, 2, 3), index=0))
    assert forecast.ranks[0].held_bytes == pytest.approx(own, rel=0.05)
    assert own < 0.5 * counted(Axis())


def exchanged_by_experts(world):
    """Bytes of two microbatches: what this replica put into all-to-alls, and what its profile has."""
    torch.manual_seed(0)
    part = Experts(torch.nn.Linear(8, 8), 8, ExpertsSettings(count=3, top_k=2, parallel=True))
    share_experts(part, world.data)
    for microbatch in range(2):
        CURRENT_FORWARD.set(0, microbatch)
        part(torch.randn(3, 6, 8, requires_grad=True)).sum().backward()
    forward, backward = routed_both_ways(part.routed_bytes, False)
    return world.data.bytes["all_to_all"], 2 * int(forward + backward)


@pytest.mark.processes
def test_a_profile_has_the_bytes_that_experts_exchange():
    """To the byte those of replicas over gloo; of a step they take the part that leaves a replica."""
    # A replica sends its tokens there, and back as many as came to its experts.
    measured, profiled = map(sum, zip(*on_ranks(exchanged_by_experts, 2, mesh=Mesh(data=2)), strict=True))
    assert measured == profiled > 0
    shared = {"parallelism": {"data": 2}, "dynamics": experts(count=3)}
    config = small_job(GPT, microbatches=4, batch=8, **shared)
    job = read_job_config(config)
    rows = ForecastInput(config_path=Path()).layers(config, job)
    # Two samples of six tokens, two experts each; not of the embedding, nor of the head.
    assert [row.routed_bytes for row in rows] == [0, *[2 * 6 * 2 * 24 * 4] * 2, 0]
    assert [row.experts for row in rows] == [0, 3, 3, 0]

    def seconds(times):
        routed = [row.replace(routed_bytes=times * row.routed_bytes) for row in rows]
        return forecasts(job, routed, ranks=2, machines=Machines(bandwidth=1e5))[0].step_seconds

    away = 2 * 4 * sum(row.routed_bytes for row in rows) / 2
    assert seconds(1) - seconds(0) == pytest.approx(away / 1e5)


@pytest.mark.parametrize(
    ("data", "optimizer", "words"),
    [
        (8, "adamw", "of 4 experts a layer, 8 replicas have none. To fix: a lower data"),
        (2, "torch.optim:Adafactor", "experts.parallel a rank has a part"),
    ],
)
def test_experts_that_replicas_cannot_share_are_refused(data, optimizer, words):
    """Before a rank starts: each needs one, and of a tensor of all experts an optimizer gets rows."""
    pytest.importorskip("transformers")
    config = small_job(
        families.model(OWN),
        data="tests.trainer.models.families:batches",
        microbatches=8,
        batch=8,
        parallelism={"data": data},
        training={"optimizer": optimizer},
        dynamics=[{"kind": "mixtureOfExperts", "experts": {"parallel": True}}],
    )
    with pytest.raises(ConfigurationError, match=words):
        ValidatedJob.from_mapping(config)


@pytest.mark.parametrize("drops", [False, True])
def test_routing_waits_for_the_device_once(monkeypatch, drops):
    """A layer and microbatch: the sizes of the messages, or those of the experts' queues, are the host's."""
    axis = Axis(ranks=(0, 1))
    # Of two replicas that route alike.
    monkeypatch.setattr(Axis, "all_gather", lambda _, tensor: [tensor, tensor])
    monkeypatch.setattr(dist, "all_to_all_single", lambda out, rows, *sizes, group: out.zero_())
    waits = []
    for name in ("__bool__", "__float__", "__int__", "__index__", "item", "tolist", "cpu", "nonzero"):
        called = getattr(torch.Tensor, name)

        def told(tensor, *args, called=called, name=name, **kwargs):
            # Sizes are on the host by then.
            if not (name == "tolist" and "cpu" in waits):
                waits.append(name)
            return called(tensor, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, told)
    for replicas, expected in ((axis, ["cpu"]), (Axis(), ["__int__"])):
        settings = ExpertsSettings(count=4, top_k=2, parallel=True, drop_tokens=drops, capacity_factor=0.5)
        part = Experts(torch.nn.Linear(8, 8), 8, settings)
        share_experts(part, replicas)
        waits.clear()
        with Waits() as others:
            part(torch.randn(6, 8)).sum().backward()
        # The host's own tensors have masks, too.
        assert waits == expected and "masked" not in others.found
