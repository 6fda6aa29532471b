"""Prices that are asked of a cloud, and prices of machines as prices of GPUs."""

import dataclasses

from ballast_policies.prices.offers import PriceLogError, built_in_catalogue

USD = "USD"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AwsSpotPrice:
    """The present spot price of an instance type, in USD.

    Attributes:
        zone: availability zone; empty: the mean over the region's zones.
    """

    region: str
    instance_type: str
    zone: str = ""

    def __str__(self) -> str:
        return f"aws/{self.zone or self.region}/{self.instance_type}"

    @property
    def machine(self) -> tuple[str, str]:
        """Its key in a catalogue."""
        return "aws", self.instance_type


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AzurePrice:
    """The retail price of a VM size with Linux.

    Attributes:
        vm_size: as Azure's API has it, e.g. ``Standard_NC6s_v3``.
        spot: the price of spot machines; else on demand.
    """

    region: str
    vm_size: str
    spot: bool
    currency: str = USD

    def __str__(self) -> str:
        return f"azure/{self.region}/{self.vm_size}/{'spot' if self.spot else 'onDemand'}"

    @property
    def machine(self) -> tuple[str, str]:
        """Its key in a catalogue."""
        return "azure", self.vm_size.removeprefix("Standard_").replace("_", " ")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GcpPrice:
    """The list price of what one GPU comes with.

    Attributes:
        skus: (id of a SKU, its amount for one GPU): the GPU itself, cores and GiB of memory.
    """

    skus: tuple[tuple[str, float], ...]
    currency: str = USD

    def __str__(self) -> str:
        return "gcp/" + "+".join(f"{amount:g}*{sku}" for sku, amount in self.skus)


Wanted = AwsSpotPrice | AzurePrice | GcpPrice


def gpus_of(wanted: Wanted, gpus_per_node: int | None) -> int:
    """GPUs that the price of ``wanted`` is for.

    Args:
        wanted: the price of a machine, or of one GPU.
        gpus_per_node: as the pool states it; None: as the built-in catalogue does.

    Raises:
        PriceLogError: neither says it.
    """
    if isinstance(wanted, GcpPrice):
        return 1
    if gpus_per_node is not None:
        return gpus_per_node
    known = built_in_catalogue().get(wanted.machine)
    if known is None:
        raise PriceLogError(
            f"{wanted}: how many GPUs a machine has is not known. To fix: set gpusPerNode of the pool"
        )
    return known.gpus
