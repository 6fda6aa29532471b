"""Speeds of a gang by the number of nodes that it is on (dissertation section 5.3.1).

The ranks of a gang on one node exchange data faster than those on several: these are different speeds, and
what was measured of one is not taken for the other. Gavel has two of them in its tables, ``v100`` and
``v100_unconsolidated``; here the number of nodes is in the name, as nodes of a cluster have unlike sizes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping

from ballast_policies.throughput.estimator import PRIOR_DEVIATION
from ballast_policies.throughput.track import Estimate

Speeds = Mapping[tuple[str, int], Estimate]
"""(name of a GPU type with a number of nodes, GPUs) -> what is known of it."""

_OVER, _NODES = " over ", " nodes"


def placed_name(gpu_type: str, nodes: int) -> str:
    """Under which name a speed on that many nodes is kept: the type's own for one node."""
    return gpu_type if nodes <= 1 else f"{gpu_type}{_OVER}{nodes}{_NODES}"


@functools.lru_cache(maxsize=4096)
def read_placed_name(name: str) -> tuple[str, int]:
    """(GPU type, number of nodes) of a name by :func:`placed_name`."""
    gpu_type, _, rest = name.partition(_OVER)
    count = rest.removesuffix(_NODES)
    return (gpu_type, int(count)) if count.isdecimal() else (name, 1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PackedSpeeds:
    """What speeds by number of nodes say of gangs that are on as few nodes as possible.

    Attributes:
        known: (GPU type, GPUs) -> measured there, or on more or fewer nodes of which like jobs have shown how
            the two compare.
        at_least: measured on more nodes only: a gang on fewer is no slower.
        at_most: measured on fewer nodes only.
    """

    known: dict[tuple[str, int], Estimate] = dataclasses.field(default_factory=dict)
    at_least: dict[tuple[str, int], Estimate] = dataclasses.field(default_factory=dict)
    at_most: dict[tuple[str, int], Estimate] = dataclasses.field(default_factory=dict)


def packed_speeds(
    speeds: Speeds, fewest: Callable[[str, int], int | None], like: Speeds | None = None
) -> PackedSpeeds:
    """The speeds of gangs on as few nodes as possible.

    Args:
        speeds: by number of nodes.
        fewest: (GPU type, GPUs) -> nodes that hold such a gang; None: unknown, the fewest measured count.
        like: speeds that jobs of the same kind have reported.
    """
    found, others = PackedSpeeds(), {}
    for (name, gpus), estimate in speeds.items():  # most were measured where they are asked for
        gpu_type, nodes = read_placed_name(name)
        if nodes == fewest(gpu_type, gpus):
            found.known[gpu_type, gpus] = estimate
        else:
            others[name, gpus] = estimate
    for at, by_nodes in _by_nodes(others).items():
        if at in found.known:
            continue
        gpu_type, gpus = at
        wanted = fewest(gpu_type, gpus) or min(by_nodes)
        if wanted in by_nodes:
            found.known[at] = by_nodes[wanted]
            continue
        for nodes in sorted(by_nodes, key=lambda nodes: abs(nodes - wanted)):
            ratio = _ratio(like or {}, gpu_type, gpus, nodes, wanted)
            if ratio is not None and at not in found.known:
                found.known[at] = _scaled(by_nodes[nodes], ratio)
            (found.at_least if nodes > wanted else found.at_most).setdefault(at, by_nodes[nodes])
    return found


def bounded(prior: Estimate | None, at_least: Estimate | None, at_most: Estimate | None) -> Estimate | None:
    """What bounds say against ``prior``; None: nothing, it is within them."""
    if prior is None:
        guess = at_least or at_most
        return None if guess is None else _scaled(guess, 1.0)
    if at_least is not None and prior.steps_per_second < at_least.steps_per_second:
        return _scaled(at_least, 1.0)
    if at_most is not None and prior.steps_per_second > at_most.steps_per_second:
        return _scaled(at_most, 1.0)
    return None


def speed_on(
    nodes: int,
    gpu_type: str,
    gpus: int,
    *,
    packed: float,
    fewest: int,
    own: Speeds,
    like: Speeds,
) -> float:
    """Steps/s of a gang on ``nodes`` nodes: as reported there, else as like jobs' speeds compare.

    Where neither has run so, by the nearest number of nodes beyond the fewest; ``packed`` where nothing is
    known: then it is not known that more nodes make the gang slower.

    Args:
        nodes: that the gang is on.
        gpu_type: of its GPUs.
        gpus: of the gang.
        packed: its steps/s on the fewest nodes.
        fewest: nodes that hold it.
        own: what the job has reported.
        like: what jobs of its kind have reported.
    """
    reported = own.get((placed_name(gpu_type, nodes), gpus))
    if reported is not None:
        return reported.steps_per_second
    if nodes <= fewest:
        return packed
    ratio = _ratio(like, gpu_type, gpus, fewest, nodes)
    if ratio is not None:
        return packed * ratio
    mine = {n: e for n, e in _by_nodes(own).get((gpu_type, gpus), {}).items() if n > fewest}
    if mine:
        return mine[min(mine, key=lambda n: (abs(n - nodes), n))].steps_per_second
    theirs = _by_nodes(like).get((gpu_type, gpus), {})
    beyond = sorted((n for n in theirs if n > fewest), key=lambda n: (abs(n - nodes), n))
    if fewest in theirs and beyond:
        return packed * theirs[beyond[0]].steps_per_second / theirs[fewest].steps_per_second
    return packed


def _by_nodes(speeds: Speeds) -> dict[tuple[str, int], dict[int, Estimate]]:
    found: dict[tuple[str, int], dict[int, Estimate]] = {}
    for (name, gpus), estimate in speeds.items():
        gpu_type, nodes = read_placed_name(name)
        found.setdefault((gpu_type, gpus), {})[nodes] = estimate
    return found


def _ratio(like: Speeds, gpu_type: str, gpus: int, known: int, wanted: int) -> float | None:
    """Speed on ``wanted`` nodes over that on ``known`` ones; None: like jobs have not run on both."""
    there = like.get((placed_name(gpu_type, wanted), gpus))
    here = like.get((placed_name(gpu_type, known), gpus))
    if there is None or here is None or here.steps_per_second <= 0:
        return None
    return there.steps_per_second / here.steps_per_second


def _scaled(estimate: Estimate, ratio: float) -> Estimate:
    """No measurement any more: another placement's, times ``ratio``."""
    return Estimate(
        steps_per_second=estimate.steps_per_second * ratio,
        deviation=math.hypot(estimate.deviation, PRIOR_DEVIATION),
        source="prior",
    )
