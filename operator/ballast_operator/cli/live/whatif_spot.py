"""``ballast whatif --spot``: other limits of spot machines than the ClusterPolicy's."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from ballast_operator.cli.simulate.input import read_amounts

if TYPE_CHECKING:
    from ballast_policies.allocation.price_classes import PricedPool

    from ballast_operator.allocator.problem.snapshot import Snapshot
    from ballast_operator.api.cluster_policy import ClusterPolicy


def with_spot_limits(policy: "ClusterPolicy", text: str) -> "ClusterPolicy":
    """The ClusterPolicy with the limits ``onDemandShare=0.3,mostInOnePool=0.5``; those not named: none.

    Raises:
        UsageError: they are no limits, or the policy's pools cannot have them.
    """
    from pydantic import ValidationError

    from ballast_operator.api.costs.spot_limits import SpotLimits

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
    from ballast_operator.allocator.problem.capacity_types import spot_limits

    return dataclasses.replace(snapshot, spot=spot_limits(policy.spec, snapshot.capacity.kinds))


def priced_pools(
    snapshot: "Snapshot",
) -> "tuple[list[PricedPool], dict[str, Mapping[str, float]]]":
    """(the pools with their regions, if data has to be paid for; job -> pool -> what a step's data costs)."""
    besides = {job.name: job.usd_per_step for job in snapshot.jobs if job.usd_per_step}
    regions = snapshot.capacity.regions if besides else {}
    pools = [dataclasses.replace(pool, region=regions.get(pool.pool, "")) for pool in snapshot.usable_pools]
    return pools, besides
