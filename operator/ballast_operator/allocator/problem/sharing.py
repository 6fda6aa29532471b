"""Jobs that may share a GPU, and why others run alone."""

import itertools
from collections.abc import Mapping, Sequence

from ballast_policies.rounds import Placement, SharedGpus, SharingJob
from ballast_policies.throughput.paired import FIRST_GUESS, PairSpeeds
from ballast_policies.throughput.speed_key import Speeds

from ballast_operator.allocator.problem.admission import Admitted
from ballast_operator.allocator.problem.capacity import ClusterCapacity
from ballast_operator.allocator.problem.memory import gigabytes
from ballast_operator.allocator.problem.speeds import kind_of
from ballast_operator.kube.kinds import job_id


def colocation_candidates(
    jobs: Sequence[Admitted], capacity: ClusterCapacity, kinds: Mapping[str, Speeds]
) -> SharedGpus:
    """Jobs that may share the GPUs of the pools; none where no pool shares.

    ``kinds``: kind of training -> its speeds, alone and in pairs.
    """
    if not capacity.shared:
        return SharedGpus()
    found, stated = {}, dict[str, dict[str, float]]()
    for one in jobs:
        memory = needed_memory(one)
        if one.spec.shares_gpu and not why_alone(one) and memory is not None:
            kind = kind_of(one.spec)
            said = {gpu_type: by_size[1] for gpu_type, by_size in one.spec.throughput.items() if 1 in by_size}
            stated.setdefault(kind, said)
            at = [key.alone_in_pool for key in kinds.get(kind, {}) if key.nodes == 1]
            known = {gang[0] for gang in at if gang is not None and gang[1] == 1}
            found[job_id(one.view.key)] = SharingJob(
                kind=kind, memory=memory, known_alone=frozenset(known | stated[kind].keys())
            )
    return SharedGpus(jobs=found, memory=capacity.shared, speeds=PairSpeeds.of(kinds, stated))


def speeds_beside(running: Mapping[str, Placement], shared: SharedGpus) -> dict[str, float]:
    """Running job that shares its GPU -> its speed over that alone."""
    found = {}
    for names in _by_node(running, shared).values():
        for name, other in itertools.permutations(names, 2):
            suits = name in shared.jobs and other in shared.jobs
            gpu_type = running[name].gpu_type
            found[name] = shared.beside(name, other, gpu_type).speed if suits else FIRST_GUESS
    return found


def _by_node(running: Mapping[str, Placement], shared: SharedGpus) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, at in running.items() if shared.memory else ():
        if node := shared.on(at):
            found.setdefault(node, []).append(name)
    return found


def needed_memory(one: Admitted) -> float | None:
    """Bytes that it needs of its GPU: as stated, else as measured; None: not known."""
    if one.spec.memory_per_gpu is not None:
        return one.spec.memory_per_gpu
    if one.memory.need is None:
        return None
    return one.memory.need.least(one.spec.positions(1)) or None


def why_alone(one: Admitted) -> str:
    """Why a job that allows it does not share a GPU, as text; empty: it may."""
    spec, allocation = one.spec, one.view.running_allocation
    if spec.smallest_gang != 1 or spec.largest_gang != 1:
        sizes = f"{spec.smallest_gang} to {spec.largest_gang} GPUs"
        return (
            f"it may have {sizes}, and jobs of exactly one share. To fix: pipeline.minStages and maxStages: 1"
        )
    if needed_memory(one) is None:
        return "what memory it needs is neither stated nor measured yet. To fix: set memoryPerGpu"
    if allocation is not None and allocation.shared_gpu is None:
        return "it was launched on a GPU of its own"
    return ""


def sharing_text(one: Admitted, shared: SharedGpus) -> str:
    """Why the job runs alone although it allows to share its GPU; empty: it does not, or it may share."""
    if not one.spec.shares_gpu:
        return ""
    if not shared.memory:
        return "sharesGpu: no pool has a node whose GPU two jobs may share"
    why = why_alone(one)
    if why:
        return f"sharesGpu: {why}"
    memory, most = needed_memory(one) or 0.0, max(shared.memory.values())
    if memory >= most:
        known = f"the largest has {gigabytes(most)}" if most else "their memory is not known"
        return f"sharesGpu: it needs {gigabytes(memory)} of GPUs that are shared, and {known}"
    if not shared.jobs[job_id(one.view.key)].known_alone:
        return "sharesGpu: it shares once its speed alone is reported, or stated in throughput"
    return ""
