"""Speed of each rank, apart from the costs of its layers: a small fixed piece of work, timed on every rank.

A layer's measured seconds are its cost over its rank's speed; where ranks differ, the layer takes other
seconds after a move, and only the two factors apart tell how many.
"""

import statistics
import time
from collections import defaultdict, deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from ballast_policies.contract.limits import MOST_SLOW_RANKS
from ballast_policies.contract.messages import SlowRank
from ballast_policies.planning.rank_capacity import SPEED_TOLERANCE

from ballast_trainer.distributed.process_group import World
from ballast_trainer.profiling.meter import Meter

KEPT_STEPS = 8
"""Steps whose median counts."""
FEWEST_ALIKE = 3
"""Ranks of a GPU type from which one of them can be told to be slow: of two, the other may be the odd one."""

_SIZES = {"cpu": 96, "cuda": 1024}
_REPEATS = 3
_MOST = 4096
_SHORTEST = 0.5e-3
"""Seconds of a run at least: what differs in starting one, 10 to 30 us on a GPU, is below a tenth of it."""


class SpeedProbe:
    """The fixed work: a product of two square matrices, as often as makes a run long enough to compare."""

    def __init__(self, meter: Meter, device: torch.device) -> None:
        size = _SIZES.get(device.type, 96)
        self._meter = meter
        self._left = torch.full((size, size), 0.5, device=device)
        self._products = 1

    def seconds(self) -> float:
        """Seconds of one product, in the fastest of a few runs, on the clock of the layers' seconds."""
        with torch.no_grad():
            while self._products < _MOST and self._run() < _SHORTEST:
                self._products *= 2
            return min(self._run() for _ in range(_REPEATS)) / self._products

    def _run(self) -> float:
        def work() -> None:
            for _ in range(self._products):
                _ = self._left @ self._left

        return self._meter.timed(work)


class RankSpeeds:
    """Speeds of the ranks, and so of the pipeline positions; the same on every rank."""

    def __init__(self) -> None:
        self._rows: deque[Sequence[float]] = deque(maxlen=KEPT_STEPS)

    def add(self, seconds: Sequence[float]) -> None:
        """Add the seconds of all ranks in one step."""
        if all(second > 0 for second in seconds):
            self._rows.append(tuple(seconds))

    def forget(self) -> None:
        """Drop the measurements: there are other ranks."""
        self._rows.clear()

    def speeds(self, column: int = 1) -> tuple[float, ...] | None:
        """Speed of each position of ``column`` ranks, the fastest 1; None where alike, or not known yet."""
        if len(self._rows) < 2:
            return None
        ranks = self._medians()
        medians = [statistics.fmean(ranks[at : at + column]) for at in range(0, len(ranks), column)]
        fastest = min(medians)
        # Ranks within the tolerance are alike: their layers' own seconds tell more than the probe.
        speeds = [1.0 if m <= fastest * (1 + SPEED_TOLERANCE) else fastest / m for m in medians]
        return tuple(speeds) if min(speeds) < 1 else None

    def slow(self, gpu_types: Sequence[str]) -> tuple[SlowRank, ...]:
        """Ranks beyond the tolerance of the median rank of their GPU type, the slowest first.

        None before KEPT_STEPS steps are kept, and none of a type with fewer than FEWEST_ALIKE ranks.

        Args:
            gpu_types: by rank; of other ranks than were measured, nothing is said.
        """
        if len(self._rows) < KEPT_STEPS or len(self._rows[0]) != len(gpu_types):
            return ()
        by_type: defaultdict[str, dict[int, float]] = defaultdict(dict)
        for rank, (gpu_type, seconds) in enumerate(zip(gpu_types, self._medians(), strict=True)):
            by_type[gpu_type][rank] = seconds
        found = [
            SlowRank(rank=rank, factor=second / usual)
            for seconds in by_type.values()
            if len(seconds) >= FEWEST_ALIKE and (usual := statistics.median(seconds.values()))
            for rank, second in seconds.items()
            if second > usual * (1 + SPEED_TOLERANCE)
        ]
        return tuple(sorted(found, key=lambda slow: -slow.factor)[:MOST_SLOW_RANKS])

    def _medians(self) -> list[float]:
        return [statistics.median(column) for column in zip(*self._rows, strict=True)]


TRIALS = 5
"""Round trips over each link; the fastest counts, since a busy machine only ever adds to one."""
_TAG = 1 << 20
"""Apart from the tags of layers that move."""


def link_seconds(world: World, message_bytes: int) -> list[float]:
    """Seconds of one transfer over each link, by position; the same list on every rank. Collective.

    Both ends of a link send a message back and forth; links are measured one after the other, columns of
    the mesh at the same time, as in training, and their mean is returned.

    ``message_bytes``: what this rank sends on for a microbatch; ignored for the last position.

    Returns:
        Shape (positions - 1,).
    """
    links = world.positions - 1
    share = 1 / world.mesh.column
    mine = [0.0] * links
    if world.position < links:
        mine[world.position] = share * message_bytes
    sizes = [round(size) for size in world.sum(mine)]
    seconds = [0.0] * links
    for link, size in enumerate(sizes):
        if world.position in (link, link + 1):
            first = world.position == link
            peer = world.pipeline.ranks[link + 1 if first else link]
            message = torch.zeros(max(1, size), dtype=torch.uint8, device=world.device)
            trips = [_round_trip(message, peer, first=first) for _ in range(TRIALS)]
            if first:
                seconds[link] = share * min(trips) / 2
    return world.sum(seconds)


def _round_trip(message: torch.Tensor, peer: int, *, first: bool) -> float:
    began = time.perf_counter()
    if first:
        dist.send(message, peer, tag=_TAG)
        dist.recv(message, peer, tag=_TAG)
    else:
        dist.recv(message, peer, tag=_TAG)
        dist.send(message, peer, tag=_TAG)
    if message.device.type == "cuda":
        torch.cuda.synchronize(message.device)
    return time.perf_counter() - began
