"""The simulator's rounds on arrays are the operator's ``decide_round``."""

import numpy as np
import pytest
from ballast_lab.arrays.by_shares import EMPTY_GRANT, Claims, SimulatedRounds, select
from ballast_lab.arrays.rules import BALLAST_RULES, ArraySettings
from ballast_lab.arrays.solving import ShareSolver, name_of
from ballast_policies.allocation.problem import Job
from ballast_policies.rounds.values import Node, RoundSettings
from ballast_policies.simulator.ledger import Ledger
from ballast_policies.simulator.settings import SimulatedCluster
from ballast_policies.simulator.workloads import TraceJob
from ballast_policies.throughput.table import JobType, ThroughputTable
from hypothesis import example, given
from hypothesis import strategies as st

from tests.policies.rounds.played import play
from tests.support.examples import examples

TYPES = ("v100", "p100")


@st.composite
def worlds(draw):
    sizes = draw(st.lists(st.sampled_from([1, 1, 2, 4]), min_size=1, max_size=8))
    rows = {kind: {} for kind in TYPES}
    for i, size in enumerate(sizes):
        rates = [draw(st.sampled_from([0.0, 1.0, 2.0, 3.5])) for _ in TYPES]
        rates[0] = rates[0] or 1.0
        for kind, rate in zip(TYPES, rates, strict=True):
            rows[kind][JobType(name=f"t{i}", gpus=size)] = rate
    return (
        sizes,
        ThroughputTable(source="drawn", alone_rates=rows),
        {"v100": 4, "p100": draw(st.integers(0, 5))},
    )


def world(sizes, on_v100, on_p100, gpus):
    rows = {
        kind: {JobType(name=f"t{i}", gpus=sizes[i]): rate for i, rate in enumerate(rates)}
        for kind, rates in zip(TYPES, (on_v100, on_p100), strict=True)
    }
    return sizes, ThroughputTable(source="given", alone_rates=rows), dict(zip(TYPES, gpus, strict=True))


@pytest.mark.parametrize("policy", ["max-min-fairness", "fifo"])
@examples(40)
@given(world=worlds())
@example(world=world([1, 4, 1, 1], [1.0] * 4, [1.0] * 4, (4, 4)))
@example(world=world([1] * 5, [1.0] * 5, [0.0, 0.0, 1.0, 1.0, 2.0], (4, 2)))
def test_the_simulator_grants_what_decide_round_places(policy, world):
    """Ten rounds in a row: the same jobs on the same types."""
    sizes, table, gpus = world
    chosen = ArraySettings(policy=policy, rules=BALLAST_RULES)
    ledger = Ledger(SimulatedCluster(gpus=gpus), table)
    for i, size in enumerate(sizes):
        ledger.add(TraceJob(type=JobType(name=f"t{i}", gpus=size), steps=1e9, arrival=0.0))
    active = np.arange(len(sizes))
    solver, rounds = ShareSolver(ledger, chosen), SimulatedRounds(ledger, chosen)
    shares = solver.solve(active, 0.0)
    rounds.reset(shares)
    by_type = {
        name_of(row): dict(zip(TYPES, shares.share[row].tolist(), strict=True)) for row in active.tolist()
    }
    jobs = [
        Job(
            name=name_of(row),
            gpus=sizes[row],
            throughput=dict(zip(TYPES, ledger.rate[row].tolist(), strict=True)),
        )
        for row in active.tolist()
    ]
    nodes = [
        Node(name=f"{kind}-{i}", pool=kind, gpu_type=kind, gpus=1)
        for kind in TYPES
        for i in range(gpus[kind])
    ]
    grant, settings = EMPTY_GRANT, RoundSettings(round_seconds=360.0)
    for _, _, decided in play(nodes, jobs, 10, settings, lambda number: by_type):
        grant = rounds.grant(active, grant, ledger.capacity)
        by_array = {
            name_of(row): TYPES[column]
            for row, column in zip(grant.job.tolist(), grant.column.tolist(), strict=True)
        }
        assert {job: at.gpu_type for job, at in decided.placements.items()} == by_array
        rounds.pass_time(grant, np.full(len(grant.job), 360.0), 360.0)


@st.composite
def questions(draw):
    jobs, columns = draw(st.integers(1, 40)), draw(st.integers(1, 4))
    gpus = draw(st.lists(st.sampled_from([1, 1, 2, 4, 8]), min_size=jobs, max_size=jobs))
    pairs = draw(st.permutations([(m, j) for m in range(jobs) for j in range(columns)]))
    pairs = pairs[: draw(st.integers(1, len(pairs)))]
    job = np.array([m for m, _ in pairs])
    claims = Claims(
        job=job,
        partner=np.full(len(pairs), -1),
        column=np.array([j for _, j in pairs]),
        gpus=np.array(gpus)[job],
    )
    return claims, np.array(draw(st.lists(st.integers(0, 20), min_size=columns, max_size=columns)))


@given(question=questions())
def test_a_refused_job_would_not_have_fitted_in_its_turn(question):
    """Algorithm 2: no claim is passed over for a less urgent one that takes its place."""
    claims, room = question
    granted = set(select(claims, room).tolist())
    left, taken = room.copy(), set()
    for k in range(len(claims)):
        job, column, gpus = int(claims.job[k]), claims.column[k], claims.gpus[k]
        fits = gpus <= left[column] and job not in taken
        assert (k in granted) == fits
        if fits:
            left[column] -= gpus
            taken.add(job)


def test_a_pair_is_granted_only_if_both_of_its_jobs_are_free():
    """Two jobs that share GPUs count once, and neither runs elsewhere."""
    claims = Claims(
        job=np.array([0, 1, 1, 2]),
        partner=np.array([1, 2, -1, -1]),
        column=np.array([0, 0, 0, 0]),
        gpus=np.array([2, 2, 2, 2]),
    )
    assert select(claims, np.array([8])).tolist() == [0, 3]
