"""The simulator's rounds on arrays are the operator's ``decide_round``."""

import numpy as np
import pytest
from ballast_lab.arrays.by_shares import EMPTY_GRANT, SimulatedRounds
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
