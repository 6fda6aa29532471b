"""Valid jobs, policies, status and clouds' answers with all that is said about places and money."""

from typing import Any

from tests.fuzz import seeds
from tests.operator.api import objects

AT = seeds.AT

VM_SIZE = "Standard_NC6s_v3"

JOB: dict[str, Any] = {
    **objects.JOB,
    "spec": {
        **objects.JOB["spec"],
        "mixedPools": "Allowed",
        "memoryPerGpu": "16Gi",
        "weight": 2.5,
        "entity": "vision",
        "deadline": AT,
        "onDeadlineMissed": "Suspend",
        "budget": 100.5,
        "onBudgetExhausted": "Continue",
        "spot": "Forbid",
        "dataLocation": {"region": "us-east-1", "readPerStep": "200Mi", "checkpointSize": "4Gi"},
        "grow": True,
        "suspend": False,
        "backoffLimit": 3,
        "ttlSecondsAfterFinished": 60,
    },
}

SCRIPT = objects.SCRIPT

POLICY: dict[str, Any] = {
    **objects.POLICY,
    "spec": {
        "nodePools": [
            {
                "name": "fast",
                "nodeSelector": {"pool": "fast"},
                "gpuType": "v100",
                "gpuResource": "nvidia.com/gpu",
                "memoryPerGpu": "16Gi",
                "region": "us-east-1",
                "maxNodes": 4,
                "gpusPerNode": 8,
                "startSeconds": 180,
                "pricePerGpuHour": 2.5,
                "priceFeed": {
                    "aws": {"region": "us-east-1", "zone": "us-east-1a", "instanceType": "p3.2xlarge"}
                },
            },
            {
                "name": "slow",
                "nodeSelector": {"pool": "slow"},
                "gpuType": "k80",
                "capacityType": "spot",
                "priceFeed": {
                    "azure": {"region": "eastus", "vmSize": VM_SIZE},
                    "currency": "EUR",
                    "rate": 1.1,
                    "staleAfterSeconds": 900,
                },
            },
            {
                "name": "other",
                "nodeSelector": {"pool": "other"},
                "gpuType": "t4",
                "priceFeed": {"gcp": {"skus": [{"id": "0000-AAAA-0001", "perGpu": 2}]}},
            },
        ],
        "spot": {"onDemandShare": 0.25},
        "budgets": {"vision": {"amount": 100, "period": "Month"}},
        "dataPrices": [
            {"fromRegion": "us-east-1", "toRegion": "*", "pricePerGb": 0.02},
            {"fromRegion": "*", "toRegion": "eastus", "pricePerGb": 0.09},
        ],
    },
}

STATUS: dict[str, Any] = {
    **seeds.STATUS,
    "allocation": {
        **seeds.STATUS["allocation"],
        "gpus": 4,
        "gpusPerPod": 2,
        "parts": [
            {"pool": "fast", "gpuType": "v100", "pods": ["a-1-0"]},
            {"pool": "slow", "gpuType": "k80", "pods": ["a-1-1"]},
        ],
        "leaving": {"nodes": ["n"], "seen": [AT], "since": AT, "at": AT},
        "ended": ["a-1-1"],
        "resizedAt": AT,
        "resizePauseMs": 5.5,
        "failedGrowths": 1,
        "masterAddress": "10.0.0.1",
    },
    "data": {"region": "eastus", "steps": 10, "gigabytes": 1.5, "cost": 0.5},
    "lostSteps": 3,
    "lostCost": 0.5,
    "suspendedSince": AT,
    "finishedAt": AT,
}

SAVED_STATE: dict[str, Any] = {
    **seeds.SAVED_STATE,
    "layers": {"kind": ["team/a", [0.1, 0.2], [100, 200], [10, 20]]},
}

GENERATED: dict[str, Any] = {
    "gpu_types": ["v100", "k80"],
    "capacity": {"v100": 4, "k80": 8},
    "jobs": [
        {
            "name": "a",
            "generate": {"throughput": {"v100": 4.0, "k80": 1.0}, "microbatches": 8, "mixed": True},
        },
        {"name": "b", "generate": {"throughput": {"k80": 1.0}, "speedup": {"2": 1.9}, "sizes": [1, 2]}},
    ],
}

AWS_ROWS: list[dict[str, Any]] = [
    {**row, "AvailabilityZone": zone}
    for row in seeds.AWS_PRICES["SpotPriceHistory"]
    for zone in ("us-east-1a", "us-east-1d")
]

AZURE_PAGE: dict[str, Any] = {
    "Items": [
        {
            "armSkuName": VM_SIZE,
            "armRegionName": "eastus2",
            "type": "Consumption",
            "meterName": "NC6s v3 Spot",
            "productName": "Virtual Machines NCSv3 Series",
            "unitOfMeasure": "1 Hour",
            "currencyCode": "USD",
            "retailPrice": 0.5,
        }
    ]
}


def gcp_page(sku: str) -> dict[str, Any]:
    """One SKU at 0.35 USD an hour."""
    price = {"currencyCode": "USD", "units": "0", "nanos": 350_000_000}
    expression = {"usageUnit": "h", "tieredRates": [{"unitPrice": price}]}
    return {
        "skus": [{"skuId": sku, "pricingInfo": [{"pricingExpression": expression}]}],
        "nextPageToken": "",
    }
