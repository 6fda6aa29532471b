"""Pods with several GPUs in rounds: each on one node, never too many, and none waits beside its room."""

from collections import Counter

import pytest
from ballast_policies.allocation.problem import Job
from ballast_policies.rounds.decide import decide_round
from ballast_policies.rounds.ledger import in_whole_pods, pack
from ballast_policies.rounds.question import Question
from ballast_policies.rounds.values import Node, RoundSettings, RoundState
from hypothesis import given
from hypothesis import strategies as st

TYPES = {"a": "v100", "b": "p100"}


@st.composite
def clusters(draw):
    taints = st.sampled_from(["", "", "gpu=x"])
    nodes = [
        Node(name=f"{pool}-{i}", pool=pool, gpu_type=kind, gpus=draw(st.integers(0, 8)), taints=draw(taints))
        for pool, kind in TYPES.items()
        for i in range(draw(st.integers(1, 4)))
    ]
    jobs, per_pod, barred = [], {}, {}
    for i in range(draw(st.integers(1, 8))):
        each, count = draw(st.sampled_from([1, 1, 2, 3, 4])), draw(st.integers(1, 4))
        name = f"job-{i}"
        rates = {kind: draw(st.sampled_from([0.0, 1.0, 3.0])) for kind in TYPES.values()}
        jobs.append(Job(name=name, gpus=each * count, throughput=rates))
        if each > 1:
            per_pod[name] = each
        if draw(st.booleans()):
            barred[name] = frozenset({"gpu=x"})
    shares = {job.name: {kind: draw(st.sampled_from([0.0, 0.3, 1.0])) for kind in rates} for job in jobs}
    return nodes, jobs, per_pod, barred, shares


def free_after(nodes, placements):
    used = Counter(name for placement in placements.values() for name in placement.nodes)
    return {node.name: node.gpus - used[node.name] for node in nodes}


@given(clusters(), st.integers(0, 100), st.booleans())
def test_pods_are_whole_and_none_waits_beside_its_room(case, min_run, within_round):
    """Two rounds, the second from what the first has placed: within capacity, on nodes that are tolerated."""
    nodes, jobs, per_pod, barred, shares = case
    state = RoundState()
    for now in (0.0, 60.0):
        settings = RoundSettings(
            round_seconds=60.0, min_run_seconds=float(min_run), within_round=within_round and now > 0
        )
        decided = decide_round(
            Question(
                now=now,
                shares=shares,
                jobs=jobs,
                nodes=nodes,
                state=state,
                settings=settings,
                not_tolerated=barred,
                gpus_per_pod=per_pod,
            )
        )
        free = free_after(nodes, decided.placements)
        taints = {node.name: node.taints for node in nodes}
        assert min(free.values()) >= 0
        for job in jobs:
            each, closed = per_pod.get(job.name, 1), barred.get(job.name, frozenset())
            placement = decided.placements.get(job.name)
            if placement is not None:
                assert len(placement.nodes) == job.gpus
                assert in_whole_pods(placement.nodes, each)
                assert not closed & {taints[name] for name in placement.nodes}
                continue
            kept = "kept for" in decided.reasons[job.name]
            for pool, kind in TYPES.items():
                usable = [node for node in nodes if node.pool == pool and node.taints not in closed]
                if job.throughput[kind] > 0 and usable and not kept:
                    assert pack(job.gpus, usable, free, each) is None
        state = RoundState(running=decided.placements, running_since=dict.fromkeys(decided.placements, now))


@pytest.mark.parametrize(
    ("free", "each", "want"),
    [
        ({"x": 4, "y": 4}, 2, ("x",) * 4),
        ({"x": 3, "y": 4}, 4, ("y",) * 4),
        ({"x": 3, "y": 3}, 2, ("x", "x", "y", "y")),
        ({"x": 3, "y": 1}, 2, None),
        ({"x": 5, "y": 4}, 4, ("y",) * 4),
    ],
)
def test_four_gpus_in_pods(free, each, want):
    """On the node that holds the gang with the least to spare; never half a pod."""
    nodes = [Node(name=name, pool="a", gpu_type="v100", gpus=gpus) for name, gpus in free.items()]
    assert pack(4, nodes, free, each) == want
