"""GPUs to stages: all placements where they are few, and likely good ones where they are many."""

import itertools
from collections import Counter
from collections.abc import Iterator
from math import factorial, prod

import numpy as np

from ballast_policies.planning.planners.cost_model import StageGpus
from ballast_policies.planning.planners.layout import Devices, Groups

Placement = tuple[Groups, ...]


def every_placement(devices: Devices, tensor: int, data: int, stages: int, *, most: int) -> np.ndarray | None:
    """All placements that differ in what matters, shape (n, stages, data, tensor); None: more than ``most``.

    GPUs of one type in one server are alike, and so are servers with the same GPUs.
    """
    classes: dict[tuple[int, float, float], list[int]] = {}
    for gpu, key in enumerate(zip(devices.servers, devices.speeds, devices.memory, strict=True)):
        classes.setdefault(key, []).append(gpu)
    content: dict[int, tuple[tuple[float, float, int], ...]] = {}
    for (server, speed, memory), gpus in classes.items():
        content[server] = (*content.get(server, ()), (speed, memory, len(gpus)))
    slots = tensor * data * stages
    alike = Counter(content.values())
    if _count([len(gpus) for gpus in classes.values()], slots) > most * prod(map(factorial, alike.values())):
        return None
    found: list[list[int]] = []
    for sequence in _sequences(list(classes), [len(gpus) for gpus in classes.values()], content, slots):
        found.append(sequence)
        if len(found) > most:
            return None
    members = list(classes.values())
    placed = []
    for sequence in found:
        taken = [iter(gpus) for gpus in members]
        placed.append([next(taken[index]) for index in sequence])
    return np.array(placed).reshape(len(placed), stages, data, tensor)


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
    classes: list[tuple[int, float, float]],
    left: list[int],
    content: dict[int, tuple[tuple[float, float, int], ...]],
    slots: int,
) -> Iterator[list[int]]:
    """Sequences of classes; of servers alike and not yet used, only the first may come next."""
    opened: dict[int, int] = dict.fromkeys(content, 0)
    chosen: list[int] = []

    def extend() -> Iterator[list[int]]:
        if len(chosen) == slots:
            yield list(chosen)
            return
        fresh: set[tuple[tuple[float, float, int], ...]] = set()
        new: dict[int, bool] = {}
        for index, (server, _, _) in enumerate(classes):
            if not left[index]:
                continue
            if not opened[server]:
                if server not in new:
                    new[server] = content[server] not in fresh
                    fresh.add(content[server])
                if not new[server]:
                    continue
            left[index] -= 1
            opened[server] += 1
            chosen.append(index)
            yield from extend()
            chosen.pop()
            opened[server] -= 1
            left[index] += 1

    return extend()


def unlike(devices: Devices, placements: np.ndarray) -> tuple[StageGpus, np.ndarray]:
    """The stages' GPUs of the placements that differ for the cost model, shape (n, p), and their numbers."""
    speeds, memory = np.asarray(devices.speeds), np.asarray(devices.memory)
    server = np.asarray(devices.servers)[placements]
    # A stage is as slow as its slowest link, which may be the one inside a server.
    slowest = np.all if devices.inside >= devices.between else np.any
    inside_tensor = slowest((server == server[..., :1]).all(axis=3), axis=2)
    inside_data = slowest((server == server[:, :, :1, :]).all(axis=2), axis=2)
    same = slowest(server[:, 1:] == server[:, :-1], axis=(2, 3))
    speed, held = speeds[placements].min(axis=(2, 3)), memory[placements].min(axis=(2, 3))
    features = np.concatenate([speed, held, inside_tensor, inside_data, same], axis=1)
    _, first = np.unique(features, axis=0, return_index=True)
    first = np.sort(first)

    def link(inside: np.ndarray, members: int) -> np.ndarray:
        if members == 1:
            return np.full(inside.shape, np.inf)
        return np.where(inside, devices.inside, devices.between)

    _, _, data, tensor = placements.shape
    return (
        StageGpus(
            speed=speed[first],
            memory=held[first],
            tensor_link=link(inside_tensor[first], tensor),
            data_link=link(inside_data[first], data),
            boundary_link=np.where(same[first], devices.inside, devices.between),
        ),
        first,
    )


def likely_placements(devices: Devices, tensor: int, data: int, stages: int) -> list[Placement]:
    """Placements worth a look: the fastest groups, replicas or pipelines together, orders by speed.

    Groups of ``tensor`` GPUs are of one type in one server as far as there are enough.
    """
    groups = _tensor_groups(devices, tensor)
    need = data * stages
    found: dict[Placement, None] = {}
    for key in ("speed", "memory"):
        ranked = sorted(groups, key=lambda group: _rank(devices, group, key))[:need]
        if len(ranked) < need:
            continue
        together = [tuple(ranked[i * data : (i + 1) * data]) for i in range(stages)]
        for blocks in (together, together[::-1], _spread(together)):
            found[tuple(blocks)] = None
        if data > 1:
            by_server = sorted(ranked, key=lambda group: devices.servers[group[0]])
            apart = [tuple(by_server[k * stages + i] for k in range(data)) for i in range(stages)]
            found[tuple(apart)] = None
            across = [tuple(ranked[k * stages + i] for k in range(data)) for i in range(stages)]
            found[tuple(across)] = None
    in_order = sorted(sorted(groups, key=lambda g: _rank(devices, g, "speed"))[:need])
    if len(in_order) == need:
        found[tuple(tuple(in_order[i * data : (i + 1) * data]) for i in range(stages))] = None
    return list(found)


def _rank(devices: Devices, group: tuple[int, ...], key: str) -> tuple[float, float, int]:
    speed = -min(devices.speeds[gpu] for gpu in group)
    memory = -min(devices.memory[gpu] for gpu in group)
    pair = (speed, memory) if key == "speed" else (memory, speed)
    return (*pair, group[0])


def _tensor_groups(devices: Devices, tensor: int) -> list[tuple[int, ...]]:
    """Disjoint groups: of one type in a server, then what is left of a server, then what is left of all."""
    found: list[tuple[int, ...]] = []
    over = list(range(devices.count))
    for key in (
        lambda gpu: (devices.servers[gpu], -devices.speeds[gpu], -devices.memory[gpu]),
        lambda gpu: (devices.servers[gpu],),
        lambda gpu: (),
    ):
        over.sort(key=lambda gpu: (*key(gpu), -devices.speeds[gpu], gpu))
        rest: list[int] = []
        for _, same in itertools.groupby(over, key=key):
            gpus = list(same)
            whole = len(gpus) // tensor * tensor
            found += [tuple(gpus[i : i + tensor]) for i in range(0, whole, tensor)]
            rest += gpus[whole:]
        over = rest
    return found


def _spread(blocks: list[Groups]) -> list[Groups]:
    """The fastest and the slowest in turn."""
    half = (len(blocks) + 1) // 2
    mixed: list[Groups] = []
    for index in range(half):
        mixed.append(blocks[index])
        if half + index < len(blocks):
            mixed.append(blocks[half + index])
    return mixed
