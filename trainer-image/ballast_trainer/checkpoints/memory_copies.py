"""Copies of the ranks' state in the memory of their neighbours, from which the others go on after a loss.

Each rank keeps a copy of its own tensors, and one of those of the rank before it in the pipeline, which is
on another pod.  They are staged as for a checkpoint, and travel on a thread in a group of their own while
the next step computes its gradients: it waits with its update until every rank has them.  Until then the
copies of before are kept, so there is always a step that all have, and no more steps are done twice than lie
between two copies.
"""

import dataclasses
import math
import time
from collections.abc import Mapping
from concurrent.futures import wait
from typing import Any

import torch
import torch.distributed as dist
from ballast_policies.contract.plan import Plan

from ballast_trainer.checkpoints import tensors
from ballast_trainer.checkpoints.manifest import Manifest
from ballast_trainer.checkpoints.staging import BesideSteps, Flight
from ballast_trainer.distributed.process_group import World
from ballast_trainer.layers.layer import LayerSet


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """State from which a job goes on, besides its tensors; the same on every rank but for the times.

    Attributes:
        manifest: as a checkpoint of it has.
        checkpoint_step: of the newest checkpoint; None: there is none.
        began: when the job began, by the monotonic clock.
        trained_seconds: since then, in which steps ran.
    """

    manifest: Manifest
    checkpoint_step: int | None
    began: float
    trained_seconds: float

    def told(self) -> dict[str, Any]:
        """Values for a rank on another machine, whose clock begins elsewhere; :meth:`heard` reads them."""
        began = time.monotonic() - self.began
        return {**dataclasses.asdict(self), "manifest": self.manifest.to_json(), "began": began}

    @classmethod
    def heard(cls, value: Mapping[str, Any]) -> "Moment":
        """Moment of :meth:`told`."""
        began, manifest = time.monotonic() - value["began"], Manifest.from_json(value["manifest"])
        return cls(**{**value, "manifest": manifest, "began": began})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The copies of one step that this rank holds.

    Attributes:
        epoch: of the plan that they were made under.
        parts: the ranks of then whose tensors they are.
        ranks: how many there were.
        moment: what else the job goes on from.
        tensors: by key, in the host's memory.
    """

    epoch: int
    parts: tuple[int, ...]
    ranks: int
    moment: Moment
    tensors: Mapping[str, torch.Tensor]

    @property
    def name(self) -> tuple[int, int]:
        """Tells generations apart; the newest is the largest."""
        return self.moment.manifest.step, self.epoch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LostRanks:
    """Ranks that the job has lost, and goes on without.

    Attributes:
        processes: theirs.
        ranks: how many there were.
        noticed: when this rank noticed, by the monotonic clock.
    """

    processes: tuple[str, ...]
    ranks: int
    noticed: float


class MemoryCopies:
    """The copies that this rank holds; they outlive the process group.

    Attributes:
        every_steps: steps between two.
        lost: the ranks that it goes on without; None: it is a launch.
        source: the copies that it goes on from, until they are loaded; None: none.
    """

    def __init__(self, every_steps: int, device: torch.device) -> None:
        """None yet; ``device`` is where the state lives."""
        self.every_steps, self._device = every_steps, device
        self.lost: LostRanks | None = None
        self.source: Generation | None = None
        self._held: dict[tuple[int, int], Generation] = {}
        self._beside = BesideSteps[Generation](device, "memory-copy")
        self._flight: Flight[Generation] | None = None

    def begin(self, world: World, plan: Plan, layers: LayerSet, moment: Moment, *, at_once: bool) -> bool:
        """Begin to copy the state beside the steps that follow; collective.

        ``at_once``: more than the optimizer step changes the tensors. Returns whether there is a rank on
        another pod to hold them.
        """
        self.settle()
        apart = _apart(world.mesh.column, plan)
        if world.size < 2 * apart:
            self._held.clear()
            return False

        def exchange(beside: World, state: Mapping[str, torch.Tensor]) -> Generation:
            generation = _exchanged(beside, apart, state, moment)
            self._held[generation.name] = generation
            # Whoever has an answer knows that all have their copies.
            beside.gather(None, patient=True)
            return generation

        self._flight = self._beside.begin(world, layers, exchange, at_once=at_once)
        return True

    def settle(self) -> None:
        """Wait until every rank has the copies that are under way.

        Raises:
            CheckpointNotWritten: on all ranks; what was copied changed meanwhile.
        """
        if self._flight is None:
            return
        flight, self._flight = self._flight, None
        flight.copy.wait()
        generation = flight.result.result()
        self._held = {generation.name: generation}
        self._beside.keep()

    def abandon(self) -> None:
        """The process group has ended: this rank has what was under way, or what was before."""
        if self._flight is not None:
            wait([self._flight.result])
        self._flight = None

    def told(self) -> list[tuple[int, int, int, tuple[int, ...]]]:
        """Step, epoch, number of ranks, and the ranks whose tensors are here, of each generation."""
        return [(*name, one.ranks, one.parts) for name, one in list(self._held.items())]

    def moments(self) -> list[dict[str, Any]]:
        """Moments of each generation, in the order of :meth:`told`."""
        return [one.moment.told() for one in list(self._held.values())]

    def go_on(
        self, name: tuple[int, int] | None, lost: LostRanks, moment: Mapping[str, Any] | None = None
    ) -> None:
        """Go on from this generation (None: from none), of a ``moment`` that another rank may have told."""
        self.lost = lost
        self._held = {of: one for of, one in self._held.items() if of == name}
        self.source = None if name is None else self._held.get(name)
        if name is not None and self.source is None and moment is not None:
            self.source = Generation(
                epoch=name[1], parts=(), ranks=0, moment=Moment.heard(moment), tensors={}
            )
        # What is held may be in either of those before, or be under way on a thread that is left behind.
        self._flight, self._beside = None, BesideSteps(self._device, "memory-copy")

    def load(self, world: World, layers: LayerSet) -> None:
        """Load the layers held from the copies of all ranks; collective.

        Raises:
            CheckpointError: the tensors of a layer do not fit.
        """
        assert self.source is not None
        mine = self.source.tensors
        known = world.gather({key: (value.dtype, value.shape) for key, value in mine.items()}, patient=True)
        described = {key: of for rank in reversed(known) for key, of in rank.items()}
        needed = sorted(tensors.needed(world, layers, described))
        transfers = [
            (key, rank if key in known[rank] else min(r for r in range(world.size) if key in known[r]), rank)
            for rank, keys in enumerate(world.gather(needed, patient=True))
            for key in keys
        ]
        state, works = {}, []
        for number, (key, source, target) in enumerate(transfers):
            if target == world.rank:
                dtype, shape = described[key]
                # The optimizer changes what it has loaded.
                state[key] = mine[key].clone() if source == target else torch.empty(shape, dtype=dtype)
            if source != target:
                value = state[key] if target == world.rank else mine.get(key)
                works += _transfer(world, source, target, number, value)
        for work in works:
            work.wait()
        tensors.fill(world, layers, state, "the copy in memory")
        # Held until there is a newer one, and no longer.
        self.source = None


def _transfer(world: World, source: int, target: int, tag: int, value: torch.Tensor | None) -> list[Any]:
    """The work on this rank of a tensor's way between two ranks, if it has a part in it."""
    if value is None or not value.numel() or world.rank not in (source, target):
        return []
    flat = value.reshape(-1).view(torch.uint8)
    if world.rank == source:
        return [dist.isend(flat, dst=target, group=world.patient_group, tag=tag)]
    return [dist.irecv(flat, src=source, group=world.patient_group, tag=tag)]


def alone_on_their_pods(column: int, plan: Plan) -> str | None:
    """Reason that no rank can hold another's copy, where ``column`` ranks are lost together; None: it can."""
    apart = _apart(column, plan)
    if len(plan.ranks) >= 2 * apart:
        return None
    return f"of {len(plan.ranks)} ranks none is {apart} further, on another pod and pipeline position"


def _apart(column: int, plan: Plan) -> int:
    """Distance of a copy in ranks: pods, and positions of the pipeline, are lost as a whole."""
    return math.lcm(column, len(plan.ranks) // len(plan.pods))


def _exchanged(world: World, apart: int, state: Mapping[str, torch.Tensor], moment: Moment) -> Generation:
    """This rank's copies, and those of the rank before it; collective."""
    told = world.gather([(key, value.dtype, value.shape) for key, value in state.items()], patient=True)
    before, after = (world.rank - apart) % world.size, (world.rank + apart) % world.size
    received = {key: torch.empty(shape, dtype=dtype) for key, dtype, shape in told[before]}
    works = []
    for source, target, values in (world.rank, after, state), (before, world.rank, received):
        for number, value in enumerate(values.values()):
            works += _transfer(world, source, target, number, value)
    for work in works:
        work.wait()
    return Generation(
        epoch=world.epoch,
        parts=(world.rank, before),
        ranks=world.size,
        moment=moment,
        tensors={**received, **state},
    )
