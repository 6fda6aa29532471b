"""Shapes of a plan - degrees, microbatches, recomputation - and the placements of GPUs on their stages.

The bound of a shape with p stages of g = t r GPUs, m microbatches a pipeline: sorted by speed, the j-th g
GPUs have a slowest one of speed s_j, and no way to form stages has faster ones.  A stage is busy for all m
microbatches and then exchanges its gradients, so with w, q and x the model's work, all-reduces and exchange

    T >= (m w + s_{p-1} (m q + x)) / (s_0 + ... + s_{p-1})

(where all groups are inside servers, s_j are the speeds of such groups)
and so for the largest layer alone on the fastest GPUs.  And since the first backward of stage i waits for
the microbatch's way to the last stage and back, and all m - 1 other backwards and the forwards that were
not done before them follow, T >= sum t + (m - 1) b_i + (m - p + i) f_i for every stage i, one of which
has the largest load c >= (w + s_{p-1} q) / (s_0 + ... + s_{p-1}).  The sum of t is least, for a given c,
where the fastest stages take c each.

GPUs to stages: all placements where they are few, and likely good ones where they are many.  A stage's GPUs
are of one type, and the stages of a type follow each other, as the ranks of a gang in several pools do.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from math import factorial, prod

import numpy as np

from ballast_policies.contract.limits import MOST_MICROBATCHES, MOST_REPLICAS
from ballast_policies.planning.planners.cost_model import RECOMPUTED, CostModel, Degrees, StageGpus
from ballast_policies.planning.planners.layout import Devices, Groups
from ballast_policies.planning.profile import repeated_layers


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """Degrees and the number of stages; ``bound``: seconds that a step takes at least."""

    degrees: Degrees
    stages: int
    bound: float


def divisors(number: int) -> list[int]:
    """Divisors in ascending order."""
    small = [k for k in range(1, int(number**0.5) + 1) if number % k == 0]
    return small + [number // k for k in reversed(small) if k * k != number]


def all_shapes(
    model: CostModel,
    batch_size: int,
    most_tensor: int,
    *,
    limit: float = float("inf"),
    least_tensor: int = 1,
) -> list[Shape]:
    """Every shape that fits the number of GPUs and whose bound is below ``limit``, the least bound first.

    A pipeline has at most as many stages as microbatches, as the trainer's 1F1B demands it, and a job no
    more replicas and microbatches than it may have.
    """
    devices = model.devices
    layers = _Layers(model)
    found: list[Shape] = []
    for tensor in range(least_tensor, min(most_tensor, devices.count) + 1):
        for data in divisors(batch_size):
            if tensor * data > devices.count or data > MOST_REPLICAS:
                break
            sizes = np.array(divisors(batch_size // data))
            sizes = sizes[batch_size // sizes <= MOST_MICROBATCHES]
            microbatches = batch_size // data // sizes
            choices = _choices(devices, tensor, data)
            for recompute in (each for each in RECOMPUTED if each <= model.layers):
                bounds = np.full((len(sizes), model.layers), np.inf)
                for choice in choices:
                    least = layers.bounds(tensor, data, recompute, sizes, microbatches, choice)
                    width = least.shape[1]
                    bounds[:, :width] = np.minimum(bounds[:, :width], least)
                if model.measured is not None:
                    measured = _measured(model, tensor, recompute, sizes, microbatches)
                    bounds = np.where(np.isinf(bounds), np.inf, measured)
                for size, count, row in zip(sizes.tolist(), microbatches.tolist(), bounds, strict=True):
                    degrees = Degrees(tensor, data, size, count, recompute)
                    found += [
                        Shape(degrees, stages, bound)
                        for stages, bound in enumerate(row[:count].tolist(), start=1)
                        if bound < limit
                    ]
    return sorted(found, key=lambda shape: (shape.bound, shape.degrees.recompute, shape.stages))


def _measured(
    model: CostModel, tensor: int, recompute: int, sizes: np.ndarray, microbatches: np.ndarray
) -> np.ndarray:
    """The bounds where layers were measured by GPU type: each layer on the type that is fastest at it.

    With w their seconds of a microbatch and c the largest load, T >= m c, T >= w + (m - p) c and c >= w / p.
    """
    assert model.measured is not None
    found, p = np.full((len(sizes), model.layers), np.inf), np.arange(1, model.layers + 1)
    again = 1 + repeated_layers(model.layers, recompute)
    for row, (size, m) in enumerate(zip(sizes.tolist(), microbatches.tolist(), strict=True)):
        known = [model.measured.sums(kind, tensor, size) for kind in model.devices.kinds]
        each = [again * np.diff(sums[0]) + np.diff(sums[1]) for sums in known if sums is not None]
        if each:
            work = np.min(each, axis=0)
            load = np.maximum(work.sum() / p, work.max())
            found[row] = np.maximum(m * load, work.sum() + np.maximum(m - p, 0) * load)
    return np.asarray(found * (1 - 1e-12))


@dataclasses.dataclass(frozen=True, slots=True)
class _Choice:
    """A way to take GPUs: by stage, a speed that none exceeds, and the links (tensor, data) that it may have.

    ``slow_tensor``: some stage's tensor-parallel groups are not inside a server; bytes/s of their links.
    """

    speeds: np.ndarray
    links: tuple[tuple[float, float], ...]
    slow_tensor: float | None = None


def _choices(devices: Devices, tensor: int, data: int) -> list[_Choice]:
    # Links inside servers may be the slower ones.
    inside_links, between_links = devices.links_of_types()
    slow, fast = float(between_links.max()), float(max(inside_links.max(), between_links.max()))
    servers: dict[int, list[float]] = {}
    for server, speed in zip(devices.servers, devices.speeds, strict=True):
        servers.setdefault(server, []).append(speed)
    largest = max(len(speeds) for speeds in servers.values())
    found = []
    inside = sorted(
        (
            speed
            for speeds in servers.values()
            for speed in sorted(speeds, reverse=True)[tensor - 1 :: tensor]
        ),
        reverse=True,
    )
    together = fast if tensor * data <= largest or (tensor == 1 and data <= largest) else slow
    if len(inside) >= data:
        found.append(_Choice(np.array(inside[data - 1 :: data]), ((fast, together),)))
    if tensor > 1:
        speeds = np.sort(np.asarray(devices.speeds))[::-1]
        peers = fast if data <= largest else slow
        links = ((slow, peers),) if tensor > largest else ((fast, together), (slow, peers))
        found.append(_Choice(speeds[tensor * data - 1 :: tensor * data], links, slow_tensor=slow))
    return found


class _Layers:
    """The layers' values, of which the bounds are made."""

    def __init__(self, model: CostModel) -> None:
        self.size, self.gathers = model.profiled_size, model.zero_stage == 3
        self.forward, self.backward = np.diff(model.F), np.diff(model.B)
        self.fixed_forward, self.fixed_backward = np.diff(model.O), np.diff(model.P)
        self.reduced, self.weights = np.diff(model.R), np.diff(model.W)
        whole = self.forward + self.backward + self.fixed_forward + self.fixed_backward
        self.share = (self.forward + self.fixed_forward) / np.maximum(whole, np.finfo(float).tiny)

    def bounds(
        self, t: int, r: int, recompute: int, sizes: np.ndarray, microbatches: np.ndarray, choice: _Choice
    ) -> np.ndarray:
        """Bounds by microbatch size and number of stages, shape (sizes, most stages)."""
        scale, m = (sizes / self.size)[:, None], microbatches[:, None]
        again = 1 + repeated_layers(len(self.forward), recompute)
        speeds = choice.speeds[: len(self.forward)]
        work = again * (scale / t * self.forward + self.fixed_forward)
        work = work + scale / t * self.backward + self.fixed_backward
        bytes_reduced = (again + 1) * (t - 1) / t * scale * self.reduced
        bytes_exchanged = 2 * (r - 1) / r * self.weights / t
        # What a layer's transfers keep its stage busy with, over the links that suit it best.
        others = np.min([m * bytes_reduced / q + bytes_exchanged / x for q, x in choice.links], axis=0)
        reduced = bytes_reduced / max(q for q, _ in choice.links)
        # The forward's part of a layer, without and with recomputation; of the all-reduces: 1 / 2, 1 / 3.
        share = (self.share / (1 + (again - 1) * self.share)).max()
        if reduced.any() or self.gathers:
            share = max(share, (1 / (1 + again)).max())
        w, q = work.sum(axis=1, keepdims=True), reduced.sum(axis=1, keepdims=True)
        one = work / speeds[0] + reduced
        total = np.cumsum(speeds)
        busy = (m * w + speeds * others.sum(axis=1, keepdims=True)) / total
        busy = np.maximum(busy, (m * work / speeds[0] + others).max(axis=1, keepdims=True))
        load = np.maximum((w + speeds * q) / total, one.max(axis=1, keepdims=True))
        if choice.slow_tensor is not None:
            slow = (work / speeds[0] + bytes_reduced / choice.slow_tensor).min(axis=1, keepdims=True)
            load, busy = np.maximum(load, slow), np.maximum(busy, m * slow)
        stages = np.arange(1, len(speeds) + 1)
        after = np.maximum((m - 1) * (1 - share), (m - 1) - (stages - 1) * share)
        bounds = np.maximum(busy, q + _filled(w[:, 0], total, load, after))
        return np.asarray(bounds * (1 - 1e-12))


def _filled(work: np.ndarray, total: np.ndarray, load: np.ndarray, after: np.ndarray) -> np.ndarray:
    """The least sum of t + after x c for c >= load, where no stage takes more than c.

    The sum is least where the fastest stages are full: K of them at c = work / total_K, where it is K c;
    it is convex and linear in between, so that the least is at one of these c or at the load itself.
    """
    stages = np.arange(1, len(total) + 1)
    full = work[:, None] / total
    found = np.empty_like(load)
    for row, points in enumerate(full):
        least = np.interp(load[row], points[::-1], (stages * points)[::-1])
        # [stages, K]: at K full stages, where that is a load above the least one.
        at = np.where(
            points[None, :] >= load[row][:, None], (stages + after[row][:, None]) * points[None, :], np.inf
        )
        found[row] = np.minimum(least + after[row] * load[row], at.min(axis=1))
    return found


Placement = tuple[Groups, ...]

_MOST_ORDERS = 24
"""Orders of GPU types that are looked at where not all placements are."""


_Class = tuple[int, str, float, float]
"""Server, type, speed and memory of GPUs that are alike."""
_Content = tuple[tuple[object, ...], ...]
"""Content of a server: type, speed, memory and number of its GPUs."""


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
    """Number of sequences of ``slots`` that have at most the given number of each class."""
    if slots >= 150:
        # A float holds no factorial above 170's.
        return float("inf")
    ways = [1.0] + [0.0] * slots
    for count in counts:
        ways = [
            sum(ways[used - own] / factorial(own) for own in range(min(count, used) + 1))
            for used in range(slots + 1)
        ]
    return ways[slots] * float(factorial(slots))


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
        """True if the next slot may have the type: those left have to be enough for the stages left."""
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


def distinct_placements(devices: Devices, placements: np.ndarray) -> tuple[StageGpus, np.ndarray]:
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
