"""One round: which gangs run where until the next (dissertation section 5.5).

1. Gangs that must not be disturbed keep their nodes (too young to stop).
2. The others are served by priority; a gang that runs on the type it claims keeps its nodes.
3. What is left idle goes to whoever can use it (work conservation).
4. If more running gangs would be stopped or moved than the hour allows, the least urgent changes are undone.
"""

from collections.abc import Mapping, Sequence

from ballast_policies.allocation.problem import Allocation
from ballast_policies.allocation.rounds.packing import pack
from ballast_policies.allocation.rounds.priority import Claim, ordered_claims
from ballast_policies.allocation.rounds.values import (
    Gang,
    Node,
    Placement,
    Round,
    RoundSettings,
    RoundState,
)


def decide_round(
    *,
    now: float,
    allocation: Allocation,
    gangs: Sequence[Gang],
    nodes: Sequence[Node],
    state: RoundState,
    settings: RoundSettings,
) -> Round:
    """Decide the round that begins at ``now`` (seconds, on the clock of the state's times).

    A gang runs whole or not at all, on one pool; no node is given more GPUs than it has; a running
    gang whose lease is extended keeps exactly its nodes. The same input gives the same round.
    """
    pinned = _pinned(now, gangs, nodes, state, settings)
    placements, reasons = _serve(now, allocation, gangs, nodes, state, settings, pinned)
    budget = _moves_left(now, state, settings)
    while budget is not None:
        disturbed = [
            job
            for job in state.running
            if job in {gang.job for gang in gangs}
            and _still_valid(job, gangs, nodes, state)
            and placements.get(job) != state.running[job]
        ]
        if len(disturbed) <= budget:
            break
        # Keep the gang that has run the shortest: it has had the least use of its start.
        keep = max(disturbed, key=lambda job: (state.running_since.get(job, 0.0), job))
        pinned[keep] = f"at most {settings.max_moves_per_hour} moves an hour"
        placements, reasons = _serve(now, allocation, gangs, nodes, state, settings, pinned)
    return _as_round(gangs, state, placements, reasons)


def _pinned(
    now: float, gangs: Sequence[Gang], nodes: Sequence[Node], state: RoundState, settings: RoundSettings
) -> dict[str, str]:
    pinned = {}
    for job in state.running:
        ran = now - state.running_since.get(job, now)
        if ran < settings.min_run_seconds and _still_valid(job, gangs, nodes, state):
            pinned[job] = f"has run {ran:.0f} s of the {settings.min_run_seconds:.0f} s it is left alone"
    return pinned


def _still_valid(job: str, gangs: Sequence[Gang], nodes: Sequence[Node], state: RoundState) -> bool:
    """The job still wants a gang of this size, may use the type, and its nodes are still there."""
    placement = state.running[job]
    names = {node.name for node in nodes if node.pool == placement.pool}
    return (
        any(
            gang.job == job
            and gang.gpus == len(placement.nodes)
            and gang.throughput.get(placement.gpu_type, 0.0) > 0
            for gang in gangs
        )
        and set(placement.nodes) <= names
    )


def _moves_left(now: float, state: RoundState, settings: RoundSettings) -> int | None:
    if settings.max_moves_per_hour is None:
        return None
    return max(0, settings.max_moves_per_hour - sum(1 for at in state.moves if now - at < 3600.0))


def _serve(
    now: float,
    allocation: Allocation,
    gangs: Sequence[Gang],
    nodes: Sequence[Node],
    state: RoundState,
    settings: RoundSettings,
    pinned: Mapping[str, str],
) -> tuple[dict[str, Placement], dict[str, str]]:
    free = {node.name: node.gpus for node in nodes}
    placements: dict[str, Placement] = {}
    reasons: dict[str, str] = {}
    size = {gang.job: gang.gpus for gang in gangs}
    horizon = max(
        [settings.round_seconds]
        + [sum(row.values()) for row in state.received.values()]
        + [now - since for since in state.running_since.values()]
    )
    claims = ordered_claims(allocation, gangs, state.received, now_received_seconds=horizon)

    def take(job: str, placement: Placement, why: str) -> None:
        for node in placement.nodes:
            free[node] -= 1
        placements[job] = placement
        reasons[job] = why

    for job in sorted(pinned):
        take(job, state.running[job], f"keeps its {len(state.running[job].nodes)} GPUs: {pinned[job]}")
    for claim in claims:
        if claim.job in placements:
            continue
        placement = _place(claim, size[claim.job], nodes, state, free, gangs)
        if placement is not None:
            take(claim.job, placement, _chosen_words(claim, placement))
    for gang in gangs:
        if gang.job not in placements:
            reasons[gang.job] = _waiting_words(gang, nodes, free, claims)
    return placements, reasons


def _place(
    claim: Claim,
    gpus: int,
    nodes: Sequence[Node],
    state: RoundState,
    free: Mapping[str, int],
    gangs: Sequence[Gang],
) -> Placement | None:
    running = state.running.get(claim.job)
    if (
        running is not None
        and running.gpu_type == claim.gpu_type
        and _still_valid(claim.job, gangs, nodes, state)
        and all(free[node] >= running.nodes.count(node) for node in set(running.nodes))
    ):
        return running
    return pack(gpus, claim.gpu_type, nodes, free)


def _chosen_words(claim: Claim, placement: Placement) -> str:
    if claim.share > 0:
        return (
            f"{len(placement.nodes)} x {claim.gpu_type} in pool {placement.pool}: its share there is "
            f"{claim.share:.0%} of the time, it has had {claim.received_fraction:.0%}"
        )
    return (
        f"{len(placement.nodes)} x {claim.gpu_type} in pool {placement.pool}: no job with a share needs them"
    )


def _waiting_words(
    gang: Gang, nodes: Sequence[Node], free: Mapping[str, int], claims: Sequence[Claim]
) -> str:
    usable = [claim.gpu_type for claim in claims if claim.job == gang.job]
    if not usable:
        return f"no GPU type of this policy's pools can run it: it names {sorted(gang.throughput) or 'none'}"
    counts = []
    for gpu_type in usable:
        for pool in sorted({node.pool for node in nodes if node.gpu_type == gpu_type}):
            members = [node for node in nodes if node.pool == pool]
            has, left = sum(node.gpus for node in members), sum(free[node.name] for node in members)
            counts.append(f"{left} of {has} {gpu_type} free in pool {pool}")
    where = "; ".join(counts) or f"no node has {' or '.join(sorted(usable))}"
    return f"waits for {gang.gpus} GPUs of one pool: {where}"


def _as_round(
    gangs: Sequence[Gang],
    state: RoundState,
    placements: Mapping[str, Placement],
    reasons: Mapping[str, str],
) -> Round:
    names = [gang.job for gang in gangs]
    ran = set(state.running)
    return Round(
        placements=dict(placements),
        extended=tuple(j for j in names if j in ran and placements.get(j) == state.running[j]),
        started=tuple(j for j in names if j not in ran and j in placements),
        moved=tuple(j for j in names if j in ran and j in placements and placements[j] != state.running[j]),
        stopped=tuple(sorted(j for j in ran if j not in placements)),
        waiting=tuple(j for j in names if j not in ran and j not in placements),
        reasons=dict(reasons),
    )
