"""How far a cluster may depend on spot machines."""

from typing import Annotated

from pydantic import Field

from ballast_operator.api.base import ApiModel


class SpotLimits(ApiModel):
    """What may be started on spot machines, under every policy. Nothing that runs is stopped for it."""

    on_demand_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Part of the GPUs in use that are not spot, at least: with 0.3 a gang is started on spot machines only
    where at most 0.7 of all GPUs in use are spot afterwards."""
    most_in_one_pool: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Part of the spot GPUs in use that are in one pool, or in one zone of a pool whose nodes have the label
    ``topology.kubernetes.io/zone``, at most, without the last gang that was started there: otherwise no gang
    could be the first."""
