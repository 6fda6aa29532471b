"""PipeDream's partitioner: stages, and how many ranks replicate each (dissertation 2.4.1).

A cluster of levels: level k joins m_k components of level k - 1 by links of B_k bytes/s; level 0 is
one GPU.  With T_l a layer's seconds (forward and backward), w_l its weight bytes, a_l its output bytes:

    T^k(i..j, m) = max(A^{k-1}(i..j, m_{k-1}), 2 (m - 1) sum of w_l / B_k) / m
    A^k(i..j, m) = min(T^k(i..j, m),
                       min over s, m' of max(A^k(i..s, m - m'), 2 a_s / B_k, T^k(s+1..j, m')))

with A^0 = sum of T_l and A^k(., 1) = A^{k-1}(., m_{k-1}).  The dissertation prints A^k without the
first alternative (one stage on all m), without which data parallelism alone could not be found.
A is the seconds per microbatch of the slowest stage in the steady state.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ballast_policies.planning.partition import PlanningError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of the network.

    Attributes:
        components: how many components of the level below it joins (m_k).
        bandwidth: bytes/s between them (B_k).
    """

    components: int
    bandwidth: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplicatedStage:
    """Layers ``first_layer`` to ``end_layer - 1`` on ``replicas`` ranks."""

    first_layer: int
    end_layer: int
    replicas: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PipeDreamPlan:
    """A pipeline with replicated stages.

    Attributes:
        stages: by layer; their replicas add up to all ranks.
        seconds_per_microbatch: of the slowest stage or transfer.
    """

    stages: tuple[ReplicatedStage, ...]
    seconds_per_microbatch: float

    @property
    def configuration(self) -> str:
        """Replicas of the stages, in the dissertation's words: ``15-1``."""
        return "-".join(str(stage.replicas) for stage in self.stages)


def plan_pipedream(
    layer_seconds: Sequence[float],
    weight_bytes: Sequence[float],
    output_bytes: Sequence[float],
    levels: Sequence[Level],
) -> PipeDreamPlan:
    """The pipeline over all ranks whose slowest stage is fastest; O(sum over k of L^3 m_k^2).

    Args:
        layer_seconds: T, forward and backward of one microbatch, shape (L,).
        weight_bytes: w, shape (L,).
        output_bytes: a, activations after each layer, shape (L,); the last is not used.
        levels: from the fastest links to the slowest.

    Raises:
        PlanningError: no layers, shapes that do not match, or a level without components or bandwidth.
    """
    layers = len(layer_seconds)
    if not layers or len(weight_bytes) != layers or len(output_bytes) != layers:
        raise PlanningError(
            f"seconds, weights and outputs of {layers}, {len(weight_bytes)}, {len(output_bytes)} layers: "
            "all three need one value a layer"
        )
    for level in levels:
        if level.components < 1 or level.bandwidth <= 0:
            raise PlanningError(f"{level}: a level needs at least one component and a bandwidth above 0")
    S = np.concatenate([[0.0], np.cumsum(np.asarray(layer_seconds, dtype=float))])
    below = _Solved(best=np.maximum(S[None, :] - S[:, None], 0.0), inner=None, choice=None, components=1)
    for level in levels:
        below = _solve_level(below, level, weight_bytes, output_bytes)
    return PipeDreamPlan(
        stages=tuple(_stages(below, 0, layers, below.components, 1)),
        seconds_per_microbatch=float(below.best[0, layers]),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Solved:
    """A level's answers: seconds on all its components by (first, end), and how they come about.

    ``choice[m][i, j]`` is (s, m') of the last stage, or (-1, m) where all is one stage.
    """

    best: np.ndarray
    inner: "_Solved | None"
    choice: list[np.ndarray] | None
    components: int


def _solve_level(
    below: _Solved, level: Level, weight_bytes: Sequence[float], output_bytes: Sequence[float]
) -> _Solved:
    layers = len(weight_bytes)
    W = np.concatenate([[0.0], np.cumsum(np.asarray(weight_bytes, dtype=float))])
    synchronised = (W[None, :] - W[:, None]) / level.bandwidth
    send = 2 * np.asarray(output_bytes, dtype=float) / level.bandwidth
    single = [np.maximum(below.best, 2 * (m - 1) * synchronised) / m for m in range(1, level.components + 1)]
    A: list[np.ndarray] = []
    choice: list[np.ndarray] = []
    for m in range(1, level.components + 1):
        best = single[m - 1].copy()
        chosen = np.full((layers + 1, layers + 1, 2), (-1, m))
        for i in range(layers):
            for j in range(i + 2, layers + 1):
                cuts = np.arange(i + 1, j)
                for last in range(1, m):
                    value = np.maximum(
                        np.maximum(A[m - last - 1][i, cuts], send[cuts - 1]), single[last - 1][cuts, j]
                    )
                    k = int(np.argmin(value))
                    if value[k] < best[i, j]:
                        best[i, j] = value[k]
                        chosen[i, j] = cuts[k], last
        A.append(best)
        choice.append(chosen)
    return _Solved(best=A[-1], inner=below, choice=choice, components=level.components)


def _stages(solved: _Solved, first: int, end: int, components: int, copies: int) -> list[ReplicatedStage]:
    """Unfold the choices into stages of GPUs; ``copies`` replicas of all of it exist."""
    if solved.inner is None or solved.choice is None:
        return [ReplicatedStage(first_layer=first, end_layer=end, replicas=copies)]
    cut, last = (int(value) for value in solved.choice[components - 1][first, end])
    inner = solved.inner
    if cut < 0:
        return _stages(inner, first, end, inner.components, copies * last)
    return [
        *_stages(solved, first, cut, components - last, copies),
        *_stages(inner, cut, end, inner.components, copies * last),
    ]
