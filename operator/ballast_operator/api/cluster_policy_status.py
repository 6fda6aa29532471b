"""``ClusterPolicy.status``: the observed state of a policy."""

from collections.abc import Mapping
from typing import Annotated, Any

from ballast_policies.accounting import cost
from pydantic import Field

from ballast_operator.api.base import Conditions, Name, StatusModel, Text, Time, listed
from ballast_operator.api.costs import TeamCost, Written


class PoolCapacity(StatusModel):
    """Capacity of a pool."""

    pool: Name
    """The pool's name."""
    gpu_type: Name
    """Its GPU type."""
    capacity_type: Name = ""
    """``onDemand`` or ``spot``: as the spec says, or else the labels of its nodes."""
    region: Annotated[str, Field(max_length=63)] = ""
    """Region of its nodes, as far as it is known."""
    memory_per_gpu: Annotated[int, Field(ge=0)] | None = None
    """Bytes of memory of each GPU that count: as the spec says, or else the catalogue; absent: not known."""
    nodes: Annotated[int, Field(ge=0)] = 0
    """Ready nodes."""
    gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs of these nodes that are not taken by pods of others."""
    gpus_held: Annotated[int, Field(ge=0)] = 0
    """GPUs that jobs hold."""


class PoolBill(StatusModel):
    """Cost of a pool's nodes since Ballast has known them, up to ``billAt``."""

    pool: Name
    """The pool's name."""
    gpu_type: Name = ""
    """Its GPU type."""
    since: Time
    """Time when it was first seen."""
    gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs that are paid for since ``billAt``."""
    gpus_held: Annotated[int, Field(ge=0)] = 0
    """GPUs of them that jobs hold since ``billAt``."""
    price_per_gpu_hour: Annotated[float, Field(ge=0)] = 0.0
    """Price since ``billAt``."""
    gpu_seconds: Annotated[float, Field(ge=0)] = 0.0
    """GPUs x seconds."""
    cost: Annotated[float, Field(ge=0)] = 0.0
    """Their cost, held or idle."""
    held_cost: Annotated[float, Field(ge=0)] = 0.0
    """The part of ``cost`` in which jobs held them: what jobs have paid, deleted ones among them."""
    deleted_jobs_cost: float | None = None
    """The part of ``heldCost`` that deleted jobs have paid. What the others had paid before ``since``, for
    another ClusterPolicy, is taken off."""
    data_cost: Annotated[float, Field(ge=0)] = 0.0
    """Besides ``cost``: what jobs paid for data that was read there from other regions, deleted ones
    included."""
    deleted_jobs_data_cost: float | None = None
    """The part of ``dataCost`` that deleted jobs have paid, likewise."""

    def paid_for_gpus(self, seconds: float) -> Written:
        """Cost that jobs have paid for its GPUs, ``seconds`` after this was written."""
        since = cost(min(self.gpus, self.gpus_held) * seconds, self.price_per_gpu_hour)
        return Written(total=self.held_cost, others=self.deleted_jobs_cost, since=since)

    def paid_for_data(self) -> Written:
        """Cost that jobs have paid for data read there."""
        return Written(total=self.data_cost, others=self.deleted_jobs_data_cost)


class PoolHazard(StatusModel):
    """Rate at which machines of a spot pool are taken away, as far as it was seen."""

    pool: Name
    """The pool's name."""
    nodes: Annotated[int, Field(ge=0)] = 0
    """Its nodes that hold gangs, since ``billAt``."""
    node_hours: Annotated[float, Field(ge=0)] = 0.0
    """Nodes that held gangs x hours, up to ``billAt``."""
    preemptions: Annotated[int, Field(ge=0)] = 0
    """Nodes that were taken from under a gang, with a notice or without."""
    per_hour: Annotated[float, Field(ge=0)] = 0.0
    """Preemptions a node and hour, as of the last one, or when the hours doubled; one a day at first."""
    per_hour_low: Annotated[float, Field(ge=0)] = 0.0
    """The rate is between it and ``perHourHigh`` with a probability of at least 95 %."""
    per_hour_high: Annotated[float, Field(ge=0)] = 0.0
    """The rate is between ``perHourLow`` and it with a probability of at least 95 %."""


class PoolPrice(StatusModel):
    """The last good price that a price feed has given."""

    pool: Name
    """The pool's name."""
    feed: Annotated[str, Field(max_length=507)] = ""
    """Its source: ConfigMap/key, or the cloud's list."""
    price_per_gpu_hour: Annotated[float, Field(ge=0)]
    """The price that counts."""
    time: Time
    """Since when it has held, by the feed."""


class Proposed(StatusModel):
    """GPUs that a job would get: filled in while ``spec.dryRun`` is set."""

    job: Annotated[str, Field(max_length=512)]
    """namespace/name."""
    gpu_type: Name = ""
    """GPU type; empty: none."""
    pool: Name = ""
    """Node pool."""
    gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs."""
    why: Text = ""
    """Reason."""


class Round(StatusModel):
    """The last round."""

    plan_id: Name
    """Its name, as ``status.lastDecision.planId`` of a job has it."""
    time: Time
    """Time of the decision."""
    policy: Name = ""
    """Policy that decided it."""
    solve_seconds: Annotated[float, Field(ge=0)] | None = None
    """Time for the solution."""
    objective_value: float | None = None
    """Value of the objective, in the unit that the policy documents."""
    gap: float | None = None
    """Relative distance to the proven bound; 0: optimal."""


class Twin(StatusModel):
    """Error of the last replay of what the operator saw."""

    time: Time
    """Time up to which was replayed."""
    hours: Annotated[float, Field(ge=0)]
    """So much of the time before."""
    jobs: Annotated[int, Field(ge=0)]
    """Jobs that had ended, and were compared."""
    time_error: float | None = None
    """Sum of completion times in the replay over the real sum, minus 1."""
    cost_error: float | None = None
    """The same of costs; absent: nothing was paid."""


class ClusterPolicyStatus(StatusModel):
    """State of the policy: its capacity, decisions and costs."""

    observed_generation: Annotated[int, Field(ge=0)] = 0
    """metadata.generation of the spec that this status is about."""
    conditions: Conditions = ()
    """Conditions by type."""
    capacity: Annotated[tuple[PoolCapacity, ...], listed(128, "pool")] = ()
    """Capacity of each pool."""
    bill: Annotated[tuple[PoolBill, ...], listed(256, "pool")] = ()
    """Cost of each pool."""
    bill_at: Time | None = None
    """Time of the bill's last sum; what it says of GPUs and prices still holds."""
    teams: Annotated[tuple[TeamCost, ...], listed(256, "team")] = ()
    """Cost of each team's jobs."""
    hazard: Annotated[tuple[PoolHazard, ...], listed(128, "pool")] = ()
    """Rates at which machines of the spot pools are taken away."""
    prices: Annotated[tuple[PoolPrice, ...], listed(128, "pool")] = ()
    """Prices that price feeds have given."""
    gpus: Annotated[int, Field(ge=0)] | None = None
    """GPUs over all pools."""
    gpus_held: Annotated[int, Field(ge=0)] | None = None
    """GPUs that jobs hold."""
    jobs_running: Annotated[int, Field(ge=0)] | None = None
    """Jobs that hold GPUs."""
    jobs_waiting: Annotated[int, Field(ge=0)] | None = None
    """Jobs that want GPUs and have none."""
    last_round: Round | None = None
    """The last round."""
    shadow_prices: dict[str, float] = Field(default_factory=dict)
    """GPU type -> what one more GPU would add to the objective."""
    twin: Twin | None = None
    """The last replay by ``ballast twin --keep``."""
    proposed: Annotated[tuple[Proposed, ...], listed(1000)] = ()
    """Assignments that jobs would get without ``spec.dryRun``, the first thousand."""


def team_costs(status: Mapping[str, Any] | None, now: Time) -> tuple[TeamCost, ...]:
    """The costs of the status of a ClusterPolicy, brought up to ``now``; none where it cannot be read."""
    before = ClusterPolicyStatus.written(status, "teams", "billAt")
    return () if before is None else tuple(entry.brought_up_to(now, before.bill_at) for entry in before.teams)
