"""Which GPUs a job holds, as far as it is known: one for each name."""

from collections.abc import Collection


def held_pods(
    gang: Collection[str], *, ending: bool, alive: Collection[str], ended: Collection[str]
) -> frozenset[str]:
    """Names of pods whose GPUs no other job may count on.

    A pod that was to be made may exist without being known: the answer to its creation was lost and the
    watch is late. So the GPUs of a launch are held from its writing to its release, made or not; of a launch
    that is ending, those of pods that have ended are free before, from when that is written.

    Args:
        gang: pods of the launch that the job holds.
        ending: the launch has to end.
        alive: pods of the job, of whichever launch, that are known to hold or to wait for a GPU.
        ended: pods that have ended, as far as it is written.
    """
    return frozenset(alive) | {name for name in gang if not (ending and name in ended)}
