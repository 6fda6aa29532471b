"""One rank's part of a schedule: its actions by step, its messages, and which of these are delivered."""

import dataclasses
import functools
from collections.abc import Iterator

from ballast_policies.planning.schedules import Action, Kind, Schedule, weight_versions

BACKWARDS = frozenset({Kind.BACKWARD, Kind.BACKWARD_INPUT})
"""Actions that produce the gradient of a stage's inputs."""
LAST_OF_MICROBATCH = frozenset({Kind.BACKWARD, Kind.BACKWARD_WEIGHT})
"""Actions after which a stage is done with a microbatch."""


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """A message from ``producer`` to ``consumer``, from rank ``source`` to rank ``target``.

    An activation if the producer is a forward, else a gradient.  ``boundary`` b lies between the
    stages b and b + 1.
    """

    producer: Action
    consumer: Action
    source: int
    target: int

    @property
    def boundary(self) -> int:
        """The boundary that is crossed."""
        return min(self.producer.stage, self.consumer.stage)

    @property
    def backward(self) -> bool:
        """Whether it is a gradient."""
        return self.producer.kind is not Kind.FORWARD


class RankOrder:
    """The actions of one rank in a schedule over ``steps`` steps of ``microbatches`` each."""

    def __init__(self, schedule: Schedule, rank: int, steps: int) -> None:
        self.schedule, self.rank, self.steps = schedule, rank, steps
        self.microbatches = schedule.microbatches // steps
        self.actions = schedule.actions[rank]
        self._split = schedule.split_backwards()

    @functools.cached_property
    def versions(self) -> dict[tuple[int, int], int]:
        """Weight version of (stage, microbatch)."""
        return weight_versions(self.schedule)

    @functools.cached_property
    def positions(self) -> dict[Action, tuple[int, int]]:
        """Where each action is: (rank, place in its order)."""
        return {
            action: (rank, place)
            for rank, row in enumerate(self.schedule.actions)
            for place, action in enumerate(row)
            if action.kind is not Kind.UPDATE
        }

    def step_of(self, action: Action) -> int:
        """The step that an action belongs to; an update, to that of the last microbatch in it."""
        if action.kind is not Kind.UPDATE:
            return action.microbatch // self.microbatches
        return ((action.microbatch + 1) * self.covered_by_update(action.stage) - 1) // self.microbatches

    def covered_by_update(self, stage: int) -> int:
        """Microbatches, over all replicas of the stage, whose gradients make one update of it."""
        return self.schedule.update_every * len(self.schedule.stage_ranks[stage])

    @functools.cached_property
    def ends(self) -> tuple[int, ...]:
        """By step, the place after the rank's last backward or update of it."""
        ends = [0] * self.steps
        for place, action in enumerate(self.actions):
            if action.kind is not Kind.FORWARD:
                ends[self.step_of(action)] = place + 1
        return tuple(ends)

    @functools.cached_property
    def lead(self) -> int:
        """How many steps past the one that it finishes any rank may have begun."""
        lead = 0
        for rank in range(self.schedule.ranks):
            order = self if rank == self.rank else RankOrder(self.schedule, rank, self.steps)
            begun = 0
            for place, action in enumerate(order.actions):
                step = order.step_of(action)
                if action.kind is Kind.FORWARD:
                    begun = max(begun, step)
                elif place + 1 == order.ends[step]:
                    lead = max(lead, begun - step)
        return lead

    def producer_for(self, action: Action) -> Action | None:
        """The action on another stage that produces what ``action`` needs, if it needs any."""
        stage, k = action.stage, action.microbatch
        if action.kind is Kind.FORWARD and stage > 0:
            return Action(stage - 1, Kind.FORWARD, k)
        if action.kind in BACKWARDS and stage + 1 < self.schedule.stages:
            return Action(stage + 1, self._backward_kind(stage + 1, k), k)
        return None

    def consumer_of(self, action: Action) -> Action | None:
        """The action on another stage that needs what ``action`` produces, if any does."""
        stage, k = action.stage, action.microbatch
        if action.kind is Kind.FORWARD and stage + 1 < self.schedule.stages:
            return Action(stage + 1, Kind.FORWARD, k)
        if action.kind in BACKWARDS and stage > 0:
            return Action(stage - 1, self._backward_kind(stage - 1, k), k)
        return None

    def received_by(self, action: Action) -> Message | None:
        """The message that ``action`` waits for; None where it needs none, or has it on this rank."""
        producer = self.producer_for(action)
        return None if producer is None else self._message(producer, action)

    def sent_by(self, action: Action) -> Message | None:
        """The message that ``action`` produces; None where no other rank needs it."""
        consumer = self.consumer_of(action)
        return None if consumer is None else self._message(action, consumer)

    def messages(self) -> Iterator[Message]:
        """Messages that this rank receives, in the order it needs them."""
        for action in self.actions:
            message = self.received_by(action)
            if message is not None:
                yield message

    def delivered_with(self, received: Message, sent: Message) -> bool:
        """Whether ``sent`` has certainly arrived, now that ``received`` has come from the same rank.

        It has if that rank needed it before it could compute ``received``.
        """
        return self.positions[sent.consumer][1] <= self.positions[received.producer][1]

    def _backward_kind(self, stage: int, microbatch: int) -> Kind:
        return Kind.BACKWARD_INPUT if (stage, microbatch) in self._split else Kind.BACKWARD

    def _message(self, producer: Action, consumer: Action) -> Message | None:
        source = self.schedule.rank_of(producer.stage, producer.microbatch)
        target = self.schedule.rank_of(consumer.stage, consumer.microbatch)
        return None if source == target else Message(producer, consumer, source, target)
