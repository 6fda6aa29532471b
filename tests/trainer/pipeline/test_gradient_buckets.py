"""Gradients are averaged over the replicas while earlier layers' backwards still run."""

import pytest
import torch
from ballast_policies.contract.job.training import TrainingConfig
from ballast_trainer.distributed.axis import Axis
from ballast_trainer.errors import TrainerError
from ballast_trainer.models.gpt import build_gpt
from ballast_trainer.pipeline.gradients import GradientBuckets

from tests.trainer.layers.trained_layers import all_layers, one_stage

LAYERS, MICROBATCHES = 5, 3


class RecordedAxis(Axis):
    """Two replicas, of which the other has no gradients; what goes over it is noted."""

    def begin_sum(self, parts, lengths=None):
        EVENTS.append(("sum", parts))
        return parts, []


EVENTS: list = []


@pytest.fixture(params=[False, True], ids=["plain", "recompute"])
def trained(request):
    """A replica's layers and buckets after a step's backwards, and the layers of a job without replicas."""
    EVENTS.clear()
    model = build_gpt(layers=LAYERS, dim=16, heads=2, context=6, dropout=0.1)
    found = []
    for axis in (RecordedAxis(ranks=(0, 1)), Axis()):
        config = TrainingConfig(recompute=request.param)
        layers = all_layers(model, config)
        buckets = GradientBuckets(axis, layers)
        if axis.size > 1:
            for layer in layers:
                first = next(layer.module.parameters())
                first.register_post_accumulate_grad_hook(
                    lambda _, index=layer.index: EVENTS.append(("backward", index))
                )
        ended = (False, buckets.layer_ended)
        pipeline = one_stage(model, layers, MICROBATCHES, layer_ended=ended)
        batch = model.batch(0, 0, 2 * MICROBATCHES)
        pipeline.run(lambda batch=batch: batch)
        found.append((layers, buckets))
    (layers, buckets), (alone, _) = found
    return layers, buckets, alone


def test_a_layer_s_bucket_starts_before_the_backward_of_the_layers_before_it(trained):
    """All buckets start in the last microbatch's backward, from the back, the first layer's as it ends."""
    layers, buckets, _ = trained
    names = [name for name, _ in EVENTS]
    backwards = [index for name, index in EVENTS if name == "backward"]
    assert backwards == list(range(LAYERS))[::-1] * MICROBATCHES
    assert names == ["backward"] * (LAYERS * (MICROBATCHES - 1) + 1) + ["sum", "backward"] * (LAYERS - 1) + [
        "sum"
    ]
    buckets.finish()
    assert len(EVENTS) == len(names)
    assert all(parameter.grad is not None for parameter in layers.parameters())


def test_gradients_are_copied_once_and_one_layer_at_a_time(trained):
    """A sum holds one layer's gradients and a flag each; the sum stays where it was added up."""
    layers, buckets, alone = trained
    buckets.finish()
    sums = [parts for name, parts in EVENTS if name == "sum"]
    sizes = [[p.numel() for p in layer.module.parameters()] for layer in layers]
    assert [len(parts) for parts in sums] == [sum(of) + len(of) for of in reversed(sizes)]
    storages = {parts.untyped_storage().data_ptr() for parts in sums}
    for mine, reference in zip(layers.parameters(), alone.parameters(), strict=True):
        assert mine.grad.untyped_storage().data_ptr() in storages
        torch.testing.assert_close(mine.grad, reference.grad)


def test_gradients_that_come_after_their_bucket_are_refused(trained):
    """They would be lost: the error names the layer and the parameter."""
    layers, buckets, _ = trained
    name, parameter = next(layers[3].module.named_parameters())
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(TrainerError, match=f"layer 3 got gradients of {name} after"):
        buckets.finish()
