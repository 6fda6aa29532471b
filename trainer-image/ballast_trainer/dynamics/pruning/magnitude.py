"""The k largest magnitudes over all ranks, exactly, without gathering them.

Magnitudes are ordered as the bits of their float32: for numbers that are not negative, a larger
float is a larger integer.  Three rounds of histograms over 11, 10 and 10 bits, summed over the
ranks, find the k-th largest bit by bit; ties are kept in the order of (layer, index).  The result
equals a stable top-k over the concatenated weights of one process, in O(bins) memory per rank.
"""

from collections.abc import Mapping

import torch

from ballast_trainer.distributed.process_group import World

_ROUNDS = ((20, 11), (10, 10), (0, 10))
"""Shift and width of the bits that each round looks at, from the most significant."""


def largest_masks(
    world: World, weights: Mapping[int, torch.Tensor], keep: int, layer_count: int
) -> dict[int, torch.Tensor]:
    """Masks of the ``keep`` largest magnitudes over the weights of all ranks; collective.

    Args:
        world: the ranks.
        weights: this rank's weights by layer, float32, one flat vector each.
        keep: how many stay, over all ranks.
        layer_count: layers of the whole model.

    Returns:
        A bool vector per layer held; ``keep`` elements are True over all ranks.
    """
    bits = {index: weight.detach().abs().view(torch.int32) for index, weight in weights.items()}
    threshold, above = _kth_largest(world, bits, keep)
    ties = torch.zeros(layer_count, dtype=torch.int64, device=world.device)
    for index, values in bits.items():
        ties[index] = (values == threshold).sum()
    world.sum_tensor(ties)
    before = torch.cumsum(ties, 0) - ties
    masks = {}
    for index, values in bits.items():
        tied = values == threshold
        quota = keep - above - int(before[index])
        kept_ties = tied & (torch.cumsum(tied, 0) <= quota)
        masks[index] = (values > threshold) | kept_ties
    return masks


def _kth_largest(world: World, bits: Mapping[int, torch.Tensor], k: int) -> tuple[int, int]:
    """The k-th largest value, and how many are above it; (-1 means none: the largest integer) for k = 0."""
    if k <= 0:
        return torch.iinfo(torch.int32).max, 0
    prefix, above = 0, 0
    for shift, width in _ROUNDS:
        counts = torch.zeros(1 << width, dtype=torch.int64, device=world.device)
        for values in bits.values():
            matching = values[(values >> (shift + width)) == prefix]
            counts += torch.bincount((matching >> shift) & ((1 << width) - 1), minlength=1 << width)
        world.sum_tensor(counts)
        # From the largest bin down: the first at which k values are reached.
        reached = torch.cumsum(counts.flip(0), 0) + above
        place = int((reached >= k).int().argmax())
        above = int(reached[place] - counts.flip(0)[place])
        prefix = (prefix << width) | ((1 << width) - 1 - place)
    return prefix, above
