"""Outputs of frozen layers are computed once a sample, and are those that the layers would compute."""

import pytest
import torch
from ballast_policies.contract.job.training import TrainingConfig
from ballast_trainer.layers.frozen_outputs import FrozenOutputs
from ballast_trainer.layers.layer import LayerSet
from ballast_trainer.layers.layer_stack import LayerStack
from ballast_trainer.models.loss_weights import cross_entropy
from ballast_trainer.models.protocol import Model
from ballast_trainer.profiling.meter import Meter
from torch import nn

CPU = torch.device("cpu")
WIDTH, LAYERS, FROZEN = 6, 5, 3
PLENTY = 10**9


class Mixing(nn.Linear):
    """Looks at the whole batch."""

    def forward(self, value):
        return super().forward(value - value.mean(0))


class Fewer(nn.Linear):
    """Puts all samples together."""

    def forward(self, value):
        return super().forward(value).sum(0, keepdim=True)


class Rank:
    """A rank that holds some layers of a model, the first of them frozen."""

    def __init__(self, limit=PLENTY, *, make=lambda: nn.Linear(WIDTH, WIDTH), stops=LAYERS):
        model = Model(layer_count=LAYERS, build_layer=lambda _: make(), loss=cross_entropy)
        self.layers = LayerSet(model, TrainingConfig(), CPU, lambda _, module: module)
        self.layers.hold(self.layers.make(index) for index in range(stops))
        self.outputs = FrozenOutputs(limit)
        self.rows = []
        for layer in self.layers:
            layer.module.register_forward_hook(
                lambda _, given, output, index=layer.index: self.rows.append((index, len(given[0])))
            )
        self.freeze(FROZEN)

    def freeze(self, count):
        """Freeze the first layers, and build the stack as a rank does then."""
        for layer in self.layers:
            layer.module.requires_grad_(layer.index >= count)
        self.outputs.keep_only({layer.index for layer in self.layers if layer.index < count})
        self.meter = Meter(LAYERS, CPU, None)
        self.stack = LayerStack(list(self.layers), self.meter, 0, CPU)

    def step(self, *samples, kept=True):
        """Output of a step of one microbatch; and the rows that each layer computed."""
        inputs = torch.stack([torch.arange(WIDTH) * 0.1 + sample for sample in samples])
        self.stack.frozen_outputs = self.outputs if kept else None
        self.rows.clear()
        with self.outputs.during(inputs, 1):
            self.meter.begin(0, self.meter.forward, None)
            output = self.stack(inputs)
            self.meter.end()
        return output, list(self.rows)

    def steps_as_without(self, *samples):
        """The rows that a step computed, whose output is that of all layers."""
        output, rows = self.step(*samples)
        expected, _ = self.step(*samples, kept=False)
        torch.testing.assert_close(output, expected)
        return rows


def only(layers, count):
    return [(layer, count) for layer in layers]


def test_a_sample_that_comes_again_passes_the_frozen_layers():
    """In another order and with another sample, which alone is computed."""
    rank = Rank()
    # Two samples, and one of them alone to find out whether it may be kept.
    assert rank.steps_as_without(1, 2) == only(range(3), 2) + only(range(3), 1) + only(range(3), 2) + only(
        (3, 4), 2
    )
    assert rank.steps_as_without(2, 1) == only((3, 4), 2)
    assert rank.steps_as_without(3, 2) == only(range(3), 1) + only((3, 4), 2)
    assert rank.outputs.samples() == {2: 3}


def test_a_stack_of_frozen_layers_alone_computes_nothing():
    """A stage that has sent a sample once sends what it has kept."""
    rank = Rank(stops=FROZEN)
    rank.step(1, 2)
    assert rank.steps_as_without(1, 2) == []


def test_layers_that_freeze_later_are_computed_from_what_is_kept():
    """The prefix grows: only the layers beyond it run, once."""
    rank = Rank()
    rank.step(1, 2)
    rank.freeze(FROZEN + 1)
    assert rank.steps_as_without(1, 2)[-2:] == [(3, 2), (4, 2)]
    assert rank.outputs.samples() == {3: 2}
    assert rank.steps_as_without(2, 1) == [(4, 2)]


def test_what_is_kept_is_dropped_when_a_layer_thaws():
    """Its weights change from then on, and what it put out is put out no more."""
    rank = Rank()
    rank.step(1, 2)
    rank.freeze(FROZEN - 1)
    assert rank.outputs.samples() == {}
    with torch.no_grad():
        rank.layers[FROZEN - 1].module.weight.mul_(2)
    rank.steps_as_without(1, 2)
    assert rank.outputs.samples() == {FROZEN - 2: 2}


def test_memory_has_a_limit():
    """Samples beyond it are computed each time."""
    rank = Rank(limit=2 * 4 * WIDTH)
    rank.step(1, 2)
    rank.step(3, 4)
    assert rank.outputs.samples() == {2: 2}
    assert rank.steps_as_without(1, 4) == only(range(3), 1) + only((3, 4), 2)


def test_outside_of_a_step_all_layers_compute():
    """Another batch than that of the step that runs must not get its samples."""
    rank = Rank()
    rank.step(1, 2)
    rank.stack.frozen_outputs = rank.outputs
    rank.rows.clear()
    rank.meter.begin(0, rank.meter.forward, None)
    rank.stack(torch.zeros(2, WIDTH))
    assert rank.rows == only(range(LAYERS), 2)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)), "other random numbers"),
        (lambda: Mixing(WIDTH, WIDTH), "computed alone"),
        (lambda: Fewer(WIDTH, WIDTH), "shape"),
    ],
    ids=["draws", "mixes samples", "no sample a row"],
)
def test_outputs_that_are_no_function_of_the_sample_are_not_kept(make, why, caplog):
    """The layers run as they did, and the reason is told."""
    rank = Rank(make=make)
    for _ in range(2):
        rank.steps_as_without(1, 2)
    assert rank.outputs.samples() == {}
    assert why in rank.outputs.refusals[FROZEN - 1]
    assert "layers 0 to 2 are computed" in caplog.text
