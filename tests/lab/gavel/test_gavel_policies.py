"""Gavel's own versions of its policies: what they do, where ours do more."""

import numpy as np
import pytest
from ballast_lab.arrays.share_accounts import ShareAccounts
from ballast_lab.gavel import fairness
from ballast_lab.gavel.allox import AlloX
from ballast_lab.gavel.fifo import Fifo
from ballast_lab.gavel.gandiva import Gandiva
from ballast_policies.simulator.ledger import Ledger
from ballast_policies.simulator.settings import SimulatedCluster
from ballast_policies.simulator.workloads import TraceJob
from ballast_policies.throughput.table import JobType, ThroughputTable

V100, P100 = 0, 1


def ledger(gangs, *, v100=2, p100=2, slow=0.5):
    """Jobs of these sizes: 1 step/s on a V100, ``slow`` on a P100."""
    types = [JobType(name=f"t{i}", gpus=gpus) for i, gpus in enumerate(gangs)]
    rates = {kind: dict.fromkeys(types, rate) for kind, rate in (("v100", 1.0), ("p100", slow))}
    table = ThroughputTable(source="a test's table", alone_rates=rates)
    found = Ledger(SimulatedCluster(gpus={"v100": v100, "p100": p100}), table)
    for job in types:
        found.add(TraceJob(type=job, steps=1000.0, arrival=0.0))
    return found


def shared(rate):
    return lambda first, second, column: (rate, rate)


def fifo(jobs, *, agnostic=False, space_sharing=False, rate=0.9):
    return Fifo(jobs, agnostic=agnostic, space_sharing=space_sharing, seed=0, shared_rates=shared(rate))


def columns(entries):
    """Row -> column, of those alone that have a share."""
    job, partner, share = entries
    return {
        int(j): int(s.argmax()) for j, p, s in zip(job, partner, share, strict=True) if p < 0 and s.max() > 0
    }


def test_allox_begins_with_short_jobs_and_moves_none():
    """The shorter job of each queue begins; who runs on a slow GPU stays there when a fast one comes free."""
    jobs = ledger([1, 1, 1, 1], v100=1, p100=1)
    jobs.left[:4] = [1000.0, 100.0, 2000.0, 50.0]
    policy = AlloX(jobs)
    assert columns(policy.solve(np.arange(4))) == {3: V100, 1: P100}
    assert columns(policy.solve(np.arange(3))) == {0: V100, 1: P100}


def test_fifo_serves_in_order_on_the_fastest_type_with_room_and_none_overtakes():
    """The gang of four fits nowhere and blocks the job behind it."""
    jobs = ledger([1, 1, 2, 4, 1], v100=2, p100=4)
    assert columns(fifo(jobs).solve(np.arange(5))) == {0: V100, 1: V100, 2: P100}


def test_blind_fifo_keeps_types_and_hands_them_on():
    """The third waits, and takes over the type of the first when that is done."""
    jobs = ledger([2, 2, 2], v100=2, p100=2)
    policy = fifo(jobs, agnostic=True)
    first = columns(policy.solve(np.arange(3)))
    assert first[0] == V100
    later = columns(policy.solve(np.array([1, 2])))
    assert later[1] == first[1]
    assert later[2] == first[0]


def test_fifo_lets_who_waits_join_who_does_most_with_it():
    """0.9 + 0.9 jobs' worth is above the threshold of 1.5; 0.7 + 0.7 is not."""
    for rate, pairs in ((0.9, 1), (0.7, 0)):
        jobs = ledger([2, 2, 2], v100=2, p100=2, slow=1.0)
        _, partner, share = fifo(jobs, space_sharing=True, rate=rate).solve(np.arange(3))
        assert (partner >= 0).sum() == pairs
        assert share[partner >= 0].sum() == pairs


def test_gandiva_pairs_only_where_the_jobs_do_not_fit_and_keeps_its_pairs():
    """Four jobs on four GPUs run alone; six are paired, and stay so until one is done."""
    jobs = ledger([1] * 6)
    policy = Gandiva(jobs, seed=0, shared_rates=shared(0.4))
    assert (policy.solve(np.arange(4))[1] < 0).all()
    job, partner, share = policy.solve(np.arange(6))
    pairs = {(int(j), int(p)) for j, p in zip(job, partner, strict=True) if p >= 0}
    assert len(pairs) == 3
    assert share[partner >= 0].sum() == pytest.approx(3.0)  # 4/3 GPUs for each, cut to all of its time
    again = policy.solve(np.arange(6))
    assert {(int(j), int(p)) for j, p in zip(*again[:2], strict=True) if p >= 0} == pairs


def test_the_middle_of_the_optimum_gives_more_than_the_least_level_where_it_costs_no_job():
    """Two jobs on four GPUs: a vertex may stop at the level of the slower, the middle does not idle."""
    jobs = ledger([1, 1], slow=1.0)
    middle = fairness.least_attained_service(jobs, np.arange(2), agnostic=False, interior=True)
    assert middle.sum(axis=1) == pytest.approx([1.0, 1.0], abs=1e-4)
    assert middle == pytest.approx(np.full((2, 2), 0.5), abs=1e-3)


def test_both_solvers_reach_the_same_least_level():
    """Five different gangs on two types: the optimum is one, the shares are not."""
    jobs = ledger([1, 1, 2, 1, 2], v100=2, p100=2, slow=0.3)
    rows, equal = np.arange(5), jobs.rate[:5] @ (jobs.capacity / jobs.capacity.sum())

    def least(interior):
        shares = fairness.least_attained_service(jobs, rows, agnostic=False, interior=interior)
        assert (jobs.gpus[:5] @ shares <= jobs.capacity * (1 + 1e-6)).all()
        return (jobs.gpus[:5] * (jobs.rate[:5] * shares).sum(axis=1) / equal).min()

    assert least(True) == pytest.approx(least(False), rel=1e-4)


def test_the_makespan_bisection_stops_within_five_percent_of_the_optimum():
    """One job of 1000 steps at 1 step/s: all done in 1000 to 1050 s."""
    jobs = ledger([1])
    shares = fairness.makespan(jobs, np.arange(1), least=1000.0)
    assert 1000.0 <= 1000.0 / float(jobs.rate[0] @ shares[0]) <= 1050.0 * (1 + 1e-5)


def test_accounts_find_their_entries_again_and_forget_who_is_done():
    """A pair that comes back has its account; its jobs alone have others."""
    accounts, done = ShareAccounts(1), np.zeros(3, dtype=bool)
    first, alone = np.array([0, 0]), np.array([1, -1])
    accounts.open(first, alone, done=done, keep=True, deficits=False)
    accounts.promised[:] = [[5.0], [7.0]]
    accounts.open(np.array([2]), np.array([-1]), done=done, keep=True, deficits=False)
    assert accounts.promised.tolist() == [[0.0]]
    accounts.open(first[::-1], alone[::-1], done=done, keep=True, deficits=False)
    assert accounts.promised.tolist() == [[7.0], [5.0]]
    assert accounts.entries(np.array([0, 2]), np.array([1, -1])).tolist() == [1, -1]
    done[1] = True
    accounts.open(first, alone, done=done, keep=True, deficits=False)
    assert accounts.promised.tolist() == [[0.0], [7.0]]
