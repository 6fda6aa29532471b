"""Random profiles and clusters: two levels of links, mixed GPUs, memory that is enough or not."""

import numpy as np
from ballast_policies.planning.planners.cost_model import CostModel
from ballast_policies.planning.planners.layout import devices_of
from ballast_policies.planning.profile import GpuKind, LayerProfile


def random_profile(random, layers):
    """Uneven layers; some without outputs, some without weights."""

    def between(low, high):
        return tuple(random.uniform(low, high, layers).tolist())

    return LayerProfile(
        forward_seconds=between(0.05, 1),
        backward_seconds=between(0.05, 2),
        held_bytes=between(0, 6),
        weight_bytes=between(0, 5) if random.random() < 0.8 else (0.0,) * layers,
        activation_bytes=between(0, 4) if random.random() < 0.8 else (0.0,) * layers,
        output_bytes=between(0, 4) if random.random() < 0.8 else (0.0,) * layers,
        overhead_seconds=between(0, 0.05) if random.random() < 0.4 else (),
    )


def random_kinds(random, most_gpus, *, memory=0.6, least=3.0, mixed=True):
    """One to three types."""
    kinds, left = [], most_gpus
    for name in "abc"[: int(random.integers(1, 4)) if mixed else 1]:
        if left:
            count = int(random.integers(1, left + 1))
            left -= count
            kinds.append(
                GpuKind(
                    gpu_type=name,
                    count=count,
                    speed=float(random.choice([0.4, 1, 1, 1.7, 2.5])),
                    memory_bytes=float(random.uniform(least, 40)) if random.random() < memory else None,
                )
            )
    return kinds


def random_model(random, *, most_gpus=5, most_layers=6, memory=0.6, mixed=True, inside=20.0, zero_stage=0):
    """A cost model of such an instance; ``inside``: bytes/s of links inside servers, where there are any."""
    profile = random_profile(random, int(random.integers(1, most_layers + 1)))
    kinds = random_kinds(random, most_gpus, memory=memory, mixed=mixed)
    count = sum(kind.count for kind in kinds)
    links = random.random() < 0.8
    devices = devices_of(
        kinds,
        gpus_per_server=int(random.integers(1, count + 1)) if random.random() < 0.7 else None,
        inside=inside if links else np.inf,
        between=float(random.choice([1, 3, 20])) if links else np.inf,
    )
    reduced = random.uniform(0, 4, profile.layers) if random.random() < 0.7 else np.zeros(profile.layers)
    size = int(random.choice([1, 2]))
    stage = zero_stage if any(profile.weight_bytes) else 0
    return CostModel(profile, tuple(reduced.tolist()), size, devices, zero_stage=stage)
