"""The request that a planner answers."""

import dataclasses

from ballast_policies.planning.planners.amp.model import DeviceGrid, LayerCost
from ballast_policies.planning.planners.cost_model import CostModel
from ballast_policies.planning.planners.layout import devices_of
from ballast_policies.planning.planners.pipedream import Level
from ballast_policies.planning.profile import GpuKind, LayerProfile


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What a planner plans from.

    Attributes:
        profile: the layers, of one microbatch.
        costs: the layers, of one sample, for planners that choose the microbatch's size.
        gpus: all of them are used, fastest first.
        bandwidth: bytes/s between neighbouring ranks; None: transfers are free.
        levels: GPUs of a server, then servers, of those that are full; None: links are not known.
        grid: the same GPUs with a column a server; None: the cluster's links are not known.
        microbatches: of a step.
        samples: of a step.
        schedule, chunks: the pipeline's schedule, and its stages a rank where it leaves them open.
        evaluations, seed: of a search.
        top: how many plans; None: as many as the planner shows.
        most_tensor: largest tensor-parallel degree.
        cost_model: judges plans; None: made of the profile and the GPUs, with free transfers.
    """

    profile: LayerProfile
    costs: tuple[LayerCost, ...]
    gpus: tuple[GpuKind, ...]
    bandwidth: float | None = None
    levels: tuple[Level, ...] | None = None
    grid: DeviceGrid | None = None
    microbatches: int = 8
    samples: int = 8
    schedule: str = "1F1B"
    chunks: int = 1
    evaluations: int = 200
    seed: int = 0
    top: int | None = None
    most_tensor: int = 1
    cost_model: CostModel | None = None

    @property
    def model(self) -> CostModel:
        """The one cost model, for this profile and cluster."""
        if self.cost_model is not None:
            return self.cost_model
        return CostModel(self.profile, (0.0,) * self.profile.layers, 1, devices_of(self.gpus))
