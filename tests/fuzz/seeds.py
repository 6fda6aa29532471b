"""Valid inputs from which hostile ones are made."""

import functools
import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

from tests.contract.examples import EXAMPLES
from tests.operator.api import objects

AT = "2026-01-01T12:00:00Z"

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

VM_SIZE = "Standard_NC6s_v3"

POLICY: dict[str, Any] = {
    **objects.POLICY,
    "spec": {
        **objects.POLICY["spec"],
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
            {
                "name": "spot",
                "nodeSelector": {"ballast.dev/pool": "spot"},
                "gpuType": "v100",
                "capacityType": "spot",
                "pricePerGpuHour": 0.9,
                "priceFeed": {"configMap": "prices", "key": "spot", "staleAfterSeconds": 900},
            },
        ],
        "spot": {"onDemandShare": 0.25},
        "budgets": {"vision": {"amount": 100, "period": "Month"}},
        "dataPrices": [
            {"fromRegion": "us-east-1", "toRegion": "*", "pricePerGb": 0.02},
            {"fromRegion": "*", "toRegion": "eastus", "pricePerGb": 0.09},
        ],
        "objective": {"policy": "hierarchical", "entities": {"a": {"weight": 2}, "b": {"parent": "a"}}},
        "roundSeconds": 60,
        "moves": {"minRunSeconds": 30, "maxMovesPerHour": 3},
        "solver": {"timeLimitSeconds": 2},
        "tenants": {"eachNamespace": {"maxGpus": 8}, "namespaces": {"vip": {"maxWaitingJobs": 5}}},
        "dryRun": False,
    },
}

DEGREES = {
    **{"tensor": 2, "data": 1, "microbatches": 4, "recompute": True, "recomputeEvery": 2},
    **{"schedule": "ZeroBubbleH1", "layers": [3, 5], "stepSeconds": 0.5, "memoryBytes": 1e9},
    "measuredOn": ["v100"],
}

STATUS: dict[str, Any] = {
    "observedGeneration": 3,
    "state": "Running",
    "conditions": [
        {
            "type": "Running",
            "status": "True",
            "reason": "AllRanksTrain",
            "message": "2 ranks",
            "lastTransitionTime": AT,
            "observedGeneration": 3,
        }
    ],
    "allocation": {
        "gpuType": "v100",
        "allGpuTypes": "v100+k80",
        "pool": "fast",
        "gpus": 4,
        "gpusPerPod": 2,
        "parts": [
            {"pool": "fast", "gpuType": "v100", "pods": ["a-1-0"], "speed": 1.5},
            {"pool": "slow", "gpuType": "k80", "pods": ["a-1-1"], "speed": 1.0},
        ],
        "degrees": DEGREES,
        "podGroup": "a-1",
        "sharedGpu": {"partner": "team/b"},
        "leaving": {"nodes": ["n"], "seen": [AT], "by": "a taint", "since": AT, "at": AT},
        "ended": ["a-1-1"],
        "resizedAt": AT,
        "resizePauseMs": 5.5,
        "failedGrowths": 1,
        "masterAddress": "10.0.0.1",
        "pods": ["a-1-0", "a-1-1"],
        "nodes": ["n", "n"],
        "planId": "p",
        "launch": 1,
        "since": AT,
        "joining": ["a-1-1"],
        "joiningSince": AT,
        "firstNewcomer": 1,
        "ending": {"cause": "Preempted", "message": "why", "since": AT},
    },
    "progress": {
        **{"step": 10, "percent": 10, "stepsPerSecond": 2.5, "loss": 0.1, "eta": AT, "bubble": 0.1},
        **{"imbalance": 0.1, "flopsPerSecond": 1e12, "partOfPeak": 0.4, "goodput": 0.9, "badSamples": 1},
        **{"checkpointStep": 8, "checkpointEverySteps": 4, "checkpointSeconds": 0.5},
        **{
            "checkpointWriteSeconds": 1.5,
            "emulatedSlowdown": 2.0,
            "validationLoss": 0.2,
            "validationStep": 9,
        },
    },
    "rebalances": [
        {
            **{"time": AT, "launch": 1, "step": 5},
            **{"imbalanceBefore": 1.2, "imbalanceAfter": 1.0, "pauseMs": 3.5},
        }
    ],
    "repacks": [
        {
            "time": AT,
            "epoch": 2,
            "step": 7,
            "releasedPods": ["a-1-1"],
            "survivors": [{"name": "a-1-0", "uid": "u"}],
            **{"gpus": 1, "stepSecondsBefore": 0.5, "stepSecondsAfter": 0.6, "pauseMs": 1.5},
            **{"reason": "fits", "asked": True},
        }
    ],
    "measuredLayers": [{"gpuType": "v100", "tensor": 1, "ratios": [1.0, 2.5], "at": AT, "of": "a"}],
    "trial": {
        **{"launch": 1, "gpus": "4 x v100", "of": "a", "kept": 0},
        "plans": [{"plan": DEGREES, "stepSeconds": 0.5, "reason": ""}],
    },
    "launches": 1,
    "restarts": {"PodLost": 1},
    "lastDecision": {"chosen": "2 x v100", "nextBest": "", "why": "", "planId": "p", "gpuType": "v100"},
    "costSoFar": 1.5,
    "costAt": AT,
    "activeSeconds": 60.5,
    "poolCosts": [
        {
            **{"pool": "fast", "gpuType": "v100", "gpuSeconds": 60.5},
            **{"cost": 1.5, "startupCost": 0.25, "dataCost": 0.5},
        }
    ],
    "teamCosts": [{"team": "vision", "cost": 1.5}],
    "gpuTime": {
        **{"held": 60.5, "startup": 5.5, "lostSteps": 1.5, "moves": 2.5},
        **{"checkpoint": 1.0, "straggling": 0.5, "idle": 0.5, "goodput": 0.8},
    },
    "gpuLeftAt": AT,
    "isolated": {"seconds": 3.5, "step": 4},
    "suspendedSeconds": 0.5,
    "nextLaunchAt": AT,
    "data": {"region": "eastus", "steps": 10, "gigabytes": 1.5, "cost": 0.5},
    "lostSteps": 3,
    "lostCost": 0.5,
    "suspendedSince": AT,
    "finishedAt": AT,
}

TEMPLATE: dict[str, Any] = {
    "metadata": {"labels": {"team": "x"}, "annotations": {"note": "y"}},
    "spec": {
        "containers": [
            {
                "name": "trainer",
                "image": "trainer:1",
                "command": ["train"],
                "args": ["--x"],
                "env": [
                    {"name": "A", "value": "b"},
                    {"name": "C", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                ],
                "resources": {"requests": {"cpu": "4"}, "limits": {"memory": "1Gi"}},
                "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}, "runAsUser": 1000},
                "terminationMessagePath": "/dev/termination-log",
                "volumeMounts": [{"name": "v", "mountPath": "/v"}],
            },
            {"name": "logs", "image": "logs:1"},
        ],
        "initContainers": [{"name": "fetch", "image": "fetch:1"}],
        "securityContext": {"fsGroup": 2000},
        "terminationGracePeriodSeconds": 30,
        "nodeSelector": {"zone": "a"},
        "tolerations": [{"key": "a", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [
                        {"matchExpressions": [{"key": "z", "operator": "In", "values": ["x"]}]}
                    ]
                }
            }
        },
        "volumes": [{"name": "v", "emptyDir": {}}],
    },
}

ANNOTATIONS: dict[str, Any] = {
    **{f"ballast.dev/{name}": json.loads(EXAMPLES[name].to_json()) for name in ("report", "proposal", "ack")},
    "ballast.dev/finished-step": 10,
    "ballast.dev/end-reason": "the loss is low enough",
}

PROFILE: dict[str, Any] = {
    "microbatchSize": 2,
    "layers": [
        {"name": "a", "forwardSeconds": 0.1, "backwardSeconds": 0.2, "heldBytes": 100, "weightBytes": 10},
        {"repeat": 3, "forwardSeconds": 0.1, "backwardSeconds": 0.2, "activationBytes": 5, "outputBytes": 1},
    ],
}

CLUSTER: dict[str, Any] = {
    "gpus": [{"type": "v100", "count": 4, "speed": 2.0, "memoryBytes": 1e10}, {"type": "k80", "count": 4}],
    "gpusPerServer": 4,
    "bandwidth": {"insideServer": 1e9, "betweenServers": 1e8},
}

PROBLEM: dict[str, Any] = {
    "gpu_types": ["v100", "k80"],
    "capacity": {"v100": 2, "k80": 4},
    "prices": {"v100": 2.0, "k80": 0.5},
    "entities": {"team": {"weight": 2.0, "policy": "fifo"}},
    "jobs": [
        {"name": "a", "throughput": {"v100": 4.0, "k80": 1.0}, "gpus": 2, "weight": 2.0, "entity": "team"},
        {"name": "b", "throughput": {"v100": 1.0}, "steps_remaining": 100.0, "deadline": 50.0},
        {
            "name": "c",
            "configurations": [
                {"name": "one", "gpus": {"v100": 1}, "throughput": 4.0},
                {"name": "mixed", "gpus": {"v100": 1, "k80": 2}, "throughput": 5.5},
            ],
        },
        {
            "name": "d",
            "generate": {"throughput": {"v100": 4.0, "k80": 1.0}, "microbatches": 8, "mixed": True},
        },
        {"name": "e", "generate": {"throughput": {"k80": 1.0}, "speedup": {"2": 1.9}, "sizes": [1, 2]}},
    ],
    "pairs": [],
}

TRACE = [
    ["ResNet-18 (batch size 32)", "train.py", "image", "-n", "1", "3948", "2", "1", "-1.0", "0"],
    ["Transformer (batch size 64)", "train.py", "text", "-n", "1", "346", "1", "1", "1.5", "10.5"],
]

AWS_PRICES: dict[str, Any] = {
    "NextToken": "",
    "SpotPriceHistory": [
        {
            "AvailabilityZone": "us-east-1d",
            "InstanceType": "p2.xlarge",
            "ProductDescription": "Linux/UNIX",
            "SpotPrice": "0.3405",
            "Timestamp": "2020-02-20T23:21:08.000Z",
        }
    ],
}

AZURE_PRICES = [["Date", "NC6", "NC6s v3"], ["2/24/2020", "$0.12276", "$0.60313"], ["2/25/2020", "", "$0.6"]]

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

INSTANCES = [
    ["cloud", "instance", "gpu_type", "gpus", "on_demand_usd_per_hour"],
    ["aws", "p2.xlarge", "k80", "1", "0.90"],
]

GAVEL: dict[str, Any] = {
    "v100": {"('A3C', 1)": {"null": 2.5, "('A3C', 1)": [1.5, 1.5]}, "('ResNet-18', 2)": {"null": 4}},
    "k80": {"('A3C', 1)": {"null": 0.5}},
    "v100_unconsolidated": {"('ResNet-18', 2)": {"null": 3}},
}

SAVED_STATE: dict[str, Any] = {
    "version": 1,
    "memory": {
        "at": 100.5,
        "moves": [1.0, 2.0],
        "gpuTypes": {"v100@2": "v100"},
        "jobs": {"team/a": [[0, 10.5, 1, 3.0], [0, 9.0], [0, 0.5, 1, 0.5]]},
    },
    "jobs": {"team/a": [1, 10, [[0, 2, 5.5, 0.1, 2, 3]]]},
    "kinds": {"kind": [[1, 2, 5.5, 0.1, 2, 3]]},
    "names": ["v100", "k80", "reports"],
    "layers": {"kind": ["team/a", [0.1, 0.2], [100, 200], [10, 20]]},
}

NODE: dict[str, Any] = {
    "metadata": {"name": "n", "labels": {"pool": "fast"}},
    "spec": {
        "unschedulable": False,
        "taints": [{"key": "team", "value": "vision", "effect": "NoSchedule", "timeAdded": AT}],
    },
    "status": {
        "allocatable": {"nvidia.com/gpu": "4", "cpu": "8"},
        "capacity": {"nvidia.com/gpu": "4"},
        "conditions": [{"type": "Ready", "status": "True", "reason": "r", "message": "m"}],
    },
}

POD: dict[str, Any] = {
    "metadata": {
        "name": "a-1-0",
        "namespace": "team",
        "uid": "u",
        "labels": {"ballast.dev/job": "a", "ballast.dev/launch": "1", "ballast.dev/rank": "0"},
        "deletionTimestamp": AT,
    },
    "spec": {
        "nodeName": "n",
        "containers": [{"name": "trainer", "resources": {"limits": {"nvidia.com/gpu": "1"}}}],
    },
    "status": {
        "phase": "Failed",
        "podIP": "10.0.0.1",
        "reason": "Evicted",
        "message": "m",
        "conditions": [{"type": "DisruptionTarget", "status": "True"}],
        "containerStatuses": [
            {
                "name": "trainer",
                "state": {
                    "terminated": {
                        "exitCode": 1,
                        "reason": "Error",
                        "message": EXAMPLES["termination_message"].to_json(),
                    }
                },
            }
        ],
    },
}

AWS_ROWS: list[dict[str, Any]] = [
    {**row, "AvailabilityZone": zone}
    for row in AWS_PRICES["SpotPriceHistory"]
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


ELASTIC_FILE: dict[str, Any] = {
    "cluster": {"fast": {"nodes": 1, "gpus_per_node": 8, "gpu_counts": [1, 2, 4]}},
    "option_columns": ["gpus", "samples_per_s"],
    "job_columns": ["name", "arrival_s", "application", "batch_size", "requested_gpus", "work_samples"],
    "models": {"vision@64": {"restart_s": 40.0, "types": {"fast": {"options": [[1, 40.0], [2, 76.19]]}}}},
    "workloads": {"small": [["a", 0.0, "vision", 64, 1, 1000.0], ["b", 5.5, "vision", 64, 2, 10.0]]},
}

PRICE: dict[str, Any] = {"pricePerGpuHour": 0.75, "time": "2025-10-09T08:53:20Z"}

AZURE_SIZES = [["Instance", "GPU", "count"], ["NC6", "K80", "1"], ["NC24s v3", "V100", "4"]]

GPU_ROW: dict[str, Any] = {
    "name": "v100-32gb",
    "vendor": "nvidia",
    "source": "data sheet",
    "products": ["Tesla-V100-SXM2-32GB"],
    "device_ids": ["1db5"],
    "memory_gb": 32,
    "memory_gb_per_second": 900,
    "link_gb_per_second": 300.5,
    "year": 2018,
}

GPU_LABELS: dict[str, Any] = {
    "nvidia.com/gpu.product": "Tesla-V100-SXM2-32GB",
    "beta.amd.com/gpu.product-name.AMD_Instinct_MI300X_OAM": "8",
    "amd.com/gpu.device-id": "74a1",
    "amd.com/compute-memory-partition": "spx_nps1",
}

LOADS = [
    [json.dumps({"event": "loads", "step": step, "seconds": [0.1, 0.2, 0.05 * step]})] for step in (1, 5)
]

TRAINER_FILE: dict[str, Any] = {
    "totalSteps": 30,
    "model": {"name": "gpt", "layers": 8, "args": {"dim": 32, "started": "2030-11-30"}},
    "pipeline": {"microbatches": 4, "globalBatchSize": 8},
}

NODES: dict[str, Any] = {
    "nodes": [
        {
            "name": "a",
            "gpus": 2,
            "pool": "fast",
            "capacity_type": "spot",
            "labels": {"zone": "z"},
            "taints": [{"key": "k", "value": "v", "effect": "NoSchedule"}],
            "slowdown": {"default": 1.5},
        }
    ]
}

MANIFEST: dict[str, Any] = {
    "step": 10,
    "layer_count": 4,
    "seed": 7,
    "files": {"__0_0.distcp": 123},
    "loss_scale": [1.0, 0],
    "optimizer": "adamw",
}

OWNER: dict[str, Any] = {
    "token": "t",
    "run": "team/a",
    "launch": 3,
    "host": "h",
    "machine": "m",
    "pid": 7,
    "started": "12",
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
