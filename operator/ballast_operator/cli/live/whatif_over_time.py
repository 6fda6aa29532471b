"""``ballast whatif --over-time``: when each of a cluster's jobs would start and end, now and then."""

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import click

from ballast_operator.cli.simulate.input import read_amounts

if TYPE_CHECKING:
    from ballast_policies.allocation.price_classes import PricedPool
    from ballast_policies.rounds.values import Node
    from ballast_policies.simulator.clock import OnProgress
    from ballast_policies.simulator.whatif import Setup

    from ballast_operator.allocator.forecast import ForecastJob
    from ballast_operator.allocator.problem.snapshot import Snapshot
    from ballast_operator.api.cluster_policy import ClusterPolicy
    from ballast_operator.cli.live.whatif import LiveCluster

HOUR = 3600.0
MOST_ADDED = 1_000_000


def with_spot_limits(policy: "ClusterPolicy", text: str) -> "ClusterPolicy":
    """The ClusterPolicy with the limits ``onDemandShare=0.3,mostInOnePool=0.5``; those not named: none.

    Raises:
        UsageError: they are no limits, or the policy's pools cannot have them.
    """
    from pydantic import ValidationError

    from ballast_operator.api.costs import SpotLimits

    given = read_amounts(text, "--spot", float)
    try:
        limits = SpotLimits.model_validate(given)
    except ValidationError as error:
        found = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()[:3])
        raise click.UsageError(f"--spot: {found}. To fix: onDemandShare=0.3,mostInOnePool=0.5") from error
    spec = policy.spec.model_copy(update={"spot": limits})
    for rule in spec.RULES:
        broken = rule.problem(spec)
        if broken is not None:
            raise click.UsageError(f"--spot: {broken.reason}")
    return policy.model_copy(update={"spec": spec})


def limited(snapshot: "Snapshot", policy: "ClusterPolicy") -> "Snapshot":
    """The snapshot under the policy's limits of spot machines."""
    from ballast_operator.allocator.problem.capacity import spot_limits

    return dataclasses.replace(snapshot, spot=spot_limits(policy.spec, snapshot.capacity.kinds))


def priced_pools(
    snapshot: "Snapshot",
) -> "tuple[list[PricedPool], dict[str, Mapping[str, float]]]":
    """(the pools with their regions, if data has to be paid for; job -> pool -> what a step's data costs)."""
    besides = {job.name: job.usd_per_step for job in snapshot.jobs if job.usd_per_step}
    regions = snapshot.capacity.regions if besides else {}
    pools = [dataclasses.replace(pool, region=regions.get(pool.pool, "")) for pool in snapshot.usable_pools]
    return pools, besides


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OverTime:
    """Both forecasts of each job, over ``hours``; jobs that cannot be placed are ``left_out``, with why."""

    hours: float
    jobs: "tuple[tuple[ForecastJob, ForecastJob], ...]"
    left_out: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The value of ``over_time`` in ``ballast whatif --output json``."""
        rows = [
            {"job": before.name, "before": _row(before), "after": _row(after)} for before, after in self.jobs
        ]
        return {
            "hours": self.hours,
            "before": _total([before for before, _ in self.jobs]),
            "after": _total([after for _, after in self.jobs]),
            "jobs": rows,
            "left_out": list(self.left_out),
        }

    def as_text(self) -> str:
        """A table in hours from now, and the totals."""
        lines = [
            f"in the next {self.hours:g} hours, without further jobs:",
            f"{'job':40} {'starts now':>11} {'then':>8} {'ends now':>11} {'then':>8}",
        ]
        for before, after in self.jobs:
            starts, ends = zip(_hours(before), _hours(after), strict=True)
            lines.append(f"{before.name:40} {starts[0]:>11} {starts[1]:>8} {ends[0]:>11} {ends[1]:>8}")
        totals = [_total([pair[side] for pair in self.jobs]) for side in (0, 1)]
        lines.append(
            "{} -> {} of {} jobs end; cost {:.2f} -> {:.2f}".format(
                *(total["jobs_ended"] for total in totals),
                len(self.jobs),
                *(total["cost"] for total in totals),
            )
        )
        return "\n".join([*lines, *(f"left out: {line}" for line in self.left_out)])


def over_time(
    live: "LiveCluster",
    setups: "tuple[Setup, Setup]",
    *,
    hours: float,
    then: "ClusterPolicy | None" = None,
    progress: "OnProgress | None" = None,
) -> OverTime:
    """The forecasts under both ``setups``.

    ``setups``: now, and then. ``then``: the policy of the second setup; None: the same.

    Raises:
        ProblemError: a policy cannot be used on what is there at some moment, or ``hours`` are too many.
    """
    from ballast_policies.allocation.problem import ProblemError

    from ballast_operator.allocator.forecast import forecast

    sides = []
    for setup, under in zip(setups, (live.policy, then or live.policy), strict=True):
        jobs, seconds = forecast(
            limited(changed(live.snapshot, setup), under),
            _under(under, setup.policy, agnostic=setup.agnostic),
            now=live.at.timestamp(),
            seconds=hours * HOUR,
            live=live.resizable,
            progress=progress,
        )
        if seconds < hours * HOUR:
            raise ProblemError(
                f"--over-time: {hours:g} h of {len(jobs)} jobs are too many decisions. "
                f"To fix: --over-time {0.9 * seconds / HOUR:.2g}"
            )
        sides.append(jobs)
    before, after = sides
    return OverTime(
        hours=hours,
        jobs=tuple(zip(before, after, strict=True)),
        left_out=live.left_out,
    )


def course(
    live: "LiveCluster", hours: float, of: Collection[str], progress: "OnProgress | None"
) -> "tuple[tuple[ForecastJob, ...], float]":
    """(forecast of each job until those of ``of`` have ended, hours that it looks ahead).

    Under the policy in force, whether or not it only says what it would do.

    Raises:
        ProblemError: the policy cannot be used on what is there at some moment.
    """
    from ballast_operator.allocator.forecast import forecast

    jobs, seconds = forecast(
        live.snapshot,
        in_force(live.policy),
        now=live.at.timestamp(),
        seconds=hours * HOUR,
        live=live.resizable,
        of=of,
        progress=progress,
    )
    return jobs, seconds / HOUR


def in_force(policy: "ClusterPolicy") -> "ClusterPolicy":
    """The ClusterPolicy as if it did not only say what it would do."""
    objective = policy.spec.objective
    return _under(policy, objective.policy, agnostic=objective.heterogeneity_agnostic)


def changed(snapshot: "Snapshot", setup: "Setup") -> "Snapshot":
    """The snapshot with a setup's prices, and its GPUs; those are of the cheapest pools of their type.

    GPUs that are taken away are free ones first. A gang that loses one holds nothing.

    Raises:
        ProblemError: the cluster has no such GPU type, or fewer GPUs than are taken away.
    """
    _check_types(snapshot, setup)
    nodes = _changed_nodes(snapshot, setup)
    room = {node.name: node.gpus for node in nodes}
    total = Counter[str]()
    for node in nodes:
        total[node.pool] += node.gpus
    capacity = dataclasses.replace(
        snapshot.capacity,
        nodes=nodes,
        pools=tuple(
            dataclasses.replace(
                pool, price=setup.prices.get(pool.gpu_type, pool.price), gpus=total[pool.pool]
            )
            for pool in snapshot.capacity.pools
        ),
    )
    jobs, has = [], dict(room)
    for job in snapshot.jobs:
        held = Counter(() if job.placement is None else job.placement.nodes)
        if snapshot.shared.on(job.placement) and has.get(snapshot.shared.on(job.placement)):
            jobs.append(job)  # another may be on its GPU
            room.update(dict.fromkeys(held, 0))
        elif any(room.get(node, gpus) < gpus for node, gpus in held.items()):
            jobs.append(dataclasses.replace(job, placement=None))
        else:
            room.update({node: room[node] - gpus for node, gpus in held.items() if node in room})
            jobs.append(job)
    return dataclasses.replace(snapshot, capacity=capacity, jobs=tuple(jobs))


def _check_types(snapshot: "Snapshot", setup: "Setup") -> None:
    from ballast_policies.allocation.problem import ProblemError
    from ballast_policies.rounds.values import gpus_by

    known, there = snapshot.capacity.gpu_types, gpus_by(snapshot.capacity.nodes, lambda node: node.gpu_type)
    for field, types in (("more", setup.more), ("prices", setup.prices)):
        for gpu_type in sorted(set(types) - set(known)):
            raise ProblemError(
                f"{field}: {gpu_type} is not one of {', '.join(known)}; the speed of jobs on other GPU types "
                "is not known"
            )
    for gpu_type, more in setup.more.items():
        if more > MOST_ADDED:
            raise ProblemError(
                f"more: {gpu_type}: {more} GPUs are more than the {MOST_ADDED} that can be added"
            )
        if there[gpu_type] + more < 0:
            raise ProblemError(
                f"more: {gpu_type}: {-more} GPUs cannot be taken away, there are {there[gpu_type]}"
            )


def _changed_nodes(snapshot: "Snapshot", setup: "Setup") -> "tuple[Node, ...]":
    from ballast_policies.rounds.values import Node

    nodes = {node.name: node for node in snapshot.capacity.nodes}
    held = Counter[str]()
    for job in snapshot.jobs:
        held.update(() if job.placement is None else job.placement.nodes)
    by_price = sorted(snapshot.capacity.pools, key=lambda pool: (pool.price, pool.pool))
    for gpu_type, more in setup.more.items():
        there = [node for node in nodes.values() if node.gpu_type == gpu_type]
        pools = [pool.pool for pool in by_price if pool.gpu_type == gpu_type]
        size = max((node.gpus for node in there), default=0) or max(more, 1)
        for number, start in enumerate(range(0, max(0, more), size)):
            name = f"added-{gpu_type}-{number}"
            nodes[name] = Node(name=name, pool=pools[0], gpu_type=gpu_type, gpus=min(size, more - start))
        surplus = max(0, -more)
        for free_only in (True, False):
            for pool in pools:
                for node in [node for node in nodes.values() if node.pool == pool]:
                    taken = min(surplus, max(0, node.gpus - held[node.name]) if free_only else node.gpus)
                    nodes[node.name] = dataclasses.replace(node, gpus=node.gpus - taken)
                    surplus -= taken
    return tuple(nodes.values())


def _under(policy: "ClusterPolicy", name: str, *, agnostic: bool) -> "ClusterPolicy":
    """The ClusterPolicy with another objective, in force. Raises ProblemError: no cluster can have it."""
    from ballast_policies.allocation.policy import SpaceSharing
    from ballast_policies.allocation.problem import ProblemError
    from ballast_policies.allocation.registry import find_policy

    if find_policy(name).space_sharing is SpaceSharing.ALWAYS:
        raise ProblemError(
            f"--over-time: policy {name} puts any two jobs on the same GPUs by trial, which no rounds do. "
            "To fix: leave --over-time out, or name another policy"
        )
    objective = policy.spec.objective.model_copy(update={"policy": name, "heterogeneity_agnostic": agnostic})
    spec = policy.spec.model_copy(update={"objective": objective, "dry_run": False})
    return policy.model_copy(update={"spec": spec})


def _row(found: "ForecastJob") -> dict[str, Any]:
    of = {name: getattr(found, name) for name in ("starts", "gpu_hours", "cost", "first")}
    stops = {"stops_seconds": found.stops, "stopped_by": found.stopped_by or None}
    return {"begins_seconds": found.begins, "ends_seconds": found.ends, **stops, **of}


def _total(jobs: "list[ForecastJob]") -> Mapping[str, Any]:
    ends = [job.ends for job in jobs if job.ends is not None]
    return {
        "jobs_ended": len(ends),
        "last_end_seconds": max(ends) if ends and len(ends) == len(jobs) else None,
        "mean_end_seconds": sum(ends) / len(ends) if ends and len(ends) == len(jobs) else None,
        "starts": sum(job.starts for job in jobs),
        "gpu_hours": sum(job.gpu_hours for job in jobs),
        "cost": sum(job.cost for job in jobs),
    }


def _hours(found: "ForecastJob") -> tuple[str, str]:
    """(start, end) as text."""
    otherwise = "later" if found.stops is None else "stopped"
    begins, ends = (
        otherwise if seconds is None else f"{seconds / HOUR:.2f} h" for seconds in (found.begins, found.ends)
    )
    return begins, ends
