"""A move that fails leaves every rank with the layers, the optimizer state and the plan that it had."""

import signal

import pytest
import torch
from ballast_policies.contract.job.model import ModelConfig
from ballast_policies.contract.messages import Ack, ExitCode
from ballast_policies.contract.plan import Directive
from ballast_policies.planning.launch import stages_over
from ballast_policies.planning.partition import Partition
from ballast_trainer.distributed.mesh import Mesh
from ballast_trainer.loop import migrate as moving
from ballast_trainer.models.registry import build_model

from tests.support.examples import first_daily
from tests.support.gang import assert_same_curve
from tests.support.jobs import small_job
from tests.support.plans import local_plan
from tests.support.replans import stages_at
from tests.support.waiting import eventually
from tests.trainer.tensor_parallel.ranks import held_layers, on_ranks

pytestmark = pytest.mark.processes

PODS = ["job-1-0", "job-1-1", "job-1-2"]
BEFORE, AFTER = (0, 3, 5, 8), (0, 4, 6, 8)


def cut_short(message):
    return message[:-4]


def no_memory(message):
    raise torch.OutOfMemoryError("no memory for the message")


def too_large(message):
    return message.new_zeros(1).expand(1 << 60)


def moves_with_a_fault(world, name, fault, overlap):
    """Layers 3 and 5 move; the message of layer 5 has a fault. Then the same again, without."""
    model = build_model(ModelConfig(name="gpt", args={"layers": 8, "dim": 16, "heads": 2, "context": 8}))
    layers = held_layers(model, BEFORE, world.rank)

    def held():
        return {
            (layer.index, name): value.clone() for layer in layers for name, value in layer.state().items()
        }

    before, sound = held(), getattr(moving, name)
    stages = [stages_over(Partition(bounds=bounds), (0, 1, 2)) for bounds in (BEFORE, AFTER)]
    moves = moving.plan_moves(*stages)
    # Rank 2's layer 5 goes to rank 1; rank 1's layer 3 goes to rank 0, where nothing is wrong.
    if world.rank == 2:
        setattr(moving, name, lambda *arguments, **options: fault(sound(*arguments, **options)))
    words = ""
    try:
        moving.migrate(world, layers, moves, overlap=moves if overlap else ())
    except moving.MigrationFailed as error:
        words = str(error)
    finally:
        setattr(moving, name, sound)
    after = held()
    same = list(before) == list(after) and all(torch.equal(before[key], after[key]) for key in before)
    moving.migrate(world, layers, moves, overlap=moves if overlap else ()).send_rest(world, layers, moves)
    layers.settle()
    layers.drop(set(layers.indices()).difference(range(AFTER[world.rank], AFTER[world.rank + 1])))
    return {"words": words, "same": same, "held": layers.indices()}


@pytest.mark.parametrize(
    ("name", "fault", "overlap"),
    first_daily(
        [
            ("pack", cut_short, False),
            ("pack", too_large, True),
            ("pack", no_memory, False),
            ("pack", cut_short, True),
            ("as_bytes", no_memory, True),
        ],
        2,
    ),
    ids=[
        "cut short",
        "no room at its target",
        "cannot be packed",
        "cut short, the rest later",
        "no room for the rest",
    ],
)
def test_a_message_that_does_not_arrive_whole_moves_nothing_anywhere(name, fault, overlap):
    """Also on ranks whose own layers arrived whole; parameters and optimizer state bit for bit."""
    ranks = on_ranks(moves_with_a_fault, 3, name, fault, overlap, mesh=Mesh())
    assert [rank["words"] for rank in ranks] == ["layers [3, 5] stay where they were"] * 3
    assert all(rank["same"] for rank in ranks)
    assert [rank["held"] for rank in ranks] == [(0, 1, 2, 3), (4, 5), (6, 7)]


@pytest.fixture
def picky(pods, tmp_path):
    """Start pods of an endless job whose layers cannot be loaded; the channel, the first plan, the file."""

    def start(names, *, network):
        refusing, folder = tmp_path / "refusing", tmp_path / "channel"
        refusing.touch()
        module = "tests.trainer.models.picky_model"
        model = {"name": f"{module}:build", "args": {"refusing": str(refusing)}}
        config = small_job(model, data=f"{module}:batches", steps=100_000, microbatches=4, batch=8)
        plan = local_plan(names, network=network)
        channel = pods.start_job(folder, config, plan)
        pods.wait_for_step(3, names[0])
        return channel, plan, refusing, config

    return start


def assert_all_as_one_process(pods, single_process_losses, config):
    """Stops the job; its losses so far are those of one process."""
    for pod in pods.processes:
        if pods.processes[pod].exitcode is None:
            pods.signal(pod, signal.SIGTERM)
    codes = pods.exit_codes()
    losses = pods.losses("job-1-0")
    reference = single_process_losses({**config, "totalSteps": max(losses)})
    assert_same_curve(losses, reference)
    return codes


def trains_on(pods):
    """Two steps more than there were."""
    pods.wait_for_step(max(pods.losses("job-1-0")) + 2, "job-1-0")


@pytest.mark.parametrize("directive", first_daily([Directive.SHRINK, Directive.RUN]))
def test_training_continues_under_the_old_plan_until_a_move_succeeds(
    pods, picky, single_process_losses, tmp_path, directive
):
    """A plan whose layers do not arrive is not followed; the next one, with the cause gone, is."""
    channel, plan, refusing, config = picky(PODS, network=41)
    names = PODS if directive is Directive.RUN else PODS[:2]
    bounds = (0, 6, 7, 8) if directive is Directive.RUN else (0, 6, 8)
    stages = stages_at(bounds, range(len(names)))
    wanted = local_plan(names, network=41).replace(epoch=2, directive=directive, stages=stages)
    channel.publish(wanted)
    eventually(lambda: "plan 2 is not followed" in pods.errors(), "the plan is refused", pods.errors)
    trains_on(pods)
    assert not pods.events("migrate", "job-1-0")
    assert Ack.from_json((tmp_path / "channel/ack.json").read_text()).epoch == plan.epoch
    refusing.unlink()
    channel.publish(wanted.replace(epoch=3))
    eventually(lambda: pods.events("migrate", "job-1-0"), "layers move", pods.errors)
    trains_on(pods)
    codes = assert_all_as_one_process(pods, single_process_losses, config)
    assert {codes[pod] for pod in names} == {ExitCode.STOPPED}, pods.errors()
    assert {codes[pod] for pod in PODS if pod not in names} <= {ExitCode.OK}


def test_old_ranks_continue_without_a_new_rank_that_cannot_take_its_layers(
    pods, picky, single_process_losses, tmp_path
):
    """The pod that joined in vain ends; two others have left their group for it, and meet again."""
    channel, plan, _, config = picky(PODS[:2], network=42)
    grown = local_plan(PODS, network=42).replace(epoch=2, directive=Directive.GROW)
    channel.publish(grown)
    pods.start_pod(PODS[2], tmp_path / "channel")
    assert pods.exit_code(PODS[2]) == ExitCode.ERROR, pods.errors()
    eventually(lambda: "plan 2 is not followed" in pods.errors(), "the plan is refused", pods.errors)
    trains_on(pods)
    assert not pods.events("grow", "job-1-0")
    assert Ack.from_json((tmp_path / "channel/ack.json").read_text()).epoch == plan.epoch
    codes = assert_all_as_one_process(pods, single_process_losses, config)
    assert {codes[pod] for pod in PODS[:2]} == {ExitCode.STOPPED}, pods.errors()
