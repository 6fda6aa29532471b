"""Speed of a pipeline over GPUs of unlike speed and memory, with the stages that suit them.

With t_i the seconds of rank i's stage on its GPU and m microbatches, a step takes
((m - 1) max_i t_i + sum_i t_i) / m: the closed form of GPipe and 1F1B (``planning.step_time``).
"""

import dataclasses
import functools
import math

import numpy as np

from ballast_policies.planning.balancers.exact import exact_partition
from ballast_policies.planning.launch.launch_partition import UNLIMITED_BYTES
from ballast_policies.planning.memory.measured_layers import MeasuredLayers, PipelineForm
from ballast_policies.planning.memory.need import MOST_CUTS
from ballast_policies.planning.memory.stage_bytes import stage_bytes
from ballast_policies.planning.partition import Partition, PlanningError
from ballast_policies.planning.rank_capacity import RankCapacity
from ballast_policies.planning.step_time import predict_step_seconds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankGpu:
    """The GPU of a rank.

    Attributes:
        speed: relative to the others'.
        memory: bytes; infinite: not known.
    """

    speed: float
    memory: float = math.inf


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedPipeline:
    """A pipeline with one stage a rank that is to be launched.

    Attributes:
        layers: as measured; empty seconds: all alike; empty bytes: every cut fits.
        count: number of layers.
        form: its number of positions is not read.
        ranks_per_position: that share each position, on GPUs alike.
        cut: the only one that is launched; None: the best.
    """

    layers: MeasuredLayers
    count: int
    form: PipelineForm
    ranks_per_position: int = 1
    cut: Partition | None = None


@functools.lru_cache(maxsize=20_000)
def step_seconds(pipeline: LaunchedPipeline, ranks: tuple[RankGpu, ...]) -> float | None:
    """Seconds of a step under the best cut, in the layers' unit, where a GPU of speed 1 has speed 1.

    ``ranks``: one for each position.

    None: there are fewer layers than ranks, or no cut fits the memory.
    """
    count, layers = pipeline.count, pipeline.layers
    if not 1 <= len(ranks) <= count:
        return None
    known = len(layers.seconds) == count and sum(layers.seconds) > 0
    seconds = layers.seconds if known else (1.0,) * count
    speeds = np.array([rank.speed for rank in ranks])
    cut = pipeline.cut if pipeline.cut is not None and pipeline.cut.ranks == len(ranks) else None
    if cut is None and count * len(ranks) > MOST_CUTS:  # launched with even stages
        loads = np.full(len(ranks), sum(seconds) / len(ranks))
    else:
        capacity = RankCapacity(speeds=speeds.tolist())
        if len(layers.held_bytes) == count and any(math.isfinite(rank.memory) for rank in ranks):
            form = dataclasses.replace(pipeline.form, positions=len(ranks))
            capacity = dataclasses.replace(
                capacity,
                memory=[int(min(rank.memory, UNLIMITED_BYTES)) for rank in ranks],
                stage_bytes=stage_bytes(layers, form),
            )
        try:
            found = cut or exact_partition(seconds, len(ranks), capacity)
            if not (cut is None or capacity.memory is None or capacity.fits(cut)):
                return None
            loads = found.loads(seconds)
        except PlanningError:
            return None
    return predict_step_seconds(loads / speeds, max(1, pipeline.form.microbatches))
