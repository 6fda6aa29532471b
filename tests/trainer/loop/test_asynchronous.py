"""Schedules without a flush, on real ranks: they learn by their recurrences, and drain where they must."""

import dataclasses
import itertools
import signal
from collections.abc import Callable

import pytest
import torch
from ballast_policies.planning.partition import even_partition
from ballast_policies.planning.schedules.builders.asynchronous import pipedream
from ballast_policies.planning.schedules.validate import weight_versions
from ballast_trainer.channel.base import DirectoryChannel
from ballast_trainer.launch import ValidatedJob
from ballast_trainer.layers.layer_stack import LayerStack
from ballast_trainer.profiling.meter import Meter

from tests.support.examples import first_daily
from tests.support.gang import assert_same_curve
from tests.support.plans import local_plan
from tests.support.replans import stages_at
from tests.support.waiting import eventually
from tests.trainer.layers.trained_layers import CPU, all_layers, saved_layers

pytestmark = pytest.mark.processes

LAYERS = 8


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


def layers_of(config):
    """All layers of the job, as at its start."""
    job = ValidatedJob.from_mapping(config)
    return all_layers(job.model, job.config.training)


def weights_of(layers):
    return {
        (layer.index, name): parameter.detach().clone()
        for layer in layers
        for name, parameter in layer.module.named_parameters()
    }


class Recurrence:
    """The explicit recurrence in one process: every stage keeps all its versions.

    Microbatch k counts from 0; those of pipelines in parallel, each with its part of a batch, come in turn.
    """

    def __init__(self, config, case):
        self.case, self.job = case, ValidatedJob.from_mapping(config)
        self.latest, self.computing = layers_of(config), layers_of(config)
        self.ranges = [range(first, end) for first, end in itertools.pairwise(case.bounds)]
        self.history = [[self.snapshot(stage)] for stage in range(len(self.ranges))]
        self.meter = Meter(LAYERS, CPU, None)
        self.stack = LayerStack([self.computing[i] for i in range(LAYERS)], self.meter, 0, CPU)
        self.stack.train()

    def snapshot(self, stage):
        return {
            index: [p.detach().clone() for p in self.latest[index].module.parameters()]
            for index in self.ranges[stage]
        }

    def train(self):
        """All steps; returns the mean loss of each."""
        config, losses, k = self.job.config, [], 0
        pipeline = config.pipeline
        for step in range(config.total_steps):
            inputs, targets = self.job.model.batch(0, step, pipeline.global_batch_size)
            sources, wanted = inputs.chunk(pipeline.microbatches), targets.chunk(pipeline.microbatches)
            each = pipeline.microbatches // self.case.pipelines
            order = [first + within for within in range(each) for first in range(0, len(sources), each)]
            total = 0.0
            for within in order:
                total += self.microbatch(k, step, within, sources[within], wanted[within])
                k += 1
            losses.append(total / pipeline.microbatches)
        return losses

    def microbatch(self, k, step, within, source, target):
        for stage, layers in enumerate(self.ranges):
            used = self.history[stage][self.case.version(stage, k)]
            for index in layers:
                for parameter, value in zip(
                    self.computing[index].module.parameters(), used[index], strict=True
                ):
                    parameter.data.copy_(value)
        self.meter.start_step(step, by_layer=False)
        self.meter.begin(within, self.meter.forward, None)
        loss = self.job.model.loss(self.stack(source), target)
        loss.backward()
        for stage, layers in enumerate(self.ranges):
            if (k + 1) % self.case.learns_every[stage] == 0:
                for index in layers:
                    self.learn(index, self.case.learns_every[stage])
                self.history[stage].append(self.snapshot(stage))
        return float(loss.detach())

    def learn(self, index, microbatches):
        latest, computing = self.latest[index], self.computing[index]
        pairs = zip(latest.module.parameters(), computing.module.parameters(), strict=True)
        for parameter, computed in pairs:
            parameter.grad = computed.grad / microbatches
            computed.grad = None
        latest.optimizer.step()


def largest_difference(weights, others):
    """Over all parameters but the biases of attention's keys.

    Softmax ignores what is added to all keys alike: their gradient is rounding noise, which AdamW
    scales to steps of full length.
    """
    largest = 0.0
    for key, value in weights.items():
        difference = (value - others[key]).abs()
        if key[1].endswith("qkv.bias"):
            queries, _, values = difference.chunk(3)
            difference = torch.cat([queries, values])
        largest = max(largest, float(difference.max()))
    return largest


REPLICATED = weight_versions(pipedream([2, 1], 24))
"""Of six steps of four microbatches: the first stage learns from two at a time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A schedule without a flush, and the recurrence that its paper states.

    Attributes:
        version: of (stage, microbatch): the updates that the weights have had which it meets.
        learns_every: by stage, microbatches an update.
        held: versions by stage, as counted.
    """

    schedule: str
    bounds: tuple[int, ...]
    version: Callable[[int, int], int]
    learns_every: list[int]
    held: list[int]
    training: tuple[str, float] = ("torch.optim:SGD", 0.1)
    pipelines: int = 1
    pipeline: dict = dataclasses.field(default_factory=dict)


def pipedream_of(n, **fields):
    """PipeDream: W(t+1) = W(t) - v grad f(W_1(t-n+1), ..., W_n(t))."""
    held = [n - s for s in range(n)]
    return Case(
        schedule="PipeDream",
        bounds=even(n),
        version=lambda s, k: max(0, k - (n - 1 - s)),
        learns_every=[1] * n,
        held=held,
        **fields,
    )


def double_buffered_of(n, m=4, **fields):
    """2BW: W(t+1) = W(t) - v grad f(W(t-1)), with microbatch k at version max(floor(k/m) - 1, 0)."""
    return Case(
        schedule="PipeDream2BW",
        bounds=even(n),
        version=lambda s, k: max(k // m - 1, 0),
        learns_every=[m] * n,
        held=[2] * n,
        **fields,
    )


ADAM = ("adamw", 1e-3)
CASES = {
    "weight stashing": pipedream_of(4, training=ADAM),
    "2BW over parallel pipelines": double_buffered_of(
        2, 8, pipelines=2, pipeline={"microbatches": 8, "globalBatchSize": 16}
    ),
    "replicas of a stage": Case(
        schedule="PipeDream",
        bounds=(0, 6, 8),
        version=lambda s, k: REPLICATED[s, k],
        learns_every=[2, 1],
        held=[2, 1],
        pipeline={"replicas": [2, 1]},
    ),
    "vertical sync": Case(
        schedule="PipeDreamVerticalSync",
        bounds=even(3),
        version=lambda s, k: max(0, k - 2),
        learns_every=[1] * 3,
        held=[3] * 3,
    ),
    "2BW": double_buffered_of(2, training=ADAM),
    "parallel pipelines": Case(
        schedule="PipeDream",
        bounds=even(2),
        version=lambda s, k: max(0, k // 2 - (1 - s)),
        learns_every=[2, 2],
        held=[2, 1],
        pipelines=2,
    ),
    "weight stashing of two": pipedream_of(2),
    "2BW of four": double_buffered_of(4, training=("torch.optim:SGD", 0.3)),
}


@pytest.mark.parametrize("case", first_daily(CASES.values(), 3), ids=CASES)
def test_weights_follow_the_recurrence_of_the_schedule(gang, flowing, tmp_path, case):
    """Losses and parameters equal to 1e-6; as many versions are held as the paper says."""
    optimizer, rate = case.training
    config = flowing(case.schedule, optimizer=optimizer, rate=rate, checkpoint={"path": str(tmp_path / "c")})
    config["pipeline"] |= case.pipeline
    ranks = sum(case.pipeline.get("replicas", [case.pipelines] * len(case.held)))
    if case.pipelines > 1:
        config["parallelism"] = {"data": case.pipelines}
    recurrence = Recurrence(config, case)
    losses, running = recurrence.train(), gang(config, ranks=ranks)
    running.succeeded()
    assert list(running.losses().values()) == pytest.approx(losses, abs=1e-6)
    weights, wanted = weights_of(saved_layers(config)), weights_of(recurrence.latest)
    assert largest_difference(weights, wanted) < 1e-6
    start = layers_of(config)
    assert largest_difference(wanted, weights_of(start)) > 1e-3
    (drain,) = running.events("drain")
    assert drain["versions_held"] == case.held


FREEZING = {"kind": "freezing", "startStep": 4, "endStep": 12, "everySteps": 4, "target": 0.5}
PRUNING = {"kind": "pruning", "startStep": 4, "endStep": 12, "everySteps": 4, "target": 0.9}


@pytest.mark.parametrize("dynamic", first_daily([FREEZING, PRUNING]), ids=["freezing", "pruning"])
def test_2bw_learns_the_same_however_layers_move_and_change(gang, pods, flowing, tmp_path, dynamic):
    """Three ranks whose layers change and move learn as one process does: all drain at the same steps."""
    config = flowing(
        "PipeDream2BW",
        optimizer="adamw",
        rate=1e-3,
        totalSteps=14,
        dynamics=[dynamic],
        rebalance={"enabled": True, "everySteps": 6, "minGain": 0.0},
    )
    plan = local_plan(["job-1-0", "job-1-1", "job-1-2"], network=31 if dynamic is FREEZING else 32)
    pods.start_job(tmp_path / "channel", config, plan.replace(stages=stages_at((0, 1, 2, 8), range(3))))
    alone = gang(config, ranks=1, options=["--single-process"])
    pods.succeeded()
    assert pods.events("migrate", "job-1-0")
    assert [drain["step"] for drain in pods.events("drain", "job-1-0")] == [4, 6, 8, 12, 14]
    alone.succeeded()
    assert_same_curve(pods.losses("job-1-0"), alone.losses())


def test_a_new_plan_and_a_stop_drain_the_pipeline(gang, flowing, tmp_path):
    """While steps flow: a rank leaves, the others save after one step, and new ranks go on from there."""
    config = flowing(
        "PipeDream2BW", totalSteps=100_000, checkpoint={"path": str(tmp_path / "c"), "everySteps": 100_000}
    )
    folder = tmp_path / "channel"
    channel = DirectoryChannel(folder)
    running = gang(config, ranks=3, options=["--channel", str(folder)])
    running.wait_for_step(3)
    plan = channel.read_plan()
    channel.publish(plan.keep(plan.pods[:2], "to go").replace(stages=stages_at((0, 2, 8), range(2))))
    eventually(lambda: running.events("migrate"), "layers move", running.errors)
    (moved,) = running.events("migrate")
    running.wait_for_step(moved["step"] + 3)
    running.signal("rank-1", signal.SIGTERM)
    assert running.exit_codes() == {"rank-0": 75, "rank-1": 75, "rank-2": 0}, running.errors()
    assert moved["layers"] == [5, 6, 7]
    assert moved["step"] in [drain["step"] for drain in running.events("drain")]
    assert running.events("drain")[-1]["versions_held"] == [2, 2]
    (saved,) = running.events("checkpoint")
    assert sorted(running.losses()) == list(range(1, saved["step"] + 1))
    again = gang({**config, "totalSteps": saved["step"] + 4}, ranks=3).succeeded()
    assert sorted(again.losses()) == list(range(saved["step"] + 1, saved["step"] + 5))


@pytest.mark.parametrize("schedule", first_daily(["PipeDream2BW", "PipeDream"]))
def test_a_job_resumed_from_a_checkpoint_learns_as_if_it_had_never_stopped(gang, flowing, tmp_path, schedule):
    """The pipeline drains at every checkpoint, so a run cut there and a whole one are the same."""
    saved = {"path": str(tmp_path / "whole"), "everySteps": 4}
    whole = gang(flowing(schedule, totalSteps=8, checkpoint=saved), ranks=2)
    cut = {"path": str(tmp_path / "cut"), "everySteps": 4}
    first = gang(flowing(schedule, totalSteps=4, checkpoint=cut), ranks=2).succeeded()
    second = gang(flowing(schedule, totalSteps=8, checkpoint=cut), ranks=2).succeeded()
    whole.succeeded()
    assert {**first.losses(), **second.losses()} == whole.losses()
