"""``ballast gpus``: the catalogue as text and JSON, and one GPU by name or labels."""

import json

import pytest
from ballast_operator.cli.main import main
from ballast_policies.gpus.catalogue import built_in_gpus
from click.testing import CliRunner


def run(*arguments):
    return CliRunner().invoke(main, ["gpus", *arguments])


def test_all_gpus_are_listed_with_their_sources():
    """As text for people and as JSON in bytes and FLOP/s."""
    text = run().output
    rows = json.loads(run("--output", "json").output)["gpus"]
    assert [row["name"] for row in rows] == [gpu.name for gpu in built_in_gpus()]
    assert all(row["name"] in text and f"{row['source']}, {row['year']}" in text for row in rows)


@pytest.mark.parametrize(
    "asked",
    [["Tesla-V100-SXM2-16GB"], ["--label", "nvidia.com/gpu.product=Tesla-V100-SXM2-16GB", "--label", "a="]],
)
def test_one_gpu_by_product_or_by_the_labels_of_a_node(asked):
    """The same row either way; what is not known is null."""
    (row,) = json.loads(run(*asked, "--output", "json").output)["gpus"]
    assert row["name"] == "v100-sxm2-16gb"
    assert row["memoryBytes"] == 16e9
    assert row["flops"]["fp16"] == pytest.approx(125e12)
    assert json.loads(run("Tesla-T4", "--output", "json").output)["gpus"][0]["memoryBytesPerSecond"] is None


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (["v100"], "'v100' may be v100-pcie-16gb, v100-pcie-32gb, v100-sxm2-16gb"),
        (["NVIDIA h100"], "h100-sxm5-80gb"),
        (["mi300"], "mi300x"),
        (["-"], "'-' is not in the catalogue"),
        (["v1000"], "'v1000' is not in the catalogue"),
        (["--label", "nvidia.com/gpu.product=Tesla-T4-SHARED"], "not in the catalogue"),
        (["--label", "nvidia.com/gpu.product"], "has no '='"),
        (["Tesla-T4", "--label", "a=b"], "To fix: give one of them"),
    ],
)
def test_what_cannot_be_found_is_refused(asked, reason):
    result = run(*asked)
    assert result.exit_code != 0
    assert reason in result.output
    assert "To fix" in result.output
