"""Prices, data, budgets and limits of costs: parts of both resources."""

import dataclasses
import datetime
import enum
from typing import Annotated

from ballast_policies.accounting import SECONDS_PER_HOUR
from ballast_policies.contract.conditions import Cel, Rule, absent, at, given
from ballast_policies.prices.clouds import USD
from ballast_policies.prices.egress import JobData
from pydantic import Field

from ballast_operator.api.base import (
    ApiModel,
    DnsLabel,
    MemoryQuantity,
    Name,
    StatusModel,
    Step,
    Time,
    exactly_one,
    listed,
    memory_bytes,
)


class OnLimit(enum.StrEnum):
    """Consequence for a job that has reached a limit."""

    SUSPEND = "Suspend"
    """It saves a checkpoint, stops, and holds no GPUs until the limit is raised."""
    CONTINUE = "Continue"
    """It continues; the condition and an Event say that the limit is reached."""
    FAIL = "Fail"
    """It saves a checkpoint, stops, and has failed for good."""


class OnTeamLimit(enum.StrEnum):
    """Consequence for the jobs of a team that has spent its budget."""

    SUSPEND = "Suspend"
    """They save a checkpoint, stop, and hold no GPUs until there is budget again."""
    CONTINUE = "Continue"
    """They continue; their condition BudgetExhausted and an Event say so."""


class BudgetPeriod(enum.StrEnum):
    """Period of a budget."""

    TOTAL = "Total"
    """All that the team's jobs cost since Ballast has known the team."""
    MONTH = "Month"
    """Each calendar month, by UTC."""


class TeamBudget(ApiModel):
    """Budget of a team's jobs."""

    amount: Annotated[float, Field(gt=0, le=1e12)]
    """Amount in the currency of ``pricePerGpuHour``. ``status.teams`` has what is spent, deleted jobs
    included."""
    period: BudgetPeriod = BudgetPeriod.TOTAL
    """Time that the amount is for."""
    on_exhausted: OnTeamLimit = OnTeamLimit.SUSPEND
    """Consequence for the team's jobs when it is spent."""


class TeamPart(StatusModel):
    """Part of a job's cost that one team has paid."""

    team: Name
    """The team, ``spec.entity`` then; empty: none."""
    cost: Annotated[float, Field(ge=0)] = 0.0
    """Amount that it has paid."""


_ROUNDING = 1e-6
"""Rounding of sums of prices."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A sum of what jobs have paid, as a status has it.

    Attributes:
        total: what they had paid when it was written, deleted ones included.
        others: the part of deleted jobs; None: an earlier version wrote it.
        since: what they have paid since, at the rates that the status has.
    """

    total: float = 0.0
    others: float | None = None
    since: float = 0.0

    def paid_by_others(self, jobs: float, then: float) -> float:
        """Cost that others have paid than the jobs that exist, which have paid ``jobs``.

        As it was written, unless the jobs had paid less ``then``, when it was, than they were said to: one
        was deleted since, and of the rates those count on that are not the jobs'. ``then`` may be too high.
        """
        if self.others is None:
            return self.total + self.since - jobs
        deleted = self.total - self.others - then
        if deleted <= _ROUNDING:
            return self.others
        return self.others + deleted + max(0.0, self.since - (jobs - then))


class TeamCost(StatusModel):
    """Cost of a team's jobs, deleted ones included, up to ``billAt``."""

    team: Name
    """The team, ``spec.entity`` of its jobs; empty: jobs without one."""
    since: Time
    """Time when it was first seen."""
    cost: Annotated[float, Field(ge=0)] = 0.0
    """Since then; what its jobs had cost by then included."""
    month: Annotated[str, Field(max_length=7)] = ""
    """The calendar month of ``monthCost``, as 2030-01."""
    month_cost: Annotated[float, Field(ge=0)] = 0.0
    """Cost in this month."""
    deleted_jobs_cost: float | None = None
    """The part of ``cost`` that its deleted jobs have paid, and those that belong to another team now."""
    cost_per_hour: Annotated[float, Field(ge=0)] = 0.0
    """Cost of its GPUs since ``billAt``."""

    def paid(self, seconds: float) -> Written:
        """Cost that its jobs have paid, ``seconds`` after this was written."""
        since = self.cost_per_hour * seconds / SECONDS_PER_HOUR
        return Written(total=self.cost, others=self.deleted_jobs_cost, since=since)

    def brought_up_to(self, now: Time, at: Time | None) -> "TeamCost":
        """The same at ``now``; ``at``: when this was written."""
        month = month_of(now)
        seconds = 0.0 if at is None else max(0.0, (now - at).total_seconds())
        in_month = min(seconds, (now - first_of_month(now)).total_seconds())
        earlier = self.month_cost if self.month == month else 0.0
        per_second = self.cost_per_hour / SECONDS_PER_HOUR
        return self.replace(
            cost=self.cost + per_second * seconds, month=month, month_cost=earlier + per_second * in_month
        )


def month_of(now: Time) -> str:
    """The calendar month by UTC, as 2030-01."""
    return f"{now.astimezone(datetime.UTC):%Y-%m}"


def first_of_month(now: Time) -> Time:
    """Its first moment."""
    day = now.astimezone(datetime.UTC)
    return day.replace(day=1, hour=0, minute=0, second=0, microsecond=0)


class SpotLimits(ApiModel):
    """Limits on starts on spot machines, under every policy. Nothing that runs is stopped for it."""

    on_demand_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Part of the GPUs in use that are not spot, at least: with 0.3 a gang is started on spot machines only
    where at most 0.7 of all GPUs in use are spot afterwards."""
    most_in_one_pool: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Part of the spot GPUs in use that are in one pool, or in one zone of a pool whose nodes have the label
    ``topology.kubernetes.io/zone``, at most, without the last gang that was started there: otherwise no gang
    could be the first."""


class SpotUse(enum.StrEnum):
    """Use of spot machines by a job."""

    ALLOW = "Allow"
    """Spot machines and others, as the policy decides."""
    FORBID = "Forbid"
    """Only on machines that stay."""
    REQUIRE = "Require"
    """Only on spot machines."""


Region = DnsLabel
"""A region by its cloud's name: ``us-east-1``, ``europe-west4``, ``eastus``."""

_RegionOrAny = Annotated[
    str, Field(min_length=1, max_length=63, pattern=r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?|\*)$")
]


class DataLocation(ApiModel):
    """Data that a job reads from where it is stored, while it trains."""

    RULES = (
        Rule(
            condition=exactly_one("read_per_step", "read_in_all"),
            field="",
            reason="what is read is stated by readPerStep or readInAll",
            fix="set exactly one",
        ),
    )

    region: Region
    """Region of the bucket or file system, as the clouds call it, e.g. ``us-east-1``."""
    read_per_step: MemoryQuantity | None = None
    """Data that all ranks together read from there for one step, e.g. ``200Mi``. Data that a node caches is
    not read again: state the mean."""
    read_in_all: MemoryQuantity | None = None
    """Bytes that all ``totalSteps`` read, in place of it, e.g. ``2Ti`` for ten epochs over 200Gi."""
    checkpoint_size: MemoryQuantity | None = None
    """Size of a checkpoint: it is copied when a launch is in another region than the one before. Absent: not
    counted."""

    def read_in(self, total_steps: int) -> JobData:
        """The data of a job of ``total_steps``, in bytes."""
        each = 0.0
        if self.read_per_step is not None:
            each = memory_bytes(self.read_per_step)
        elif self.read_in_all is not None:
            each = memory_bytes(self.read_in_all) / max(1, total_steps)
        size = None if self.checkpoint_size is None else memory_bytes(self.checkpoint_size)
        return JobData(region=self.region, bytes_per_step=each, checkpoint_bytes=size)


class DataPrice(ApiModel):
    """Price of data between two regions."""

    from_region: _RegionOrAny
    """Region where it is read; ``*``: any region without an entry of its own."""
    to_region: _RegionOrAny
    """Region of the GPUs; ``*`` likewise."""
    price_per_gb: Annotated[float, Field(ge=0, le=1e6)]
    """Price of a GB of 2^30 bytes, in the currency of ``pricePerGpuHour``. Inside a region data is free."""


class DataCost(StatusModel):
    """Data that a job has read from other regions."""

    region: Annotated[str, Field(max_length=63)] = ""
    """Region of its last launch, where its checkpoints are; empty: not known."""
    steps: Step = 0
    """Steps whose data is counted, those that were done twice included."""
    gigabytes: Annotated[float, Field(ge=0)] = 0.0
    """Read from another region, and checkpoints copied there, in GB of 2^30 bytes."""
    cost: Annotated[float, Field(ge=0)] = 0.0
    """Their cost: a part of ``costSoFar``."""


_AwsRegion = Annotated[str, Field(max_length=32, pattern=r"^[a-z]{2}(-[a-z]+){1,3}-[0-9]$")]


class AwsPriceFeed(ApiModel):
    """The history of spot prices of AWS, read every five minutes by boto3 with the operator's credentials."""

    region: _AwsRegion
    """Region, e.g. ``us-east-1``."""
    zone: Annotated[str, Field(max_length=63, pattern=r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$")] = ""
    """Availability zone, e.g. ``us-east-1a``; empty: the mean over the zones of the region that have one."""
    instance_type: Annotated[str, Field(max_length=63, pattern=r"^[a-z0-9][-a-z0-9]*\.[a-z0-9][-a-z0-9]*$")]
    """Instance type, e.g. ``p3.8xlarge``."""


class AzurePriceFeed(ApiModel):
    """The retail prices of Azure, read every hour without credentials, by the pool's ``capacityType``."""

    region: Region
    """Region, e.g. ``eastus``."""
    vm_size: Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]
    """VM size, e.g. ``Standard_NC6s_v3``."""


class GcpSku(ApiModel):
    """One SKU of Compute Engine, and how much of it comes with a GPU."""

    id: Annotated[str, Field(pattern=r"^[0-9A-F]{4}-[0-9A-F]{4}-[0-9A-F]{4}$")]
    """Its id, as in Google's list of SKUs, which has others for spot machines and for each region."""
    per_gpu: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Amount for each GPU: 1 of the GPU itself, cores, or GiB of memory."""


class GcpPriceFeed(ApiModel):
    """The Cloud Billing Catalog of Google, read every six hours: what a GPU costs is the sum of its SKUs."""

    skus: Annotated[tuple[GcpSku, ...], listed(8, least=1)]
    """The GPU's SKU, and those of the cores and the memory beside it."""


_IN_USD = at("currency") == USD


class PriceFeed(ApiModel):
    """Source of a pool's price: a ConfigMap in the operator's namespace, or a cloud's price list."""

    RULES = (
        Rule(
            condition=Cel(
                "[has(self.configMap), has(self.aws), has(self.azure), has(self.gcp)]"
                ".filter(x, x).size() == 1",
                lambda feed: (
                    sum(part is not None for part in (feed.config_map, feed.aws, feed.azure, feed.gcp)) == 1
                ),
            ),
            field="",
            reason="a price feed is one of configMap, aws, azure and gcp",
            fix="set exactly one",
        ),
        Rule(
            condition=_IN_USD | given("rate"),
            field="rate",
            reason="a price in another currency than USD needs its rate",
            fix="set priceFeed.rate",
        ),
        Rule(
            condition=_IN_USD | absent("aws"),
            field="currency",
            reason="AWS has its spot prices in USD alone",
            fix="leave currency out; rate converts",
        ),
        Rule(
            condition=absent("config_map") | (absent("rate") & _IN_USD),
            field="rate",
            reason="currency and rate are for the price lists of clouds",
            fix="leave them out, and write the ConfigMap's prices in the pools' currency",
        ),
        Rule(
            condition=(at("key") == "") | given("config_map"),
            field="key",
            reason="key is a key of a ConfigMap",
            fix="leave it out",
        ),
    )

    config_map: (
        Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
        | None
    ) = None
    """Name of the ConfigMap. What else writes it is yours."""
    key: Annotated[str, Field(max_length=253, pattern=r"^[-._a-zA-Z0-9]*$")] = ""
    """Key whose value is ``{"pricePerGpuHour": 0.74, "time": "2026-01-01T00:00:00Z"}``; empty: the pool's
    name."""
    aws: AwsPriceFeed | None = None
    """AWS's spot prices."""
    azure: AzurePriceFeed | None = None
    """Azure's retail prices."""
    gcp: GcpPriceFeed | None = None
    """Google Cloud's list prices."""
    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$")] = USD
    """Currency in which the cloud's list is read; another than USD needs ``rate``."""
    rate: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Factor of the feed's prices: the pools' currency for one unit of the feed's. Absent: 1, and the pools'
    prices are in USD."""
    stale_after_seconds: Annotated[float, Field(ge=1, le=1e9)] = 86_400.0
    """A price that is older still counts, and the condition PricesCurrent is False."""
