"""The recurrences of schedules without a flush, computed in one process, to compare a job with."""

import pytest
import torch
from ballast_trainer.checkpoints.checkpoints import Checkpoints
from ballast_trainer.distributed.process_group import World
from ballast_trainer.launch import ValidatedJob
from ballast_trainer.layers.layer import LayerSet
from ballast_trainer.layers.layer_stack import LayerStack
from ballast_trainer.profiling.meter import Meter

CPU = torch.device("cpu")
ALONE = World(epoch=1, rank=0, size=1, processes=("rank-0",), device=CPU)
LAYERS = 8


def layers_of(config):
    job = ValidatedJob.from_mapping(config)
    return LayerSet(job.model, job.config.training, CPU, lambda index, module: module), job


def saved_weights(config, step):
    """All parameters, from the job's checkpoint after ``step`` steps."""
    layers, _ = layers_of(config)
    layers.hold(layers.make(index) for index in range(LAYERS))
    checkpoints = Checkpoints(config["checkpoint"]["path"], keep=2, layer_count=LAYERS, seed=0)
    manifest = checkpoints.newest(ALONE)
    assert manifest.step == step
    checkpoints.load(ALONE, layers, manifest)
    return weights_of(layers)


def weights_of(layers):
    return {
        (layer.index, name): parameter.detach().clone()
        for layer in layers
        for name, parameter in layer.module.named_parameters()
    }


class Recurrence:
    """The explicit recurrence in one process: every stage keeps all its versions.

    ``version(stage, k)`` is what microbatch k (from 0) meets; stage s learns after every
    ``update_every[s]`` microbatches from the mean of their gradients.  Of ``pipelines`` in parallel, each
    with its part of a batch, the k-th microbatches come one after the other.
    """

    def __init__(self, config, bounds, *, version, update_every, pipelines=1):
        stages = len(bounds) - 1
        self.latest, self.job = layers_of(config)
        self.latest.hold(self.latest.make(index) for index in range(LAYERS))
        computing, _ = layers_of(config)
        computing.hold(computing.make(index) for index in range(LAYERS))
        self.ranges = [range(bounds[s], bounds[s + 1]) for s in range(stages)]
        self.history = [[self.snapshot(stage)] for stage in range(stages)]
        self.version, self.update_every, self.pipelines = version, update_every, pipelines
        self.meter = Meter(LAYERS, CPU, None)
        self.computing = computing
        self.stack = LayerStack([computing[i] for i in range(LAYERS)], self.meter, 0, CPU)
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
            each = pipeline.microbatches // self.pipelines
            order = [first + within for within in range(each) for first in range(0, len(sources), each)]
            total = 0.0
            for within in order:
                total += self.microbatch(k, step, within, sources[within], wanted[within])
                k += 1
            losses.append(total / pipeline.microbatches)
        return losses

    def microbatch(self, k, step, within, source, target):
        for stage, layers in enumerate(self.ranges):
            used = self.history[stage][self.version(stage, k)]
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
            if (k + 1) % self.update_every[stage] == 0:
                for index in layers:
                    self.learn(index, self.update_every[stage])
                self.history[stage].append(self.snapshot(stage))
        return float(loss.detach())

    def learn(self, index, microbatches):
        latest, computing = self.latest[index], self.computing[index]
        pairs = zip(latest.module.parameters(), computing.module.parameters(), strict=True)
        for parameter, computed in pairs:
            parameter.grad = computed.grad / microbatches
            computed.grad = None
        latest.optimizer.step()


def assert_equal_to(recurrence, gang, config, ranks):
    losses = recurrence.train()
    running = gang(config, ranks=ranks)
    assert set(running.exit_codes().values()) == {0}, running.errors()
    got = running.losses()
    steps = config["totalSteps"]
    assert [got[step + 1] for step in range(steps)] == pytest.approx(losses, abs=1e-6)
    weights, wanted = saved_weights(config, steps), weights_of(recurrence.latest)
    assert largest_difference(weights, wanted) < 1e-6
    moved = largest_difference(wanted, weights_of(layers_at_start(config)))
    assert moved > 1e-3
    return running


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


def layers_at_start(config):
    layers, _ = layers_of(config)
    layers.hold(layers.make(index) for index in range(LAYERS))
    return layers
