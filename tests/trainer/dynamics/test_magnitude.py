"""Global magnitude selection: the same mask as one process's top-k, bit for bit."""

import threading

import hypothesis
import torch
from ballast_trainer.dynamics.pruning.pruning import largest_masks
from hypothesis import strategies

from tests.support.examples import examples


class ThreadWorld:
    """Ranks as threads: sums tensors over them."""

    device = torch.device("cpu")

    def __init__(self, size):
        self._barrier = threading.Barrier(size)
        self._lock = threading.Lock()
        self._total = None
        self.pipeline = self

    def all_reduce(self, tensor):
        """What the pipeline's :class:`Axis` does over a process group."""
        self._barrier.wait()
        with self._lock:
            self._total = tensor.clone() if self._total is None else self._total + tensor
        self._barrier.wait()
        tensor.copy_(self._total)
        if self._barrier.wait() == 0:
            self._total = None
        self._barrier.wait()
        return tensor


def masks_over_ranks(weights, owners, keep):
    """Run the selection with ``weights`` spread over ranks; the masks concatenated by layer."""
    size = max(owners) + 1
    world = ThreadWorld(size)
    found = {}

    def rank_main(rank):
        mine = {layer: weight for layer, weight in enumerate(weights) if owners[layer] == rank}
        found.update(largest_masks(world, mine, keep, len(weights)))

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return torch.cat([found[layer] for layer in range(len(weights))])


def top_k_mask(weights, keep):
    """One process: a stable sort keeps the earlier of equal magnitudes."""
    flat = torch.cat(weights).abs()
    order = torch.sort(flat, descending=True, stable=True).indices
    mask = torch.zeros(len(flat), dtype=torch.bool)
    mask[order[:keep]] = True
    return mask


@examples(60)
@hypothesis.given(
    strategies.lists(
        strategies.lists(
            strategies.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 1e-40, 3e38, -2.0])
            | strategies.floats(width=32, allow_nan=False, allow_infinity=False),
            min_size=1,
            max_size=12,
        ),
        min_size=2,
        max_size=5,
    ),
    strategies.integers(0, 60),
    strategies.integers(1, 4),
)
def test_ties_are_kept_in_the_order_of_layer_and_index(rows, keep, ranks):
    """Equal magnitudes, signed zeros and denormals: never one more or less than asked for, on any ranks."""
    weights = [torch.tensor(row, dtype=torch.float32) for row in rows]
    keep = min(keep, sum(map(len, rows)))
    ranks = min(ranks, len(rows))
    owners = [layer * ranks // len(rows) for layer in range(len(rows))]
    assert torch.equal(masks_over_ranks(weights, owners, keep), top_k_mask(weights, keep))
