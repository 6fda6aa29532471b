"""A job's life as a state machine: from what is stored to the one next move.

:func:`next_move` is a pure function of an :class:`Observed` value: no Kubernetes, no clock, no randomness.
The operator observes, asks it, and carries out the move that it names; ``tests/policies/protocol`` explores
every interleaving of the same function with crashes, stale views, lost answers, failing pods and a second
leader.
"""
