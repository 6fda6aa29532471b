"""Node pools of a ``ClusterPolicy``: which nodes, what kind, at what price."""

import enum
import re
from typing import Annotated

from ballast_policies.contract.conditions import Cel, Rule, absent, at, given
from ballast_policies.contract.messages import GPU_RESOURCE
from pydantic import Field

from ballast_operator.api.base import LABEL_KEY, ApiModel, DnsLabel, GpuType, MemoryQuantity
from ballast_operator.api.costs import PriceFeed, Region


class SharingKind(enum.StrEnum):
    """Mechanism of a device plugin that lets two pods use one GPU."""

    TIME_SLICING = "TimeSlicing"
    """Turns of milliseconds; their memory is not separated."""
    MPS = "MPS"
    """Refused as yet."""


class Sharing(ApiModel):
    """Sharing of a pool's GPUs."""

    RULES = (
        Rule(
            condition=at("kind") != SharingKind.MPS,
            field="kind",
            reason="sharing.kind MPS: under it a job that is alone has half of a GPU's memory and threads as "
            "well, and its speed would be taken for that of the whole GPU",
            fix="kind: TimeSlicing",
        ),
    )

    kind: SharingKind = SharingKind.TIME_SLICING
    """Kind of sharing that the device plugin is configured for."""
    jobs_per_gpu: Annotated[int, Field(ge=2, le=2)] = 2
    """Jobs on a GPU, at most: the plugin's ``replicas``."""


class SharesGpu(enum.StrEnum):
    """Consent of a job to share its GPU with another job."""

    NEVER = "Never"
    """Its GPU is its own."""
    ALLOWED = "Allowed"
    """The job may share in pools with ``sharing``, where both together do more than by turns."""


_LabelValue = Annotated[str, Field(max_length=63, pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$")]


class CapacityType(enum.StrEnum):
    """Permanence of a pool's nodes."""

    ON_DEMAND = "onDemand"
    """Paid on demand: the cloud takes none of them away."""
    SPOT = "spot"
    """They may be taken away at any time; jobs then resume from their checkpoint."""


class NodePool(ApiModel):
    """Nodes whose GPUs are alike."""

    RULES = (
        Rule(
            condition=absent("max_nodes") | given("gpus_per_node"),
            field="gpus_per_node",
            reason="maxNodes without gpusPerNode: what a node that does not exist yet would have is not "
            "known",
            fix="set gpusPerNode",
        ),
        Rule(
            condition=absent("gpus_per_node") | given("max_nodes") | given("price_feed"),
            field="gpus_per_node",
            reason="gpusPerNode without maxNodes has no effect: nodes that exist say what they have",
            fix="set maxNodes, or leave gpusPerNode out",
        ),
        Rule(
            condition=absent("sharing") | absent("max_nodes"),
            field="sharing",
            reason="sharing beside maxNodes: whether a node that does not exist yet will offer its GPU twice "
            "is not known",
            fix="leave maxNodes out, or sharing",
        ),
        Rule(
            condition=absent("price_feed.azure") | given("capacity_type"),
            field="capacity_type",
            reason="Azure lists spot machines and others, at two prices",
            fix="set capacityType",
        ),
        Rule(
            condition=absent("price_feed.aws") | (at("capacity_type") == CapacityType.SPOT),
            field="price_feed",
            reason="priceFeed.aws has prices of spot machines",
            fix="state pricePerGpuHour of machines on demand",
        ),
        Rule(
            condition=Cel(
                f"self.nodeSelector.all(key, size(key) <= 316 && key.matches('{LABEL_KEY}'))",
                lambda pool: all(
                    len(key) <= 316 and re.fullmatch(LABEL_KEY, key) for key in pool.node_selector
                ),
            ),
            field="node_selector",
            reason="a key of nodeSelector is no name of a label: no pod could be made there",
            fix="name labels as nodes have them",
        ),
        Rule(
            condition=absent("min_nodes"),
            field="min_nodes",
            reason="minNodes: nodes that stay while they are idle are a setting of the autoscaler",
            fix="set it there",
        ),
    )

    name: DnsLabel
    """The pool's name, unique in the policy."""
    node_selector: Annotated[dict[str, _LabelValue], Field(min_length=1, max_length=32)]
    """Labels that its nodes have, all of them. A node that matches two pools takes no gangs."""
    gpu_type: GpuType
    """Type of its GPUs; several pools may have the same."""
    gpu_resource: Annotated[
        str,
        Field(
            min_length=3,
            max_length=253,
            pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9][-A-Za-z0-9_.]*$",
        ),
    ] = GPU_RESOURCE
    """Resource that its nodes offer and pods ask for."""
    memory_per_gpu: MemoryQuantity | None = None
    """Memory of each of its GPUs, e.g. ``80G`` or ``15.5Gi``: a job is not placed where it does not fit.
    Absent: that of the catalogue (``ballast gpus``) for the GPU that the nodes' labels, or else
    ``gpuType``, name; ``status.capacity`` has what counts. Not known: memory is not looked at."""
    capacity_type: CapacityType | None = None
    """Permanence of its nodes. Absent: as the labels of its nodes say (Karpenter, EKS, GKE, AKS,
    ``ballast.dev/capacity-type``), else ``onDemand``; ``status.capacity`` has what counts."""
    region: Region | None = None
    """Region of its nodes, for jobs with ``spec.dataLocation``. Absent: by the nodes' label
    ``topology.kubernetes.io/region``, its selector, or its price feed; ``status.capacity`` has what
    counts."""
    max_nodes: Annotated[int, Field(ge=0, le=1000)] | None = None
    """Nodes that it may have: gangs are placed on those that do not exist, too, which an autoscaler
    (Karpenter, Cluster Autoscaler) adds. Absent: only nodes that exist count."""
    gpus_per_node: Annotated[int, Field(ge=1, le=1024)] | None = None
    """GPUs of a new node, for ``maxNodes`` or ``priceFeed``."""
    sharing: Sharing | None = None
    """Sharing of a GPU by two jobs, if both allow it (``sharesGpu``), on nodes with one GPU that the device
    plugin offers to two pods. Absent: nodes with shared GPUs take no gang."""
    start_seconds: Annotated[float, Field(ge=0, le=86_400)] = 180.0
    """Seconds from a new node's request until its pods run. A gang whose nodes have not come so long, and
    ``BALLAST_JOB_BIND_SECONDS``, after its launch is taken back (``NotBound``) and avoids such nodes of the
    pool for ten minutes."""
    price_per_gpu_hour: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Price of one GPU for one hour, in a currency of your choice; 0: not known. Beside ``priceFeed`` it
    counts until a price has been read."""
    price_feed: PriceFeed | None = None
    """Source of a price that changes. A price below a fiftieth or above twice of the GPU type's highest
    ``pricePerGpuHour`` is not used. Absent: ``pricePerGpuHour`` holds."""
    min_nodes: int | None = None
    """Refused: nodes that stay while they are idle are a setting of the autoscaler. To fix: set it there."""
