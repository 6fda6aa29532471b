"""GPUs to stages: all placements where they are few, and likely good ones where they are many.

A stage's GPUs are of one type, and the stages of a type follow each other, as the ranks of a gang in several
pools do.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from math import factorial, prod

import numpy as np

from ballast_policies.planning.planners.cost_model import StageGpus
from ballast_policies.planning.planners.layout import Devices, Groups

Placement = tuple[Groups, ...]

_MOST_ORDERS = 24
"""Orders of GPU types that are looked at where not all placements are."""


_Class = tuple[int, str, float, float]
"""Server, type, speed and memory of GPUs that are alike."""
_Content = tuple[tuple[object, ...], ...]
"""Of a server: type, speed, memory and number of its GPUs."""


def every_placement(devices: Devices, tensor: int, data: int, stages: int, *, most: int) -> np.ndarray | None:
    """All placements that differ in what matters, shape (n, stages, data, tensor); None: more than ``most``.

    GPUs of one type in one server are alike, and so are servers with the same GPUs.
    """
    classes: dict[_Class, list[int]] = {}
    for gpu, key in enumerate(
        zip(devices.servers, devices.types, devices.speeds, devices.memory, strict=True)
    ):
        classes.setdefault(key, []).append(gpu)
    content: dict[int, _Content] = {}
    for (server, *alike), gpus in classes.items():
        content[server] = (*content.get(server, ()), (*alike, len(gpus)))
    counts, each = [len(gpus) for gpus in classes.values()], tensor * data
    if len(set(devices.types)) == 1:
        servers = prod(map(factorial, Counter(content.values()).values()))
        if _count(counts, each * stages) > most * servers:
            return None
    found: list[list[int]] = []
    for sequence in _sequences(list(classes), counts, content, each, stages):
        found.append(sequence)
        if len(found) > most:
            return None
    members = list(classes.values())
    placed = []
    for sequence in found:
        taken = [iter(gpus) for gpus in members]
        placed.append([next(taken[index]) for index in sequence])
    return np.array(placed, dtype=int).reshape(len(placed), stages, data, tensor)


def _count(counts: list[int], slots: int) -> float:
    """How many sequences of ``slots`` have at most the given number of each class."""
    ways = [1.0] + [0.0] * slots
    for count in counts:
        ways = [
            sum(ways[used - own] / factorial(own) for own in range(min(count, used) + 1))
            for used in range(slots + 1)
        ]
    return ways[slots] * float(factorial(slots)) if slots < 150 else float("inf")


def _sequences(
    classes: list[_Class], left: list[int], content: dict[int, _Content], each: int, stages: int
) -> Iterator[list[int]]:
    """Sequences of classes; of servers alike and not yet used, only the first may come next.

    Every ``each`` slots are a stage; a type that another has followed does not come again.
    """
    opened: dict[int, int] = dict.fromkeys(content, 0)
    chosen: list[int] = []
    of_type: Counter[str] = Counter()
    for (_, gpu_type, _, _), count in zip(classes, left, strict=True):
        of_type[gpu_type] += count
    done: list[str] = []

    def may_follow(gpu_type: str) -> bool:
        """Whether the next slot may have the type: those left have to be enough for the stages left."""
        if done and gpu_type == done[-1]:
            return len(chosen) % each > 0 or of_type[gpu_type] >= each
        if len(chosen) % each or gpu_type in done or of_type[gpu_type] < each:
            return False
        rest = sum(count // each for other, count in of_type.items() if other not in done)
        return rest >= stages - len(chosen) // each

    def extend() -> Iterator[list[int]]:
        if len(chosen) == each * stages:
            yield list(chosen)
            return
        fresh: set[_Content] = set()
        new: dict[int, bool] = {}
        for index, (server, gpu_type, _, _) in enumerate(classes):
            if not left[index] or not may_follow(gpu_type):
                continue
            if not opened[server]:
                if server not in new:
                    new[server] = content[server] not in fresh
                    fresh.add(content[server])
                if not new[server]:
                    continue
            begins = not done or done[-1] != gpu_type
            if begins:
                done.append(gpu_type)
            left[index] -= 1
            of_type[gpu_type] -= 1
            opened[server] += 1
            chosen.append(index)
            yield from extend()
            chosen.pop()
            opened[server] -= 1
            of_type[gpu_type] += 1
            left[index] += 1
            if begins:
                done.pop()

    return extend()


def unlike(devices: Devices, placements: np.ndarray) -> tuple[StageGpus, np.ndarray]:
    """The stages' GPUs of the placements that differ for the cost model, shape (n, p), and their numbers."""
    speeds, memory = np.asarray(devices.speeds), np.asarray(devices.memory)
    server = np.asarray(devices.servers)[placements]
    kinds = devices.kinds
    # All GPUs of a stage are of one type.
    kind = np.array([kinds.index(name) for name in devices.types])[placements[:, :, 0, 0]]
    inside, between = devices.links_of_types()
    _, _, data, tensor = placements.shape

    def link(same_server: np.ndarray, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        """The slowest link of each stage, shape (n, stages)."""
        wide = (..., *(None,) * (same_server.ndim - 2))
        each = np.where(same_server, inside[one, other][wide], between[one, other][wide])
        return np.asarray(each.min(axis=tuple(range(2, each.ndim))))

    free = np.full(kind.shape, np.inf)
    found = StageGpus(
        speed=speeds[placements].min(axis=(2, 3)),
        types=1 << kind,
        memory=memory[placements].min(axis=(2, 3)),
        tensor_link=link((server == server[..., :1]).all(axis=3), kind, kind) if tensor > 1 else free,
        data_link=link((server == server[:, :, :1, :]).all(axis=2), kind, kind) if data > 1 else free,
        boundary_link=link(server[:, 1:] == server[:, :-1], kind[:, :-1], kind[:, 1:]),
    )
    features = [getattr(found, field.name) for field in dataclasses.fields(found)]
    _, first = np.unique(np.concatenate(features, axis=1), axis=0, return_index=True)
    first = np.sort(first)
    return found.some(first), first


def likely_placements(devices: Devices, tensor: int, data: int, stages: int) -> list[Placement]:
    """Placements worth a look: the fastest groups, replicas or pipelines together, types in any order.

    Groups of ``tensor`` GPUs are in one server as far as there are enough.
    """
    found: dict[Placement, None] = {}
    for key in ("speed", "memory"):
        left, shares = stages, dict[str, int]()
        for gpu_type in sorted(
            set(devices.types), key=lambda t: _rank(devices, (devices.types.index(t),), key)
        ):
            own = min(left, devices.types.count(gpu_type) // (tensor * data))
            if own:
                shares[gpu_type] = own
                left -= own
        if left:
            continue
        of_type = {t: _of_one_type(devices, t, (tensor, data, own), key) for t, own in shares.items()}
        for order in itertools.islice(itertools.permutations(of_type), _MOST_ORDERS):
            for choice in zip(*(of_type[gpu_type] for gpu_type in order), strict=True):
                found[tuple(itertools.chain.from_iterable(choice))] = None
    return list(found)


def _of_one_type(
    devices: Devices, gpu_type: str, degrees: tuple[int, int, int], key: str
) -> list[list[Groups]]:
    """Blocks of GPUs of a type for (tensor, data, stages), by several rules."""
    tensor, data, stages = degrees
    need = data * stages
    gpus = [gpu for gpu, other in enumerate(devices.types) if other == gpu_type]
    ranked = sorted(_tensor_groups(devices, gpus, tensor), key=lambda group: _rank(devices, group, key))
    ranked = ranked[:need]
    together = [tuple(ranked[i * data : (i + 1) * data]) for i in range(stages)]
    in_order = sorted(ranked)
    found = [together, [tuple(in_order[i * data : (i + 1) * data]) for i in range(stages)]]
    if data > 1:
        by_server = sorted(ranked, key=lambda group: devices.servers[group[0]])
        found += [
            [tuple(groups[k * stages + i] for k in range(data)) for i in range(stages)]
            for groups in (by_server, ranked)
        ]
    return found


def _rank(devices: Devices, group: tuple[int, ...], key: str) -> tuple[float, float, int]:
    speed = -min(devices.speeds[gpu] for gpu in group)
    memory = -min(devices.memory[gpu] for gpu in group)
    pair = (speed, memory) if key == "speed" else (memory, speed)
    return (*pair, group[0])


def _tensor_groups(devices: Devices, gpus: Sequence[int], tensor: int) -> list[tuple[int, ...]]:
    """Disjoint groups of GPUs of a type: inside servers, then of what is left of all."""
    found: list[tuple[int, ...]] = []
    rest: list[int] = []
    for _, same in itertools.groupby(
        sorted(gpus, key=devices.servers.__getitem__), devices.servers.__getitem__
    ):
        own = list(same)
        whole = len(own) // tensor * tensor
        found += [tuple(own[i : i + tensor]) for i in range(0, whole, tensor)]
        rest += own[whole:]
    return found + [tuple(rest[i : i + tensor]) for i in range(0, len(rest) // tensor * tensor, tensor)]
