"""Seeded faults cost no job, and what fails is shortened to what makes it fail."""

import pytest
from ballast_operator.reconcile import surroundings
from ballast_policies.protocol import machine
from ballast_policies.protocol.machine import seen_failure
from ballast_policies.protocol.observed import Failure

from tests.chaos.faults import Fault, sequence
from tests.chaos.kinds.registry import KINDS
from tests.chaos.play import play, shortest
from tests.chaos.processes.faults import KINDS as PROCESS_KINDS


@pytest.mark.slow
def test_every_kind_of_fault_once_costs_no_job():
    """Each job succeeds, no step is lost, no node has more pods than GPUs at any write."""
    assert play(sequence(3, len(KINDS))).problem == ""


@pytest.mark.parametrize("kinds", [KINDS, PROCESS_KINDS], ids=["in memory", "of processes"])
def test_a_seed_is_always_the_same_sequence(kinds):
    """Otherwise a failure could not be replayed; every kind comes before any comes twice."""
    faults = sequence(5, len(kinds), kinds)
    assert faults == sequence(5, len(kinds), kinds) != sequence(6, len(kinds), kinds)
    assert {fault.kind for fault in faults} == set(kinds)


@pytest.mark.slow
@pytest.mark.nightly
def test_a_failing_sequence_is_shortened_to_the_fault_that_makes_it_fail(monkeypatch):
    """An operator with a bug that a killed pod brings out: of six faults, this one is left."""

    def with_bug(seen):
        if any(pod.failure is Failure.KILLED for pod in seen.gang_pods):
            raise RuntimeError("planted")
        return seen_failure(seen)

    monkeypatch.setattr(machine, "seen_failure", with_bug)
    harmless = ("node cordoned", "write answered by 409", "role deleted", "trainer says NaN", "answer lost")
    faults = [Fault(kind, 1, 2) for kind in harmless]
    faults.insert(2, Fault("pod killed", 1, 2))
    outcome = play(faults)
    assert outcome.verdict == "bugs" and "planted" in outcome.problem
    found = shortest(faults, lambda fewer: bool(play(fewer).problem))
    assert [fault.kind for fault in found] == ["pod killed"]


@pytest.mark.parametrize("count", [1, 3, 7])
def test_shortening_keeps_what_fails_only_together(count):
    """Two faults of many, at any distance."""
    faults = [Fault("node lost", number, 1) for number in range(9)]
    wanted = {faults[0], faults[count]}
    assert set(shortest(faults, lambda fewer: wanted <= set(fewer))) == wanted


@pytest.mark.slow
def test_gpus_over_capacity_are_noticed(monkeypatch):
    """An operator that does not look whether GPUs are free breaks a law of the cluster."""
    monkeypatch.setattr(surroundings, "shortage", lambda *arguments, **named: "")
    assert play(sequence(0, 20)).verdict == "overCapacity"
