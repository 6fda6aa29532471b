"""Valid inputs from which hostile ones are made: those of ``seeds.yaml``, and what is computed."""

import functools
import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import yaml

from tests.contract.examples import EXAMPLES
from tests.operator.api import objects

_READ: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())

JOB: dict[str, Any] = {**objects.JOB, "spec": {**objects.JOB["spec"], **_READ["job"]}}
POLICY: dict[str, Any] = {**objects.POLICY, "spec": {**objects.POLICY["spec"], **_READ["policy"]}}
SCRIPT = objects.SCRIPT
STATUS: dict[str, Any] = _READ["status"]
TEMPLATE: dict[str, Any] = _READ["template"]

ANNOTATIONS: dict[str, Any] = {
    **{f"ballast.dev/{name}": json.loads(EXAMPLES[name].to_json()) for name in ("report", "proposal", "ack")},
    "ballast.dev/finished-step": 10,
    "ballast.dev/end-reason": "the loss is low enough",
}

NODE: dict[str, Any] = _READ["node"]
POD: dict[str, Any] = _READ["pod"]
POD["status"]["containerStatuses"][0]["state"]["terminated"]["message"] = EXAMPLES[
    "termination_message"
].to_json()

PROFILE: dict[str, Any] = _READ["profile"]
CLUSTER: dict[str, Any] = _READ["cluster"]
PROBLEM: dict[str, Any] = _READ["problem"]
ELASTIC_FILE: dict[str, Any] = _READ["elastic_file"]
AWS_PRICES: dict[str, Any] = _READ["aws_prices"]
AZURE_PRICES: list[list[str]] = _READ["azure_prices"]
AZURE_PAGE: dict[str, Any] = _READ["azure_page"]
AZURE_SIZES: list[list[str]] = _READ["azure_sizes"]
INSTANCES: list[list[str]] = _READ["instances"]
PRICE: dict[str, Any] = _READ["price"]
SAVED_STATE: dict[str, Any] = _READ["saved_state"]
GPU_ROW: dict[str, Any] = _READ["gpu_row"]
GPU_LABELS: dict[str, Any] = _READ["gpu_labels"]
TRAINER_FILE: dict[str, Any] = _READ["trainer_file"]
NODES: dict[str, Any] = _READ["nodes"]
MANIFEST: dict[str, Any] = _READ["manifest"]
OWNER: dict[str, Any] = _READ["owner"]
VM_SIZE: str = AZURE_PAGE["Items"][0]["armSkuName"]

AWS_ROWS: list[dict[str, Any]] = [
    {**row, "AvailabilityZone": zone}
    for row in AWS_PRICES["SpotPriceHistory"]
    for zone in ("us-east-1a", "us-east-1d")
]

TRACE = [
    ["ResNet-18 (batch size 32)", "train.py", "image", "-n", "1", "3948", "2", "1", "-1.0", "0"],
    ["Transformer (batch size 64)", "train.py", "text", "-n", "1", "346", "1", "1", "1.5", "10.5"],
]

GCP_PRICES = [
    ["Zone: us-west1-b", "GPU type: nvidia-tesla-k80", "Number of GPUs: 1", "Price per hour: $0.155"],
]

AVAILABILITY = [
    [
        "[2020-03-15T10:07:33Z]",
        "Created instance",
        "i-0",
        "with 1 GPU(s) of type",
        "v100",
        "in zone us-east-1b",
    ],
    ["[2020-03-15T11:07:33Z]", "Instance", "i-0", "running in zone us-east-1b"],
    ["[2020-03-15T12:07:33Z]", "Instance", "i-0", "not running in zone us-east-1b"],
    ["[2020-03-15T12:08:33Z]", "Successfully deleted instance", "i-0"],
    ["[2020-03-15T12:09:33Z]", "Instance with 1 GPU(s) of type v100 creation failed"],
]

GAVEL: dict[str, Any] = {
    "v100": {"('A3C', 1)": {"null": 2.5, "('A3C', 1)": [1.5, 1.5]}, "('ResNet-18', 2)": {"null": 4}},
    "k80": {"('A3C', 1)": {"null": 0.5}},
    "v100_unconsolidated": {"('ResNet-18', 2)": {"null": 3}},
}

LOADS = [
    [json.dumps({"event": "loads", "step": step, "seconds": [0.1, 0.2, 0.05 * step]})] for step in (1, 5)
]


def gcp_page(sku: str) -> dict[str, Any]:
    """One SKU at 0.35 USD an hour."""
    price = {"currencyCode": "USD", "units": "0", "nanos": 350_000_000}
    expression = {"usageUnit": "h", "tieredRates": [{"unitPrice": price}]}
    return {
        "skus": [{"skuId": sku, "pricingInfo": [{"pricingExpression": expression}]}],
        "nextPageToken": "",
    }


@functools.cache
def index() -> bytes:
    """The index of a checkpoint with two tensors."""
    import torch
    from torch.distributed import checkpoint

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {"weight": torch.ones(2, 3), "mask": torch.tensor([True])}
        checkpoint.save(state, checkpoint_id=folder, no_dist=True)
        return (Path(folder) / ".metadata").read_bytes()
