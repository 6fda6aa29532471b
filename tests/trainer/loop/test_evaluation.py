"""The loss on validation data: at its steps, the same everywhere, and training does not notice it."""

import json

import pytest
import torch
from ballast_policies.contract.messages import ExitReason
from ballast_trainer.causes import describe
from ballast_trainer.channel.base import DirectoryChannel
from ballast_trainer.data.corpus import text_batch
from ballast_trainer.errors import TrainerError
from ballast_trainer.launch import ValidatedJob
from ballast_trainer.models.protocol import Model
from torch import nn

from tests.support.changes import SHORT, change
from tests.support.examples import first_daily
from tests.support.jobs import small_job
from tests.support.one_process import train_here
from tests.support.plans import local_plan
from tests.trainer.layers.trained_layers import all_layers

PLASTICITY = {"criterion": "plasticity", "threshold": 1.0, "patience": 1}
CHANGES = {kind: [change(kind, startStep=1, endStep=6, everySteps=1)] for kind in SHORT} | {
    "none": [],
    "hash": [
        change("sparseAttention", startStep=0, endStep=2, everySteps=1)
        | {"attention": {"pattern": "hash", "buckets": 2}}
    ],
    "plasticity": [{"kind": "freezing", "everySteps": 1, "target": 0.5, "freezing": PLASTICITY}],
}


@pytest.fixture
def job(small_config):
    """``job(**fields)``: eight steps of a small model with dropout."""

    def make(**fields):
        config = small_config(**{"totalSteps": 8, **fields})
        arguments = {"dim": 16, "heads": 2, "context": 8, "dropout": 0.1}
        return config | {"model": {"name": "gpt", "layers": 5, "args": arguments}}

    return make


def tensors_in(folder):
    """Bytes of the tensors in a checkpoint."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.glob("step-*/*.distcp")}


@pytest.mark.slow
@pytest.mark.parametrize("case", first_daily(CHANGES, 2))
def test_training_does_not_notice_evaluations(job, tmp_path, case):
    """Losses and checkpoints are those of the job without them, bit for bit, whatever changes the model."""
    runs = {}
    for name, fields in {"without": {}, "with": {"evaluation": {"everySteps": 1, "batches": 2}}}.items():
        path = tmp_path / name
        config = job(dynamics=CHANGES[case], checkpoint={"path": str(path)}, **fields)
        told = train_here(config)
        runs[name] = told.losses, tensors_in(path)
    assert len(runs["with"][1]) == 1
    assert runs["with"] == runs["without"]
    assert sorted(told.evaluations()) == list(range(1, 9))


class Noisy(nn.Module):
    """Counts its forwards, keeps running statistics, and draws from every generator of the host."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, value):
        self.calls += 1
        self.seen += 1
        scale = 1 + 0.01 * self.calls
        return nn.functional.dropout(self.norm(self.linear(value)) * scale, 0.3, self.training)


def noisy():
    return Model.from_layers(
        [Noisy for _ in range(3)],
        loss=nn.functional.mse_loss,
        batch=lambda seed, step, size: (
            torch.randn(size, 4, generator=torch.Generator().manual_seed(seed + step)),
            torch.ones(size, 4),
        ),
    )


@pytest.mark.slow
def test_buffers_and_attributes_of_a_layer_come_back(tmp_path):
    """BatchNorm's statistics, a counter in a buffer and one in an attribute count training alone."""
    found = []
    for evaluation in (None, {"everySteps": 2, "batches": 3}):
        path = tmp_path / str(len(found))
        saved = {"checkpoint": {"path": str(path)}, "evaluation": evaluation}
        told = train_here(small_job(f"{__name__}:noisy", steps=6, batch=8, **saved))
        found.append((told.losses, tensors_in(path)))
    assert found[0] == found[1]
    assert sorted(told.evaluations()) == [2, 4, 6]


def test_the_loss_is_that_of_the_model_in_evaluation_mode(job):
    """Without dropout, over the batches of the validation data, with the weights of the step."""
    config = job(
        totalSteps=1,
        training={"learningRate": 0.0, "weightDecay": 0.0},
        evaluation={
            "everySteps": 1,
            "batches": 3,
            "data": {"name": "tests.support.held_data:text", "args": {"context": 8}},
        },
    )
    told = train_here(config)
    built = ValidatedJob.from_mapping(config)
    layers = nn.Sequential(*(layer.module for layer in all_layers(built.model, built.config.training))).eval()
    with torch.no_grad():
        losses = [
            float(built.model.loss(layers(inputs), targets))
            for inputs, targets in (text_batch(0, number, 8, 8) for number in range(3))
        ]
    assert told.evaluations()[1] == pytest.approx(sum(losses) / 3, abs=1e-6)


@pytest.mark.slow
def test_a_job_told_to_stop_evaluates_when_it_resumes(job, tmp_path):
    """Stopped where an evaluation is due, and resumed: each step's loss is that of the job in one piece."""
    evaluation = {"everySteps": 2, "batches": 2}
    whole = train_here(job(evaluation=evaluation))
    config = job(evaluation=evaluation, checkpoint={"path": str(tmp_path), "everySteps": 100})
    first = train_here(config, stop_after=4)
    assert (first.reason, sorted(first.losses)) == (ExitReason.STOPPED, [1, 2, 3, 4])
    second = train_here(config)
    assert sorted(second.evaluations()) == [4, 6, 8]
    assert first.losses | second.losses == whole.losses
    assert first.evaluations() | second.evaluations() == whole.evaluations()


@pytest.mark.slow
def test_a_job_stopped_in_its_last_evaluation_makes_it_again(job, tmp_path):
    """The state is saved before it; the next launch trains no step, and evaluates."""
    config = job(
        evaluation={"everySteps": 100, "batches": 2}, checkpoint={"path": str(tmp_path), "everySteps": 100}
    )
    first = train_here(config, stop_after=8)
    assert (first.reason, first.evaluations()) == (ExitReason.STOPPED, {})
    second = train_here(config)
    assert (second.reason, sorted(second.evaluations()), second.losses) == (ExitReason.FINISHED, [8], {})


@pytest.mark.slow
def test_a_schedule_without_a_flush_drains_for_evaluations(job):
    """Its steps are the same as elsewhere."""
    config = job(evaluation={"everySteps": 3, "batches": 1})
    config["pipeline"]["schedule"] = "PipeDream2BW"
    assert sorted(train_here(config).evaluations()) == [3, 6, 8]


class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, value):
        if not self.training:
            raise ValueError("only trained")
        return self.linear(value)


def failing():
    return Model.from_layers([Failing, Failing], loss=nn.functional.mse_loss, batch=noisy().batch)


def test_a_layer_that_fails_in_an_evaluation_is_named():
    config = small_job(f"{__name__}:failing", batch=8, evaluation={"everySteps": 1, "batches": 1})
    with pytest.raises(ValueError, match="only trained") as caught:
        train_here(config)
    said, _, fix = describe(caught.value).partition(". To fix: ")
    assert said == "ValueError: only trained (in layer 0, Failing, in an evaluation)" and "that layer" in fix
    assert not isinstance(caught.value, TrainerError)


MESHES = {
    "interleaved-data": (
        {"data": 2},
        {"schedule": "Interleaved1F1B"},
        [{"kind": "mixtureOfExperts", "experts": {"count": 4, "parallel": True, "balance": "none"}}],
    ),
    "tensor": (
        {"tensor": 2},
        {"schedule": "ZeroBubbleV"},
        [{"kind": "freezing", "startStep": 2, "endStep": 4, "everySteps": 1, "target": 0.5}],
    ),
}


@pytest.mark.processes
@pytest.mark.parametrize("mesh", first_daily(MESHES))
def test_ranks_measure_what_one_process_does(gang, small_config, mesh):
    """Several stages a rank, replicas that share experts, tensor ranks: the loss of the single process."""
    parallelism, pipeline, dynamics = MESHES[mesh]
    config = small_config(
        totalSteps=5, dynamics=dynamics, evaluation={"everySteps": 2, "batches": 3}, parallelism=parallelism
    )
    config["pipeline"] |= pipeline
    running = gang(config, ranks=4).succeeded()
    found = {event["step"]: event["validation_loss"] for event in running.events("evaluation")}
    config["dynamics"] = [
        one | ({"experts": {**one["experts"], "parallel": False}} if "experts" in one else {})
        for one in dynamics
    ]
    alone = train_here(config | {"parallelism": {}})
    assert sorted(found) == [2, 4, 5]
    assert found == pytest.approx(alone.evaluations(), abs=1e-5)


def test_the_last_report_has_the_last_evaluation(small_config, tmp_path):
    """No step follows it."""
    plan = local_plan(["job-1-0"])
    channel = DirectoryChannel(tmp_path / "channel")
    channel.publish(plan)
    config = small_config(totalSteps=3, evaluation={"everySteps": 2, "batches": 1})
    told = train_here(config, channel=channel, plan=plan)
    report = json.loads((tmp_path / "channel" / "report.json").read_text())
    assert report["validationStep"] == 3
    assert report["validationLoss"] == pytest.approx(told.evaluations()[3])
