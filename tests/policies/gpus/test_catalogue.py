"""The catalogue of GPUs: figures of data sheets, and names under which a GPU is found."""

import pytest
from ballast_policies.gpus.catalogue import CatalogueError, built_in_gpus, gpu_named, gpu_of_node, parse_gpus
from hypothesis import given
from hypothesis import strategies as st

ROW = """
[[gpu]]
name = "x1-16gb"
vendor = "nvidia"
products = ["X1"]
memory_gb = 16
tflops = { fp32 = 8 }
source = "X1 data sheet"
year = 2020
"""


@pytest.mark.parametrize(
    ("product", "memory", "bandwidth", "fp32", "links"),
    [
        ("Tesla-K80", 12e9, 240e9, 4.37e12, None),
        ("Tesla-P100-PCIE-16GB", 16e9, 732e9, 9.3e12, None),
        ("Tesla-V100-SXM2-16GB", 16e9, 900e9, 15.7e12, 300e9),
        ("NVIDIA-A100-SXM4-80GB", 80e9, 2039e9, 19.5e12, 600e9),
        ("NVIDIA-H100-80GB-HBM3", 80e9, 3350e9, 67e12, 900e9),
        ("AMD_Instinct_MI300X_OAM", 192e9, 5300e9, 163.4e12, None),
    ],
)
def test_figures_are_those_of_the_data_sheets(product, memory, bandwidth, fp32, links):
    """In bytes, bytes/s and FLOP/s."""
    gpu = gpu_named(product)
    assert (gpu.memory_bytes, gpu.memory_bandwidth, gpu.link_bandwidth) == pytest.approx(
        (memory, bandwidth, links)
    )
    assert gpu.flops["fp32"] == pytest.approx(fp32)


def test_flops_are_without_sparsity():
    """Half of the H100 data sheet's 1,979 TFLOP/s in bf16."""
    assert gpu_named("h100-sxm5-80gb").flops["bf16"] == pytest.approx(989.5e12)


@pytest.mark.parametrize("gpu", built_in_gpus(), ids=lambda gpu: gpu.name)
def test_a_gpus_row_agrees_with_its_name_and_its_precisions(gpu):
    """The name states the memory, half precision is no slower than single, and products find their row."""
    assert gpu.name.endswith(f"-{gpu.memory_bytes / 1e9:g}gb")
    peaks = [gpu.flops[each] for each in ("fp64", "fp32", "fp16") if each in gpu.flops]
    assert peaks == sorted(peaks)
    assert gpu.products
    assert gpu.source
    for name in (gpu.name, *gpu.products):
        assert gpu_named(name).name == gpu.name


@given(st.sampled_from([name for gpu in built_in_gpus() for name in (gpu.name, *gpu.products)]), st.data())
def test_case_and_separators_do_not_matter(name, data):
    """A driver's `Tesla V100-SXM2-16GB` is the label's `Tesla-V100-SXM2-16GB`."""
    changed = "".join(
        data.draw(st.sampled_from(" -_"))
        if letter in "-_ "
        else data.draw(st.sampled_from([letter.lower(), letter.upper()]))
        for letter in name
    )
    assert gpu_named(f" {changed} ") is gpu_named(name)


@pytest.mark.parametrize(
    "name", ["", "v100", "k80", "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb", "Tesla-T4-SHARED", "x" * 100_000]
)
def test_other_names_are_no_gpu_of_the_catalogue(name):
    """A family, a slice, a shared GPU: none has the memory of one row for certain."""
    assert gpu_named(name) is None


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("memory_gb = 16", "", "memory_gb is None"),
        ("memory_gb = 16", "memory_gb = nan", "memory_gb is nan"),
        ("fp32 = 8", "fp32 = -8", "fp32 is -8"),
        ("fp32 = 8", "fp33 = 8", "tflops"),
        ("year = 2020", "year = true", "year is True"),
        ("year = 2020", "year = 2020\ncores = 7", "unknown fields"),
        ('"nvidia"', '"acme"', "vendor"),
        ('source = "X1 data sheet"', "", "source"),
        ('products = ["X1"]', "products = [1]", "lists of text"),
        ("[[gpu]]", "[gpu]", "no rows"),
        ("[[gpu]]", "[[gpu", "not TOML"),
    ],
)
def test_a_row_that_cannot_be_used_is_refused(old, new, reason):
    assert len(parse_gpus(ROW)) == 1
    with pytest.raises(CatalogueError, match=reason):
        parse_gpus(ROW.replace(old, new))


def test_a_product_of_two_rows_is_refused():
    """A label would name either."""
    with pytest.raises(CatalogueError, match="x2-16gb: 'x1' is x1-16gb's too"):
        parse_gpus(ROW + ROW.replace("x1-16gb", "x2-16gb"))


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
