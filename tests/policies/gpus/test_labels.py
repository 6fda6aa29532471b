"""The GPU of a node from the labels of NVIDIA's and AMD's components."""

import pytest
from ballast_policies.gpus.catalogue import built_in_gpus, gpu_named, gpu_of_node
from hypothesis import given
from hypothesis import strategies as st

NVIDIA = "nvidia.com/gpu.product"
AMD = "amd.com/gpu.product-name"


@pytest.mark.parametrize(
    ("labels", "name"),
    [
        ({NVIDIA: "Tesla-V100-SXM2-16GB", "kubernetes.io/os": "linux"}, "v100-sxm2-16gb"),
        ({NVIDIA: "NVIDIA-A10G"}, "a10g-24gb"),
        ({AMD: "AMD_Instinct_MI300X_OAM", "amd.com/gpu.device-id": "74a1"}, "mi300x-192gb"),
        ({"beta.amd.com/gpu.product-name": "AMD_Instinct_MI210"}, "mi210-64gb"),
        ({"beta.amd.com/gpu.product-name.AMD_Instinct_MI300X_OAM": "8"}, "mi300x-192gb"),
        ({"beta.amd.com/gpu.device-id.74a1": "8", "beta.amd.com/gpu.vram.192G": "8"}, "mi300x-192gb"),
        ({AMD: "a name to come", "amd.com/gpu.device-id": "74A5"}, "mi325x-256gb"),
        ({AMD: "AMD_Instinct_MI300X", "amd.com/compute-memory-partition": "spx_nps1"}, "mi300x-192gb"),
    ],
)
def test_a_node_is_recognised(labels, name):
    """By either vendor's labels, old spellings and new ones."""
    assert gpu_of_node(labels).name == name


@pytest.mark.parametrize(
    "labels",
    [
        {},
        {"kubernetes.io/os": "linux"},
        {NVIDIA: ""},
        {NVIDIA: "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb"},
        {NVIDIA: "Tesla-T4-SHARED"},
        {NVIDIA: "AMD_Instinct_MI300X_OAM"},
        {AMD: "Tesla-T4"},
        {AMD: "AMD_Instinct_MI300X", "amd.com/compute-memory-partition": "cpx_nps4"},
        {f"{AMD}.AMD_Instinct_MI300X": "4", f"{AMD}.AMD_Instinct_MI210": "4"},
        {"amd.com/gpu.device-id.74a1": "4", "amd.com/gpu.device-id.ffff": "4"},
        {NVIDIA: "Tesla-T4", AMD: "AMD_Instinct_MI210"},
    ],
)
def test_other_nodes_are_not(labels):
    """No label, an unknown or divided GPU, another vendor's name, several kinds."""
    assert gpu_of_node(labels) is None


KEYS = st.sampled_from([NVIDIA, AMD, "beta.amd.com/gpu.device-id.74a1", f"{AMD}.", "amd.com/gpu.device-id"])
VALUES = st.text(max_size=8) | st.sampled_from(
    [product for gpu in built_in_gpus() for product in gpu.products]
)


@given(st.dictionaries(KEYS | st.text(max_size=8), VALUES, max_size=4))
def test_any_labels_give_a_gpu_of_the_catalogue_or_none(labels):
    """And a product that is given alone gives its own row."""
    found = gpu_of_node(labels)
    assert found is None or found in built_in_gpus()
    if found is not None and found.vendor == "nvidia":
        assert gpu_named(labels[NVIDIA]) is found
