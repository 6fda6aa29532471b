"""Divisions of a gang over pools, and the fastest of them.

For two pools and a size, as many GPUs as possible are of the faster type. Both orders are looked at: early
stages keep more microbatches in flight, so the memory may fit in one order only. Only where no two pools
hold the least size are there more than two parts: the fastest types first. A gang with plans has their
types alone, each in one pool, or in several where none holds it. Policies see a gang that no single
pool can hold as a configuration for each mixture of types.
"""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from ballast_policies.allocation.problem import Configuration, Job, Problem
from ballast_policies.allocation.registry import find_policy
from ballast_policies.rounds.gangs import MixedGang, speed_key
from ballast_policies.rounds.ledger import Ledger
from ballast_policies.rounds.values import Node, PoolPart, counted

MOST_POOLS = 6
"""Pools with room of which pairs are looked at: those of the fastest types with the most GPUs."""

REVERSED_GAIN = 0.01
"""Rank 0 is on the faster type, unless the other order wins at least this: cuts differ by a layer."""

MOST_PLANNED = 64
"""Choices of pools for the GPU types of a plan, where types are in several; of many plans a share each."""

MOST_MIXTURES = 8
"""Divisions of a gang of which policies are told."""

Room = Mapping[str, tuple[str, int]]
"""Pool -> (its GPU type, its GPUs that the gang may have, in whole pods)."""


_Pool = tuple[str, str, int]
"""Its name, its GPU type, and the GPUs that the gang may have of it."""


def best_parts(
    gang: MixedGang, room: Room, *, above: float = 0.0, most: float = math.inf, one_pool: bool = False
) -> tuple[PoolPart, ...]:
    """The fastest division over several pools that is faster than ``above`` steps/s; empty: there is none.

    ``most``: GPUs, at most; ``one_pool``: one pool alone is looked at as well.
    """
    found: tuple[PoolPart, ...] = ()
    alone: list[tuple[PoolPart, ...]] = [
        (PoolPart(pool=pool, gpu_type=gpu_type, gpus=size),)
        for pool, (gpu_type, gpus) in (room.items() if one_pool else ())
        for size in [size for size in gang.sizes_in_one_pool(gpu_type) if size <= gpus][-1:]
    ]
    options: Iterable[tuple[PoolPart, ...]] = itertools.chain(alone, _options(gang, room))
    if not gang.plans_degrees:
        options = sorted(
            options, key=lambda parts: -sum(gang.relative(part.gpu_type) * part.gpus for part in parts)
        )
    for parts in options:
        if sum(part.gpus for part in parts) > most:
            continue
        if gang.plans_degrees and len(parts) > 1 and gang.planned_at_most(parts) <= above:
            break
        speed = gang.speed(parts)
        needed = REVERSED_GAIN if found and parts == found[::-1] else 1e-9
        if speed > above * (1 + needed):
            found, above = parts, speed
    return found


def open_nodes(gang: MixedGang, ledger: Ledger, *, provisionable: bool = False) -> dict[str, list[Node]]:
    """Pool -> nodes with GPUs left on which the gang may be started; ``provisionable``: also on new nodes."""
    found: dict[str, list[Node]] = {}
    for node in ledger.nodes.values():
        may_start = not node.closed and node.group not in gang.barred and ledger.left[node.name] > 0
        if may_start and (provisionable or not node.provisionable):
            found.setdefault(node.pool, []).append(node)
    return found


def room_on(nodes: Mapping[str, Sequence[Node]], gang: MixedGang, ledger: Ledger) -> Room:
    """GPUs left on them for whole pods of the gang; ``nodes``: by pool."""
    return {
        pool: (there[0].gpu_type, sum(ledger.left[n.name] // gang.per_pod * gang.per_pod for n in there))
        for pool, there in nodes.items()
    }


def waits_for(gang: MixedGang, ledger: Ledger) -> str:
    """GPUs that a gang lacks that waits for several pools, as text."""
    room = room_on(open_nodes(gang, ledger, provisionable=True), gang, ledger)
    types = {node.pool: node.gpu_type for node in ledger.nodes.values() if gang.relative(node.gpu_type) > 0}
    has = [f"{room.get(pool, ('', 0))[1]} {kind} free in pool {pool}" for pool, kind in sorted(types.items())]
    needs = counted(gang.sizes[0], "GPU")
    return f"waits for {needs} of its pools together: {'; '.join(has) or 'it may use none'}"


def mixtures(gang: MixedGang, room: Room) -> tuple[tuple[PoolPart, ...], ...]:
    """Divisions of the least size over several pools in which the gang fits, the fastest first."""
    found = [parts for parts in _options(gang.smallest, room) if gang.speed(parts) > 0]
    return tuple(sorted(found, key=gang.speed, reverse=True)[:MOST_MIXTURES])


def sizes_over_pools(gang: MixedGang, room: Room) -> list[int]:
    """Sizes of it that fit several pools, fewest first."""
    found = set[int]()
    for parts in _options(gang, room, found):
        size = sum(part.gpus for part in parts)
        if size not in found and gang.speed(parts) > 0:
            found.add(size)
    return sorted(found)


def _options(gang: MixedGang, room: Room, known: Set[int] = frozenset()) -> Iterator[tuple[PoolPart, ...]]:
    """Divisions of the gang; of one with plans the fastest planned first, without sizes in ``known``."""
    pools = sorted(
        (
            (pool, gpu_type, gpus // gang.together * gang.together)
            for pool, (gpu_type, gpus) in room.items()
            if gpus >= gang.together and gang.relative(gpu_type)
        ),
        key=lambda one: (-gang.relative(one[1]), -one[2], one[0]),
    )
    if gang.planned:
        yield from _planned_options(gang, pools, known)
        return
    any_pair = False
    for fast, slow in itertools.combinations(pools[:MOST_POOLS], 2):
        sizes = [size for size in gang.sizes if 2 * gang.together <= size <= fast[2] + slow[2]]
        for size in sorted({*sizes[:1], *sizes[len(sizes) // 2 :][:1], *sizes[-1:]}):
            any_pair = True
            first = min(fast[2], size - gang.together)
            parts = (_part(fast, first), _part(slow, size - first))
            yield parts
            yield parts[::-1]
    if any_pair:
        return
    missing, chain = gang.sizes[0], list[PoolPart]()
    for one in pools:
        taken = min(one[2], missing)
        chain += [_part(one, taken)] if taken else []
        missing -= taken
    if len(chain) > 1 and not missing:
        yield tuple(chain)
        yield tuple(chain[::-1])


def _planned_options(
    gang: MixedGang, pools: Sequence[_Pool], known: Set[int]
) -> Iterator[tuple[PoolPart, ...]]:
    """Divisions over the pools, those of a type with the most GPUs first."""
    sizes, there, of = set(gang.sizes), Counter[str](), dict[str, list[_Pool]]()
    for one in pools:
        there[one[1]] += one[2]
        of.setdefault(one[1], []).append(one)
    most = max(4, MOST_PLANNED // len(gang.planned))
    for planned, plans in gang.planned.items():
        if len(planned) == 1 and len(of.get(planned[0][0], ())) < 2:
            continue
        size = sum(gpus for _, gpus in planned)
        if size not in sizes or size in known or any(gpus > there[kind] for kind, gpus in planned):
            continue
        for plan in plans or (None,):
            taken = (0.0,) * len(planned) if plan is None else plan.memory
            together = gang.together if plan is None else math.lcm(plan.together, gang.per_pod)
            of_type = []
            for (gpu_type, gpus), needed in zip(planned, taken, strict=True):
                own = [one for one in of[gpu_type] if gang.has_memory(one[0], needed)]
                of_type.append(_in_pools(own, gpus, together))
            for chosen in itertools.islice(itertools.product(*of_type), most):
                parts = tuple(itertools.chain.from_iterable(chosen))
                if len(parts) > 1:
                    yield parts


def _in_pools(pools: Sequence[_Pool], gpus: int, together: int) -> list[tuple[PoolPart, ...]]:
    """A type's GPUs in each pool that holds them; where none does, in as few as do together."""
    alone: list[tuple[PoolPart, ...]] = [(_part(one, gpus),) for one in pools if one[2] >= gpus]
    if alone:
        return alone[:MOST_POOLS]
    parts, missing = list[PoolPart](), gpus
    for one in pools:
        taken = min(missing, one[2] // together * together)
        parts += [_part(one, taken)] if taken else []
        missing -= taken
    return [] if missing else [tuple(parts)]


def _part(pool: _Pool, gpus: int) -> PoolPart:
    return PoolPart(pool=pool[0], gpu_type=pool[1], gpus=gpus)


def with_mixtures(
    problem: Problem, mixed: Mapping[str, MixedGang], policy: str, *, agnostic: bool = False
) -> Problem:
    """``problem`` with configurations for the gangs of ``mixed`` that no single pool can hold.

    As it is under policies that take gangs of one type alone: such gangs have no share there, and run where
    GPUs are left.
    """
    large = {name: gang for name, gang in mixed.items() if not gang.fits_one_pool and gang.mixtures}
    if not large or agnostic or not find_policy(policy).takes_configurations:
        return problem
    jobs = (_mixture(job, large[job.name]) if job.name in large else job for job in problem.jobs)
    return dataclasses.replace(problem, jobs=tuple(jobs))


def _mixture(job: Job, gang: MixedGang) -> Job:
    # Where nothing is measured, the problem assumes other speeds than were estimated.
    fastest = max(gang.speeds, key=lambda gpu_type: gang.speeds[gpu_type])
    scale = job.throughput.get(fastest, 0.0) / gang.speeds[fastest] if gang.speeds[fastest] > 0 else 0.0
    scale = 1.0 if gang.plans_degrees else scale
    found: dict[str, Configuration] = {}
    for parts in gang.mixtures:
        key, speed = speed_key(parts), gang.speed(parts) * scale
        name = str(key)
        if name not in found or found[name].throughput < speed:
            found[name] = Configuration(name=name, gpus=dict(key.gpus), throughput=speed)
    return dataclasses.replace(job, throughput={}, gpus=1, configurations=tuple(found.values()))
