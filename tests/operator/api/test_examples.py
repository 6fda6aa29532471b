"""The manifests under examples/ are ones that the operator takes."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from ballast_operator.api import read_cluster_policy, read_training_job

OBJECTS = [
    pytest.param(item, id=f"{path.name}-{item['metadata']['name']}")
    for path in sorted((Path(__file__).parents[3] / "examples").glob("**/*.yaml"))
    for item in yaml.safe_load_all(path.read_text())
    if str(item.get("apiVersion", "")).startswith("ballast.dev/")  # not those of Karpenter
]


@pytest.mark.parametrize("item", OBJECTS)
def test_an_example_obeys_the_rules_of_the_api(item: dict[str, Any]) -> None:
    """Those that the API server checks, too."""
    read = {"ClusterPolicy": read_cluster_policy, "TrainingJob": read_training_job}[item["kind"]]
    assert read(item).metadata.name == item["metadata"]["name"]
