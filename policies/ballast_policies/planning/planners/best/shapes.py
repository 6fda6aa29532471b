"""Shapes of a plan - degrees, microbatches, recomputation - and how long each takes at least.

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
"""

import dataclasses

import numpy as np

from ballast_policies.contract.limits import MOST_MICROBATCHES
from ballast_policies.planning.planners.cost_model import CostModel, Degrees
from ballast_policies.planning.planners.layout import Devices


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """Degrees and the number of stages; ``bound``: seconds that a step takes at least."""

    degrees: Degrees
    stages: int
    bound: float


def divisors(number: int) -> list[int]:
    """In ascending order."""
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

    A pipeline has at most as many stages as microbatches, as the trainer's 1F1B demands it, and a step no
    more microbatches than a job may have.
    """
    devices = model.devices
    layers = _Layers(model)
    found: list[Shape] = []
    for tensor in range(least_tensor, min(most_tensor, devices.count) + 1):
        for data in divisors(batch_size):
            if tensor * data > devices.count:
                break
            sizes = np.array(divisors(batch_size // data))
            sizes = sizes[batch_size // sizes <= MOST_MICROBATCHES]
            microbatches = batch_size // data // sizes
            choices = _choices(devices, tensor, data)
            for recompute in (False, True):
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
    model: CostModel, tensor: int, recompute: bool, sizes: np.ndarray, microbatches: np.ndarray
) -> np.ndarray:
    """The bounds where layers were measured by GPU type: each layer on the type that is fastest at it.

    With w their seconds of a microbatch and c the largest load, T >= m c, T >= w + (m - p) c and c >= w / p.
    """
    assert model.measured is not None
    found, p = np.full((len(sizes), model.layers), np.inf), np.arange(1, model.layers + 1)
    for row, (size, m) in enumerate(zip(sizes.tolist(), microbatches.tolist(), strict=True)):
        known = [model.measured.sums(kind, tensor, size) for kind in model.devices.kinds]
        each = [(1 + recompute) * np.diff(sums[0]) + np.diff(sums[1]) for sums in known if sums is not None]
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
        self.size = model.profiled_size
        self.forward, self.backward = np.diff(model.F), np.diff(model.B)
        self.fixed_forward, self.fixed_backward = np.diff(model.O), np.diff(model.P)
        self.reduced, self.weights = np.diff(model.R), np.diff(model.W)
        whole = self.forward + self.backward + self.fixed_forward + self.fixed_backward
        share = (self.forward + self.fixed_forward) / np.maximum(whole, np.finfo(float).tiny)
        # The forward's part of a layer, without and with recomputation; of the all-reduces: 1 / 2, 1 / 3.
        self.share = max(float(share.max()), 0.5), max(float((share / (1 + share)).max()), 1 / 3)
        self.only_compute = float(share.max()), float((share / (1 + share)).max())

    def bounds(
        self, t: int, r: int, recompute: bool, sizes: np.ndarray, microbatches: np.ndarray, choice: _Choice
    ) -> np.ndarray:
        """Bounds by microbatch size and number of stages, shape (sizes, most stages)."""
        scale, m = (sizes / self.size)[:, None], microbatches[:, None]
        again = 2 if recompute else 1
        speeds = choice.speeds[: len(self.forward)]
        work = again * (scale / t * self.forward + self.fixed_forward)
        work = work + scale / t * self.backward + self.fixed_backward
        bytes_reduced = (again + 1) * (t - 1) / t * scale * self.reduced
        bytes_exchanged = 2 * (r - 1) / r * self.weights / t
        # What a layer's transfers keep its stage busy with, over the links that suit it best.
        others = np.min([m * bytes_reduced / q + bytes_exchanged / x for q, x in choice.links], axis=0)
        reduced = bytes_reduced / max(q for q, _ in choice.links)
        share = (self.share if reduced.any() else self.only_compute)[recompute]
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
