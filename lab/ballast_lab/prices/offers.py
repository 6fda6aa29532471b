"""Offers to rent: instances of a cloud in a zone, and their pools."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Offer:
    """One thing to rent.

    Attributes:
        zone: availability zone; where a log has only regions, the region.
        spot: may be taken away; else on demand.
    """

    cloud: str
    region: str
    zone: str
    instance: str
    gpu_type: str
    gpus: int
    spot: bool

    @property
    def pool(self) -> "Pool":
        """The group of machines whose availability it shares."""
        return Pool(cloud=self.cloud, zone=self.zone, gpu_type=self.gpu_type, gpus=self.gpus)

    def __str__(self) -> str:
        return f"{self.cloud}/{self.zone}/{self.instance}/{'spot' if self.spot else 'on-demand'}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Pool:
    """Machines of one kind in one zone, as availability logs name them."""

    cloud: str
    zone: str
    gpu_type: str
    gpus: int

    def __str__(self) -> str:
        return f"{self.cloud}/{self.zone}/{self.gpus} x {self.gpu_type}"
