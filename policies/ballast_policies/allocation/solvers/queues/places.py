"""Places in the queues of GPUs, and the dual bound of their prices on a matching (``matching``)."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Places:
    """All places that come into question: type, number from last and how many there are of each."""

    kind: np.ndarray
    number: np.ndarray
    count: np.ndarray

    def costs(self, work: np.ndarray) -> np.ndarray:
        """(n, places) of jobs with ``work`` (n, k)."""
        costs: np.ndarray = work[:, self.kind] * self.number
        return costs


def places_of(kind: np.ndarray, place: np.ndarray, capacity: np.ndarray) -> Places:
    """Places up to half as many again in each queue as the greedy matching uses."""
    kinds, numbers = [], []
    for j in np.flatnonzero(capacity > 0):
        longest = int(place[kind == j].max(initial=0))
        most = longest + max(2, longest // 2)
        kinds.append(np.full(most, j))
        numbers.append(np.arange(1, most + 1))
    every = np.concatenate(kinds)
    return Places(kind=every, number=np.concatenate(numbers).astype(float), count=capacity[every])


def in_blocks(places: Places, few: int) -> tuple[Places, np.ndarray]:
    """About ``few`` places, further from last several together as one; and one of the original for each."""
    ratio = 1.05
    while True:
        kinds, numbers, counts, ats = [], [], [], []
        for j in np.unique(places.kind):
            here = np.flatnonzero(places.kind == j)
            start = 0
            while start < len(here):
                end = min(len(here), max(start + 1, int((start + 1) * ratio)))
                kinds.append(j)
                numbers.append(places.number[here[start:end]].mean())
                counts.append(places.count[here[start:end]].sum())
                ats.append(here[(start + end - 1) // 2])
                start = end
        if len(kinds) <= few or ratio > 4.0:
            break
        ratio *= 1.1
    blocks = Places(kind=np.array(kinds), number=np.array(numbers), count=np.array(counts))
    return blocks, np.array(ats)


def prices_between(places: Places, blocks: Places, prices: np.ndarray) -> np.ndarray:
    """Prices of single places from those of blocks of them."""
    every = np.zeros(len(places.kind))
    for j in np.unique(places.kind):
        here, of_block = places.kind == j, blocks.kind == j
        every[here] = np.interp(places.number[here], blocks.number[of_block], prices[of_block])
    return every


def in_order(work: np.ndarray, kind: np.ndarray, capacity: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The best places for these types: in each queue the longest job last."""
    place = np.zeros(len(work), dtype=np.int64)
    for j in np.unique(kind):
        mine = np.flatnonzero(kind == j)
        mine = mine[np.argsort(-work[mine, j], kind="stable")]
        place[mine] = np.arange(len(mine)) // int(capacity[j]) + 1
    return kind, place


def greedy_matching(work: np.ndarray, capacity: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(type, place from last) of each job: the longest first, each where it adds least."""
    order = np.argsort(-work.min(axis=1), kind="stable")
    gpus = [int(c) for c in capacity]
    usable = [j for j, c in enumerate(gpus) if c]
    taken = [0] * len(gpus)
    kind, place = np.zeros(len(work), dtype=np.int64), np.zeros(len(work), dtype=np.int64)
    for m, row in zip(order.tolist(), work[order].tolist(), strict=True):
        best, at = np.inf, usable[0]
        for j in usable:
            cost = (taken[j] // gpus[j] + 1) * row[j]
            if cost < best:
                best, at = cost, j
        kind[m], place[m] = at, taken[at] // gpus[at] + 1
        taken[at] += 1
    return kind, place


def best_places(work: np.ndarray, places: Places, prices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(least cost with the price, its type) of each job; places beyond those listed are free."""
    least, kind = np.full(len(work), np.inf), np.zeros(len(work), dtype=np.int64)
    some = max(1, 2_000_000 // len(places.kind))
    for start in range(0, len(work), some):
        rows = slice(start, start + some)
        total = places.costs(work[rows]) + prices
        at = total.argmin(axis=1)
        kind[rows], least[rows] = places.kind[at], total[np.arange(len(at)), at]
    for j in np.unique(places.kind):
        beyond = (places.number[places.kind == j].max() + 1) * work[:, j]
        kind[beyond < least] = j
        np.minimum(least, beyond, out=least)
    return least, kind


def matching_bound(work: np.ndarray, places: Places, prices: np.ndarray) -> float:
    """The dual value of any prices >= 0."""
    return float(best_places(work, places, prices)[0].sum() - places.count @ prices)


def prices_of_matching(work: np.ndarray, kind: np.ndarray, place: np.ndarray, places: Places) -> np.ndarray:
    """Prices that suit a matching: moving up one place saves a job the work of its neighbour."""
    prices = np.zeros(len(places.kind))
    for j in np.unique(places.kind):
        here = np.flatnonzero(places.kind == j)
        mine = kind == j
        shortest = np.zeros(len(here) + 1)
        if mine.any():
            longest_place = int(place[mine].max())
            least = np.full(longest_place + 2, np.inf)
            np.minimum.at(least, place[mine], work[mine, j])
            shortest[: longest_place - 1] = least[1:longest_place]
        prices[here] = np.cumsum(shortest[: len(here)][::-1])[::-1]
    return prices


def one_by_one(amounts: np.ndarray, of: np.ndarray, places: Places) -> np.ndarray:
    """Type of each job, the jobs of a row in order from the heads of the queues on."""
    row, place = np.nonzero(amounts)
    order = np.lexsort((-places.number[place], row))
    kinds = np.repeat(places.kind[place[order]], amounts[row, place][order].astype(np.int64))
    kind = np.zeros(len(of), dtype=np.int64)
    kind[np.argsort(of, kind="stable")] = kinds
    return kind
