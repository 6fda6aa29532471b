"""One round with elastic gangs: who runs is decided at the least sizes, then the rest is shared out.

1. A running elastic gang counts with its least size, on the nodes of its first ranks; what it holds beyond
   that is there for gangs that wait. So a waiting gang comes before another's extra GPUs, by every policy.
2. :func:`.grant_gpus` says which gangs run, and on which pool.
3. Gangs go to another pool where the sizes that they reach there win more than a restart costs.
4. GPUs that are left go to elastic gangs one step of size at a time, the most urgent by the policy first.
   Within a round a gang keeps what it holds, unless a gang that starts needs it. At the end of a round, and
   when a gang starts, GPUs also pass from one gang to another, where that wins more than the pauses cost.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

from ballast_policies.allocation.policy import Surplus
from ballast_policies.allocation.problem import Job
from ballast_policies.rounds.draft import Draft
from ballast_policies.rounds.explanations import Reason
from ballast_policies.rounds.gangs import ElasticGang, SizeSettings
from ballast_policies.rounds.grants import grant_gpus
from ballast_policies.rounds.question import Question
from ballast_policies.rounds.sizes.free_gpus import FreeGpus
from ballast_policies.rounds.sizes.pools import choose_pools, claims_where_they_run
from ballast_policies.rounds.sizes.share_out import Division, Seat
from ballast_policies.rounds.sizes.worth import Contender, gain, partition_speed
from ballast_policies.rounds.values import Placement, RoundSettings


def decide_elastic_round(question: Question) -> Draft:
    """The round of gangs in one pool each; without elastic gangs as :func:`grant_gpus` decides it.

    No node is given more GPUs than it has, no gang has fewer than its least size, and no GPU stays free that
    a running gang could take and be faster with. A running gang becomes either smaller, on some of its nodes,
    or larger, on all of them and others of its pool (``Round.resized``).
    """
    elastic, state, pending = question.elastic, question.state, question.pending
    if not elastic:
        return grant_gpus(question)
    sizes, settings = question.sizes, question.settings
    reduced = {
        job: _least(placement, elastic[job])
        for job, placement in state.running.items()
        if job in elastic and (job in pending or elastic[job].may_shrink)
    }
    # A gang that cannot change its size now counts as it is.
    asked = [
        _as_it_is(job, elastic[job.name], state.running[job.name])
        if job.name in elastic and job.name in state.running and job.name not in reduced
        else job
        for job in question.jobs
    ]
    cluster = dataclasses.replace(question, jobs=asked, parts=question.claimed_parts())
    claimed = claims_where_they_run(cluster, reduced)
    at_least = dataclasses.replace(claimed.state, running={**state.running, **reduced})
    decided = grant_gpus(dataclasses.replace(claimed, state=at_least))
    decided = choose_pools(cluster, reduced, decided)
    tenants, left = question.tenants, Counter(question.room)
    for job in question.jobs:
        starts = job.name not in state.running or job.name in pending
        if starts and job.name in decided.placements and tenants.get(job.name, "") in left:
            left[tenants[job.name]] -= job.gpus
    seats = _seats(decided, question, reduced)
    if not seats:
        return dataclasses.replace(decided, question=question)
    free = [FreeGpus(question.nodes, decided.placements.values()) for _ in range(2)]
    kept = Division(seats, free[0], left, sizes)
    if sizes.surplus is not Surplus.COST:
        # What was granted and is not held yet comes first: its GPUs are still on their way.
        kept.keep_what_is_held(at for at, seat in enumerate(seats) if not seat.runs)
        kept.keep_what_is_held(at for at, seat in enumerate(seats) if seat.runs)
    kept.share_out()
    chosen = kept
    if sizes.surplus is not Surplus.COST and (decided.changes.started or not settings.within_round):
        best = Division(seats, free[1], left, sizes)
        best.share_out()
        if _wins(seats, kept, best, sizes, settings):
            chosen = best
    return _resized(dataclasses.replace(decided, question=question), seats, chosen)


def _as_it_is(job: Job, gang: ElasticGang, held: Placement) -> Job:
    """The job with the size that it has, on the types where that is one of its sizes."""
    size = len(held.nodes)
    there = {kind for kind, by_size in gang.speeds.items() if size in by_size} | {held.gpu_type}
    rates = {kind: rate if kind in there else 0.0 for kind, rate in job.throughput.items()}
    return dataclasses.replace(job, gpus=size, throughput=rates)


def _least(placement: Placement, gang: ElasticGang) -> Placement:
    by_size = gang.speeds.get(placement.gpu_type, {})
    least = min(by_size, default=gang.least)
    return dataclasses.replace(placement, nodes=placement.nodes[:least])


def _seats(decided: Draft, question: Question, reduced: Mapping[str, Placement]) -> list[Seat]:
    """The gangs that could have more than they were given."""
    state, parts = question.state, question.claimed_parts()
    capacity: Counter[str] = Counter()
    for node in question.nodes:
        capacity[node.gpu_type] += node.gpus
    seats = []
    for index, job in enumerate(question.jobs):
        placement, gang = decided.placements.get(job.name), question.elastic.get(job.name)
        if placement is None or gang is None:
            continue
        stays = placement == reduced.get(job.name)
        if job.name in state.running and job.name not in reduced and placement == state.running[job.name]:
            continue  # it cannot change its size now
        extra = state.running[job.name].nodes[len(placement.nodes) :] if stays else ()
        each = gang.together
        own = tuple(tuple(extra[at : at + each]) for at in range(0, len(extra), each))
        unit = partition_speed(gang, capacity, parts.get(job.name, 0.0))
        seats.append(
            Seat(
                one=Contender(job=job, gang=gang, index=index, gpu_type=placement.gpu_type, unit=unit),
                base=placement,
                own=own,
                runs=stays and job.name not in question.pending,
                barred=question.not_tolerated.get(job.name, frozenset()),
                tenant=question.tenants.get(job.name, ""),
            )
        )
    return seats


def _wins(
    seats: Sequence[Seat], kept: Division, best: Division, sizes: SizeSettings, settings: RoundSettings
) -> bool:
    """Whether gangs should pass GPUs on: what that wins is worth more than the pauses that it costs."""
    stay = max(1.0, sizes.stay_rounds * settings.round_seconds)
    changed = []
    for at, seat in enumerate(seats):
        before, after = kept.size(at), best.size(at)
        if before == after:
            continue
        pause = seat.one.gang.pause_seconds if seat.runs and after != seat.held else 0.0
        worked = max(0.0, 1.0 - pause / stay)
        changed.append((seat.one, seat.one.speed(before), seat.one.speed(after) * worked))
    return bool(changed) and gain(sizes.surplus, changed) >= sizes.least_gain


def _resized(decided: Draft, seats: Sequence[Seat], chosen: Division) -> Draft:
    """The round with the gangs' sizes."""
    placements, reasons = dict[str, Placement](), dict[str, Reason]()
    for at, seat in enumerate(seats):
        name = seat.one.job.name
        placements[name] = dataclasses.replace(seat.base, nodes=chosen.nodes[at])
        count, least = chosen.size(at), len(seat.base.nodes)
        most = max(seat.one.gang.speeds.get(seat.one.gpu_type, {least: 0.0}))
        size = f"it may have {least} to {most} GPUs and has {count}, " if most > least else ""
        reasons[name] = decided.reasons[name].noted(f"{size}at {seat.one.speed(count):.3g} steps/s")
    return decided.with_placements(placements, reasons)
