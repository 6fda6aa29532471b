"""The file of measured layers: two forms, one reader for the planner and the trainer."""

import math

import pytest
from ballast_policies.contract.errors import ContractError
from ballast_policies.planning.memory.measured_layers import PipelineForm
from ballast_policies.planning.memory.stage_bytes import StageBytes
from ballast_policies.planning.partition import Partition
from ballast_policies.planning.planners.plan_memory import PlanMemory
from ballast_policies.planning.profile import LayerProfile, read_profile

LAYER = {"forwardSeconds": 1.0, "backwardSeconds": 2.0, "optimizerSeconds": 0.5, "outputBytes": 8}


def test_layers_may_be_repeated():
    """A hundred equal blocks are one entry."""
    profile = read_profile({"layers": [{**LAYER, "repeat": 3}, LAYER], "epoch": 7})
    assert len(profile.each_layer(4)) == 4
    assert profile.each_layer(4)[0].step_seconds(4) == 12.5
    assert profile.profile(4).output_bytes == (8.0,) * 4


def test_a_report_of_a_running_job_is_a_profile():
    """Its seconds are of one step; without the forward's a third is assumed."""
    profile = read_profile({"layerSeconds": [13.0], "layerOptimizerSeconds": [1.0], "layerBytes": [64]})
    assert profile.assumed_split
    (layer,) = profile.each_layer(4)
    assert (layer.forward_seconds, layer.backward_seconds, layer.held_bytes) == (1.0, 2.0, 64.0)
    assert layer.step_seconds(4) == 13.0


def test_a_report_has_the_bytes_that_the_formula_of_memory_counts():
    """Weights, activations, outputs, gradients and repeats of each layer; none where it has none."""
    sizes = {
        "layerBytes": [8, 16],
        "layerWeightBytes": [2, 3],
        "layerActivationBytes": [5, 6],
        "layerOutputBytes": [7, 9],
        "layerGradientBytes": [1, 4],
    }
    profile = read_profile({"layerSeconds": [3.0, 3.0], **sizes}).profile(1)
    found = (profile.held_bytes, profile.weight_bytes, profile.activation_bytes, profile.output_bytes)
    assert found == ((8, 16), (2, 3), (5, 6), (7, 9))
    assert (profile.gradient_bytes, profile.repeated_bytes) == ((1, 4), (0, 0))


def test_each_replica_has_a_layer_without_weights_whole():
    """As one with buffers alone."""
    (layer,) = read_profile({"layers": [{**LAYER, "heldBytes": 16.0}]}).each_layer(1)
    assert layer.shared_by(4, gradients=4, weights=4).held_bytes == 16.0


@pytest.mark.parametrize(("forward", "backward", "ratio"), [(0.004, 0.008, 0.1), (0.004, 0.002, 1 / 3)])
def test_a_layer_that_is_all_overhead_takes_as_long_for_more_samples(forward, backward, ratio):
    """Rounding leaves the overhead a part of the layer's seconds."""
    whole = forward + backward
    row = {
        **LAYER,
        "forwardSeconds": forward,
        "backwardSeconds": backward,
        "overheadSeconds": math.nextafter(whole, 0),
    }
    (layer,) = read_profile({"layers": [row]}).each_layer(1)
    scaled = layer.of_samples(ratio)
    assert scaled.forward_seconds + scaled.backward_seconds == pytest.approx(whole)


def test_each_replica_has_a_part_of_the_experts():
    """With their gradients and optimizer state; of the rest, alone, ZeRO-1 shares the state."""
    row = {**LAYER, "heldBytes": 16.0, "weightBytes": 4.0, "expertBytes": 2.0}
    profile = read_profile({"layers": [row]})
    (layer,) = profile.each_layer(1)
    for shares, held in ((1, 8 + 8 / 2), (2, 2 + 2 + 4 / 2 + 8 / 2)):
        own = layer.shared_by(shares, experts=2)
        assert (own.held_bytes, own.weight_bytes, own.expert_bytes) == (held, 3.0, 1.0)
    form = PipelineForm(schedule="1F1B", positions=1, microbatches=2, averaged=True)

    def planned(layers, replicas):
        return PlanMemory(layers, 1).stage_bytes(form, 1, 1, 0, replicas).of_cut(Partition(bounds=(0, 1)))

    # The fullest of two replicas has two of three experts.
    (uneven,) = read_profile({"layers": [{**row, "experts": 3}]}).each_layer(1)
    fullest = uneven.shared_by(1, experts=2)
    assert (fullest.held_bytes, fullest.weight_bytes) == pytest.approx((8 + 8 * 2 / 3, 2 + 2 * 2 / 3))
    # Gradients of experts are not reduced: that takes no memory.
    own = StageBytes(LayerProfile.of([layer.shared_by(1, experts=2)]).sums, form)
    whole = planned(profile.profile(1), 1)
    assert planned(profile.profile(1), 2) == own.of_cut(Partition(bounds=(0, 1))) < whole


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"layers": [{**LAYER, "expertBytes": 1.0}]}, "1.0 is more than the 0.0 of weightBytes"),
        ([], "expected an object"),
        ({}, "give either layers, or layerSeconds"),
        ({"layers": [LAYER], "layerSeconds": [1.0]}, "give either layers, or layerSeconds"),
        ({"layers": [{"forwardSeconds": 1}]}, r"layers\[0\]\.backwardSeconds: missing"),
        ({"layers": [{**LAYER, "forwardSeconds": -1}]}, r"layers\[0\]\.forwardSeconds: -1 is below 0"),
        ({"layers": [{**LAYER, "repeat": 0}]}, r"layers\[0\]\.repeat: 0 is below 1"),
        ({"layers": [{**LAYER, "forwardSecs": 1}]}, "did you mean 'forwardSeconds'"),
        ({"layerSeconds": [1, float("nan")]}, r"layerSeconds\[1\]: expected a number, got nan"),
        ({"layerSeconds": [1, 2], "layerBytes": [1]}, "1 layerBytes for 2 layerSeconds"),
        ({"layerSeconds": [1], "layerOutputBytes": [1, 2]}, "2 layerOutputBytes for 1 layerSeconds"),
    ],
)
def test_what_is_no_profile_is_refused_with_its_field(value, problem):
    """Negative, missing, misspelled and uneven values."""
    with pytest.raises(ContractError, match=problem):
        read_profile(value)


@pytest.mark.parametrize("field", ["forwardSeconds", "backwardSeconds", "outputBytes", "heldBytes"])
def test_a_layer_beyond_all_measure_is_refused_with_its_field(field):
    """Sums of such numbers would be infinite, and their differences no numbers."""
    layer = {"forwardSeconds": 0.1, "backwardSeconds": 0.2, field: 1e308}
    with pytest.raises(ContractError, match=rf"layers\[0\]\.{field}"):
        read_profile({"layers": [layer]})
