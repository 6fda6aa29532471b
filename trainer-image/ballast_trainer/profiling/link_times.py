"""Transfer times of a microbatch's activations over each link of the pipeline, measured between steps."""

import time

import torch
import torch.distributed as dist

from ballast_trainer.distributed.process_group import World

TRIALS = 5
"""Round trips over each link; the fastest counts, since a busy machine only ever adds to one."""
_TAG = 1 << 20
"""Apart from the tags of layers that move."""


def link_seconds(world: World, message_bytes: int) -> list[float]:
    """Seconds of one transfer over each link, by position; the same list on every rank. Collective.

    Both ends of a link send a message back and forth; links are measured one after the other, columns of
    the mesh at the same time, as in training, and their mean is returned.

    Args:
        world: the ranks.
        message_bytes: bytes that this rank sends on for a microbatch; ignored for the last position.

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
