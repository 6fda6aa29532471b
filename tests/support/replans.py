"""Plans that move layers of a running gang, one after the other."""

import functools
import itertools
import random

from ballast_policies.contract import Ack, Directive, Stage

from tests.support.waiting import eventually


def stages_at(bounds, placement):
    """Stages from layer to layer of ``bounds``, on the ranks of ``placement``."""
    return tuple(
        Stage(rank=rank, first_layer=first, end_layer=end)
        for rank, (first, end) in zip(placement, itertools.pairwise(bounds), strict=True)
    )


def random_stages(generator, layers, placement):
    """A partition of the layers, each stage with one or more."""
    cuts = sorted(generator.sample(range(1, layers), len(placement) - 1))
    return stages_at((0, *cuts, layers), placement)


def replan_at_random(running, channel, folder, *, seed, epochs, gates, placement=(0, 1, 2), layers=8):
    """Publish partitions one after the other, each when the last is in force; open a gate for each."""
    generator = random.Random(seed)
    eventually((folder / "channel/ack.json").exists, "the ranks train", running.errors)
    plan = channel.read_plan()
    for epoch in range(2, 2 + epochs):
        stages = random_stages(generator, layers, placement)
        plan = plan.replace(epoch=epoch, directive=Directive.RUN, stages=stages)
        channel.publish(plan)
        until(running, functools.partial(running.has_read, epoch))
        gates.open()
        until(running, functools.partial(has_acked, folder, epoch))


def until(running, look):
    """Wait for a condition, or for the end of the job."""
    first = running.processes["rank-0"]
    eventually(lambda: look() or first.exitcode is not None, "the ranks follow", running.errors)


def has_acked(folder, epoch):
    """Whether the ranks train under the plan, or a later one."""
    return Ack.from_json((folder / "channel/ack.json").read_text()).epoch >= epoch
