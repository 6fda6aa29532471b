"""One rank's part of a schedule: its actions by step, with the messages that they wait for and send."""

import dataclasses
import functools

from ballast_policies.planning.schedules.schedule import Action, Kind, Schedule
from ballast_policies.planning.schedules.validate import weight_versions

BACKWARDS = frozenset({Kind.BACKWARD, Kind.BACKWARD_INPUT})
"""Actions that produce the gradient of a stage's inputs."""
LAST_OF_MICROBATCH = frozenset({Kind.BACKWARD, Kind.BACKWARD_WEIGHT})
"""Actions after which a stage is done with a microbatch."""


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """A message from ``producer`` to ``consumer``, from rank ``source`` to rank ``target``.

    An activation if the producer is a forward, else a gradient.  ``boundary`` b lies between the
    stages b and b + 1.

    Attributes:
        producer, consumer: the actions at its ends.
        source, target: their ranks.
        made_at, needed_at: the places of the two actions in the orders of their ranks.
    """

    producer: Action
    consumer: Action
    source: int
    target: int
    made_at: int
    needed_at: int

    @property
    def boundary(self) -> int:
        """The boundary that is crossed."""
        return min(self.producer.stage, self.consumer.stage)

    @property
    def backward(self) -> bool:
        """True if it is a gradient."""
        return self.producer.kind is not Kind.FORWARD

    def shows(self, sent: "Message") -> bool:
        """True if ``sent`` has arrived, now that this has: its rank needed it to compute this one."""
        return sent.needed_at <= self.made_at


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedAction:
    """An action of a rank in its schedule.

    Attributes:
        action: what is computed.
        step: of the run, 0-based.
        received: the message that it waits for; None where it needs none, or has it on this rank.
        consumer: the action on another stage that needs its result, if any does.
        sent: the message with its result; None where no other rank needs it.
    """

    action: Action
    step: int
    received: Message | None
    consumer: Action | None
    sent: Message | None


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
    def _places(self) -> dict[Action, int]:
        """The place of each action in the order of its rank."""
        return {
            action: place
            for row in self.schedule.actions
            for place, action in enumerate(row)
            if action.kind is not Kind.UPDATE
        }

    def step_of(self, action: Action) -> int:
        """The step that an action belongs to; an update, to that of the last microbatch in it."""
        if action.kind is not Kind.UPDATE:
            return action.microbatch // self.microbatches
        # Of so many microbatches, over all replicas of the stage, gradients make one update.
        covered = self.schedule.update_every * len(self.schedule.stage_ranks[action.stage])
        return ((action.microbatch + 1) * covered - 1) // self.microbatches

    @functools.cached_property
    def ends(self) -> tuple[int, ...]:
        """Place after the rank's last backward or update of each step."""
        ends = [0] * self.steps
        for place, action in enumerate(self.actions):
            if action.kind is not Kind.FORWARD:
                ends[self.step_of(action)] = place + 1
        return tuple(ends)

    @functools.cached_property
    def lead(self) -> int:
        """Steps past the one that it finishes that any rank may have begun."""
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

    @functools.cached_property
    def planned(self) -> tuple[PlannedAction, ...]:
        """The actions, with their messages."""
        return tuple(self._planned(action) for action in self.actions)

    @functools.cached_property
    def messages(self) -> tuple[Message, ...]:
        """Messages that this rank receives, in the order it needs them."""
        return tuple(planned.received for planned in self.planned if planned.received is not None)

    def _planned(self, action: Action) -> PlannedAction:
        producer, consumer = self._beside(action, -1), self._beside(action, 1)
        return PlannedAction(
            action,
            self.step_of(action),
            None if producer is None else self._message(producer, action),
            consumer,
            None if consumer is None else self._message(action, consumer),
        )

    def _beside(self, action: Action, way: int) -> Action | None:
        """The action on another stage that gives ``action`` its input (-1), or needs its result (1)."""
        forward, k = action.kind is Kind.FORWARD, action.microbatch
        stage = action.stage + (way if forward else -way)
        if not (forward or action.kind in BACKWARDS) or not 0 <= stage < self.schedule.stages:
            return None
        return Action(stage, Kind.FORWARD if forward else self._backward_kind(stage, k), k)

    def _backward_kind(self, stage: int, microbatch: int) -> Kind:
        return Kind.BACKWARD_INPUT if (stage, microbatch) in self._split else Kind.BACKWARD

    def _message(self, producer: Action, consumer: Action) -> Message | None:
        source = self.schedule.rank_of(producer.stage, producer.microbatch)
        target = self.schedule.rank_of(consumer.stage, consumer.microbatch)
        if source == target:
            return None
        places = self._places
        return Message(producer, consumer, source, target, places[producer], places[consumer])
