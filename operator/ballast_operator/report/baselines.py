"""Costs that a job would have had otherwise: on demand only, and on all GPU types alike."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ballast_policies.accounting import cost
from ballast_policies.prices.egress import NO_DATA_PRICES, DataPrices

from ballast_operator.api.base import memory_bytes
from ballast_operator.kube.kinds import Object
from ballast_operator.report.held import held_parts


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """By pool: price, GPU type, GPUs, region; by GPU type: the cheapest on-demand price; prices of data."""

    price: Mapping[str, float]
    gpu_type: Mapping[str, str]
    gpus: Mapping[str, int]
    on_demand: Mapping[str, float]
    region: Mapping[str, str] = dataclasses.field(default_factory=dict)
    data: DataPrices = NO_DATA_PRICES


def read_prices(policies: Sequence[Object]) -> Prices:
    """The prices that count now."""
    price: dict[str, float] = {}
    gpu_type: dict[str, str] = {}
    gpus: dict[str, int] = {}
    on_demand: dict[str, float] = {}
    region: dict[str, str] = {}
    data: dict[tuple[str, str], float] = {}
    for policy in policies:
        status = policy.get("status") or {}
        bill = {entry["pool"]: entry for entry in status.get("bill") or []}
        capacity = {entry["pool"]: entry for entry in status.get("capacity") or []}
        region |= {name: entry.get("region", "") for name, entry in capacity.items()}
        for each in policy["spec"].get("dataPrices") or []:
            data.setdefault((each["fromRegion"], each["toRegion"]), each["pricePerGb"])
        for pool in policy["spec"].get("nodePools") or []:
            name, kind = pool["name"], pool["gpuType"]
            now = (bill.get(name) or {}).get("pricePerGpuHour", pool.get("pricePerGpuHour") or 0.0)
            price.setdefault(name, now)
            gpu_type.setdefault(name, kind)
            gpus.setdefault(name, (capacity.get(name) or {}).get("gpus", 0))
            found = (capacity.get(name) or {}).get("capacityType")
            if (found or pool.get("capacityType") or "onDemand") == "onDemand" and now > 0:
                on_demand[kind] = min(on_demand.get(kind, now), now)
    return Prices(
        price=price,
        gpu_type=gpu_type,
        gpus=gpus,
        on_demand=on_demand,
        region=region,
        data=DataPrices(data),
    )


def data_usd_per_step(job: Object, prices: Prices) -> float:
    """What a step of the job pays for data where it runs; 0: nothing, or it is not known."""
    stated, held = (
        job["spec"].get("dataLocation"),
        held_parts((job.get("status") or {}).get("allocation") or {}),
    )
    if not stated or not held:
        return 0.0
    if stated.get("readPerStep") is not None:
        each = memory_bytes(stated["readPerStep"])
    else:
        each = memory_bytes(stated["readInAll"]) / max(1, job["spec"].get("totalSteps", 0))
    total = sum(part.gpus for part in held) or 1
    return sum(
        (prices.data.of_bytes(each, stated["region"], prices.region.get(part.pool, "")) or 0.0)
        * part.gpus
        / total
        for part in held
    )


def on_demand_cost(gpu_seconds: Mapping[str, float], status: Any, prices: Prices) -> float | None:
    """The same GPU time in the cheapest on-demand pools of the same types; None: a type has none."""
    types = {entry["pool"]: entry.get("gpuType", "") for entry in status.get("poolCosts") or []}
    total = 0.0
    for pool, seconds in gpu_seconds.items():
        price = prices.on_demand.get(types.get(pool) or prices.gpu_type.get(pool, ""))
        if price is None:
            return None
        total += cost(seconds, price)
    return total if gpu_seconds else None


def type_blind_cost(spec: Any, steps: int, prices: Prices) -> float | None:
    """Cost of ``steps`` on all pools, each for its part of the GPUs; None where a speed is not stated."""
    all_gpus = sum(prices.gpus.values())
    speeds: dict[str, tuple[int, float]] = {}
    for entry in spec.get("throughput") or []:
        known = speeds.get(entry["gpuType"])
        if known is None or entry["stages"] < known[0]:
            speeds[entry["gpuType"]] = (entry["stages"], entry["stepsPerSecond"])
    stated = {stages for stages, _ in speeds.values()}
    if not steps or not all_gpus or len(stated) != 1:
        return None
    per_second = speed = 0.0
    for pool, gpus in prices.gpus.items():
        if not gpus:
            continue
        if prices.gpu_type[pool] not in speeds:
            return None
        stages, rate = speeds[prices.gpu_type[pool]]
        per_second += gpus / all_gpus * cost(float(stages), prices.price[pool])
        speed += gpus / all_gpus * rate
    return steps / speed * per_second if speed > 0 else None
