"""Plans that move layers of a running gang, one after the other."""

import functools
import itertools
import random
from types import SimpleNamespace

from ballast_policies.contract.messages import RENDEZVOUS_PORT, Ack, Stage
from ballast_policies.contract.plan import Directive
from ballast_trainer.channel.base import DirectoryChannel
from ballast_trainer.distributed.joining import new_ranks_ready
from ballast_trainer.distributed.process_group import reach_store

from tests.support.waiting import WAIT_SECONDS, eventually


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


def replan_at_random(running, folder, gates, *, seed, epochs, placement=(0, 1, 2), layers=8):
    """Publish partitions one after the other, each when the last is in force; open a gate for each."""
    generator = random.Random(seed)
    for epoch in range(2, 2 + epochs):
        change = {"epoch": epoch, "stages": random_stages(generator, layers, placement)}
        replan(running, folder, gates, lambda plan, change=change: plan.replace(**change))
        until(running, functools.partial(has_acked, folder, epoch))


def replan(running, folder, gates, change):
    """Publish what ``change`` makes of the plan in force, and open a gate once rank 0 has read it."""
    channel = DirectoryChannel(folder / "channel")
    until(running, (folder / "channel/ack.json").exists)
    plan = change(channel.read_plan())
    channel.publish(plan)
    until(running, functools.partial(running.has_read, plan.epoch))
    gates.open()


def grow(pods, folder, plan, environment=None):
    """Publish a plan and start the pods that are new in it; they are there, and rank 0 has read it, after."""
    channel, grown = DirectoryChannel(folder), plan.replace(directive=Directive.GROW)
    before = channel.read_plan()
    channel.publish(grown)
    for pod in sorted(set(grown.pods) - set(before.pods)):
        pods.start_pod(pod, folder, environment)
    store = reach_store(before.ranks[0].address, RENDEZVOUS_PORT, WAIT_SECONDS)
    running = SimpleNamespace(processes=[rank.process for rank in before.ranks], store=store)
    eventually(lambda: new_ranks_ready(running, grown), "the new ranks are there", pods.errors)
    pods.wait_for_plan(grown.epoch, before.pods[0])


def until(running, look):
    """Wait for a condition, or for the end of the job."""
    first = running.processes["rank-0"]
    eventually(lambda: look() or first.exitcode is not None, "the ranks follow", running.errors)


def has_acked(folder, epoch):
    """Whether the ranks train under the plan, or a later one."""
    return Ack.from_json((folder / "channel/ack.json").read_text()).epoch >= epoch
