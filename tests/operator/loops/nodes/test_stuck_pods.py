"""Pods that do not end although they were told to: their node's kubelet hangs, or a process in the kernel."""

import pytest

from tests.operator.loops.simulated import machines
from tests.operator.loops.simulated.simulation import NAMESPACE, Simulation

LONG = {"totalSteps": 10**6}


@pytest.mark.slow
async def test_gpus_of_a_pod_that_does_not_end_are_promised_to_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other jobs take turns on the rest, also one that needs a whole node; the pod is named."""
    stuck, is_over = set[str](), machines._is_over
    monkeypatch.setattr(
        machines, "_is_over", lambda pod, now: pod["metadata"]["name"] not in stuck and is_over(pod, now)
    )
    simulation = Simulation(
        nodes={"n": ("fast", 2), "m": ("fast", 2)},
        pools={"empty": {}},  # an autoscaler's, say: what is told of it leaves out no pod
        roundSeconds=20,
        moves={"maxMovesPerHour": 1000},
    )
    await simulation.run_job("a", **LONG)
    _, last = sorted(pod["metadata"]["name"] for pod in simulation.pods("a"))
    (node,) = simulation.nodes("a")
    stuck.add(last)
    for name, gpus in {"wide": 2, "b": 1, "c": 1, "d": 1}.items():
        simulation.add_job(name, **LONG, stages=(gpus, gpus))
    simulation.trainers["a"].silent = True
    simulation.change("a", suspend=True)
    told = f"pods that do not end hold GPUs: {NAMESPACE}/{last}. To fix: see the kubelet"
    await simulation.until(lambda: told in simulation.policy_condition("Valid")["message"], ticks=400)
    words = f"pods that were told to end have not: {last} on node {node}. To fix: see the kubelet"
    await simulation.until(lambda: words in simulation.explained("a"))
    others, ran = ("wide", "b", "c", "d"), set[str]()

    def all_have_run() -> bool:
        there = [pod for name in others for pod in simulation.pods(name)]
        assert sum(pod["spec"].get("nodeName") == node for pod in there) <= 1
        ran.update(name for name in others if simulation.state(name) == "Running")
        return ran == set(others)

    await simulation.until(all_have_run, ticks=600)
    stuck.clear()
    await simulation.until(lambda: "do not end" not in simulation.policy_condition("Valid")["message"])
