"""A job's life as a state machine: from what is stored to the one next move.

:func:`next_move` is a pure function of an :class:`Observed` value: no Kubernetes, no clock, no randomness.
The operator observes, asks it, and carries out the move that it names; ``tests/policies/protocol`` explores
every interleaving of the same function with crashes, stale views, lost answers, failing pods and a second
leader.
"""

from ballast_policies.protocol.machine import next_move, state_of
from ballast_policies.protocol.moves import Decision, Move
from ballast_policies.protocol.observed import Action, Cause, Observed

__all__ = ["Action", "Cause", "Decision", "Move", "Observed", "next_move", "state_of"]
