"""How fast a gang is on the nodes that it holds, where these are more than would do."""

from collections import Counter
from collections.abc import Mapping

from ballast_policies.rounds import SpreadGang

from ballast_operator.allocator.problem.capacity import ClusterCapacity
from ballast_operator.allocator.problem.speeds.requests import GangRequest
from ballast_operator.allocator.problem.throughput import Measurements
from ballast_operator.allocator.size_changes import may_move, restart_seconds
from ballast_operator.views.job import JobView


def spread_gang(
    view: JobView,
    request: GangRequest,
    measurements: Measurements,
    capacity: ClusterCapacity,
    packed: Mapping[str, float],
) -> SpreadGang | None:
    """The running gang as rounds see it, if it is on more nodes than would hold it; None: it is not.

    Also one on fewer than that, as on the last large node, which is cordoned: its speed is another, too.

    ``packed``: GPU type -> its steps/s with the GPUs that it has, on as few nodes as possible.
    """
    held = view.held_placement
    if held is None or held.parts:
        return None
    nodes, gpu_type, gpus = len(set(held.placement.nodes)), held.gpu_type, len(held.placement.nodes)
    fewest = request.fewest_nodes(gpu_type, gpus)
    here = capacity.node_sizes.in_pool(held.pool, gpus, per_pod=held.gpus_per_pod, barred=request.barred)
    if fewest is None or nodes == fewest or packed.get(gpu_type, 0.0) <= 0:
        return None
    fewest_here = min(nodes, here or nodes)
    return SpreadGang(
        at=held.placement,
        fewest=fewest_here,
        speed=measurements.speed_on(request, gpu_type, gpus, nodes, packed[gpu_type]),
        packed_speed=measurements.speed_on(request, gpu_type, gpus, fewest_here, packed[gpu_type]),
        restart_seconds=restart_seconds(view),
        may_move=may_move(view) and not view.leaving,
    )


def from_where_it_is(
    view: JobView,
    request: GangRequest,
    measurements: Measurements,
    capacity: ClusterCapacity,
    by_size: Mapping[str, Mapping[int, float]],
) -> dict[str, Mapping[int, float]]:
    """The speeds of a running elastic gang, if it shrinks and grows from where it is.

    It shrinks to the nodes of its first ranks, and grows on its own nodes if these have room, else on more.

    Args:
        view: the job.
        request: with the nodes of the pools.
        measurements: what was reported.
        capacity: of the pools.
        by_size: GPU type -> GPUs -> steps/s on as few nodes as possible.
    """
    held, found = view.held_placement, dict(by_size)
    if held is None or held.parts or held.gpu_type not in by_size:
        return found
    own = Counter(held.placement.nodes)
    free = (node.gpus - capacity.in_use.get(node.name, 0) for node in capacity.nodes if node.name in own)
    room = held.gpus + sum(free)
    here, losses = dict(by_size[held.gpu_type]), dict[int, float]()
    spread = []
    for size, rate in here.items():
        fewest = request.fewest_nodes(held.gpu_type, size)
        nodes = len(own) + (size > room)
        if size < held.gpus:
            nodes = len(set(held.placement.nodes[:size]))
        if fewest is not None and nodes > fewest and rate > 0:
            spread.append(size)
            known = measurements.speed_on(request, held.gpu_type, size, nodes, rate)
            if known != rate:
                losses[size] = known / rate
    for size in spread:
        # What another size loses on more nodes is the best guess for one that has not run there.
        if losses:
            here[size] *= losses[min(losses, key=lambda other: (abs(other - size), other))]
    found[held.gpu_type] = here
    return found
