"""Pods fail, are evicted, deleted, refused or changed."""

from ballast_operator.errors import NotAllowed, Rejected
from ballast_operator.kube.kinds import POD
from ballast_policies.contract.messages import ExitReason, TerminationMessage

from tests.chaos.cluster import ChaosSimulation
from tests.chaos.kinds.registry import kind, until
from tests.operator.loops.simulated.machines import end_pod
from tests.operator.loops.simulated.simulation import NAMESPACE


def _pods(simulation: ChaosSimulation, *phases: str) -> list[str]:
    pods = simulation.world.items(POD)
    return [pod["metadata"]["name"] for pod in pods if not phases or pod["status"]["phase"] in phases]


def _end_a_pod(simulation: ChaosSimulation, number: int, code: int, said: str = "") -> None:
    names = _pods(simulation, "Running")
    if names:
        message = TerminationMessage(reason=ExitReason.FAILED, message=said) if said else None
        end_pod(simulation.world, NAMESPACE, names[number % len(names)], code, message)


for what, code, said in (
    ("pod fails by its own fault", 1, "ValueError: boom"),
    ("disk full", 1, "OSError: [Errno 28] No space left on device"),
    ("checkpoint storage errs", 1, "OSError: [Errno 5] Input/output error"),
    ("rank loses its peer", 76, ""),
    ("pod killed", 137, ""),
    ("pod told to end", 143, ""),
):

    @kind(what)
    def _(simulation: ChaosSimulation, number: int, code: int = code, said: str = said) -> None:
        _end_a_pod(simulation, number, code, said)


def _fail_a_pod(simulation: ChaosSimulation, number: int, status: dict) -> None:
    names = _pods(simulation, "Running", "Pending")
    if names:
        patch = {"status": {"phase": "Failed", **status}}
        simulation.world.patch(POD, NAMESPACE, names[number % len(names)], patch)


@kind("pod out of memory")
def _(simulation: ChaosSimulation, number: int) -> None:
    ended = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    _fail_a_pod(simulation, number, {"containerStatuses": [{"name": "trainer", "state": ended}]})


@kind("pod evicted")
def _(simulation: ChaosSimulation, number: int) -> None:
    _fail_a_pod(simulation, number, {"reason": "Evicted", "message": "the node was low on memory"})


@kind("pod deleted by someone")
def _(simulation: ChaosSimulation, number: int) -> None:
    names = _pods(simulation)
    if names:
        stamp = {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}
        simulation.world.patch(POD, NAMESPACE, names[number % len(names)], stamp)


for what, refusal in (
    ("quota is full", NotAllowed("exceeded quota: pods=0")),
    ("webhook refuses pods", Rejected("admission webhook denied the request")),
):

    @kind(what)
    def _(simulation: ChaosSimulation, number: int, refusal: Exception = refusal) -> None:
        def refuse(kind: object, body: object) -> None:
            raise refusal

        simulation.refusal = refuse
        simulation.trouble.refused = until(simulation, number, 8)


@kind("webhook changes a pod")
def _(simulation: ChaosSimulation, number: int) -> None:
    names = _pods(simulation)
    if names:
        change = {"metadata": {"annotations": {"mesh": "injected"}}, "spec": {"priority": 7}}
        simulation.world.patch(POD, NAMESPACE, names[number % len(names)], change)
