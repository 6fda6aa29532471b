"""What can go wrong: each kind is a function of the simulation and a number that chooses the victim."""

import dataclasses
import random
from collections.abc import Callable, Iterable

from ballast_operator.errors import Conflict, NotAllowed, Rejected, Unavailable
from ballast_operator.kube.caches import WATCHED
from ballast_operator.kube.kinds import CONFIG_MAP, JOB, LEASE, NODE, POD, ROLE
from ballast_policies.contract import (
    ACK_ANNOTATION,
    PLAN_KEY,
    Ack,
    ExitReason,
    Plan,
    TerminationMessage,
    lease_name,
    plan_config_map_name,
)

from tests.chaos.cluster import JOBS, NODES, ChaosSimulation, Crash
from tests.operator.loops.hostile.test_lies import LIES
from tests.operator.loops.simulated.machines import Trainer, end_pod, node
from tests.operator.loops.simulated.simulation import NAMESPACE

Apply = Callable[[ChaosSimulation, int], None]
KINDS: dict[str, Apply] = {}
"""Name -> what it does."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """One fault: ``ticks`` of peace before it, and a number that chooses victim and length."""

    kind: str
    number: int
    ticks: int


def sequence(seed: int, count: int, kinds: Iterable[str] = KINDS) -> tuple[Fault, ...]:
    """The faults of ``seed``: the same each time. Every kind comes before any comes twice."""
    chance = random.Random(seed)
    names, known = list[str](), sorted(kinds)
    while len(names) < count:
        names += chance.sample(known, len(known))
    return tuple(Fault(name, chance.randrange(10_000), chance.randint(1, 6)) for name in names[:count])


def kind(name: str) -> Callable[[Apply], Apply]:
    def register(apply: Apply) -> Apply:
        KINDS[name] = apply
        return apply

    return register


def _until(simulation: ChaosSimulation, number: int, longest: int) -> int:
    return simulation.number + 1 + number % longest


def _job(number: int) -> str:
    return JOBS[number % len(JOBS)]


def _node(number: int) -> str:
    return sorted(NODES)[number % len(NODES)]


def _at_write(simulation: ChaosSimulation, number: int, error: BaseException, *, landed: bool) -> None:
    """One of the next writes fails, before or after it has landed."""

    def fail() -> None:
        raise error

    if not landed:
        simulation.trouble.next_write += [lambda: None] * (number % 7) + [fail]
        return
    last = simulation.world.writes + number % 7

    def after(write: int) -> None:
        if write >= last:
            simulation.world.after_write = lambda _: None
            raise error

    simulation.world.after_write = after


@kind("operator killed after a write")
def _(simulation: ChaosSimulation, number: int) -> None:
    _at_write(simulation, number, Crash(), landed=True)


@kind("operator killed before a write")
def _(simulation: ChaosSimulation, number: int) -> None:
    _at_write(simulation, number, Crash(), landed=False)


@kind("operator stopped for a while")
def _(simulation: ChaosSimulation, number: int) -> None:
    simulation.trouble.away = _until(simulation, number, 12)


@kind("answer lost")
def _(simulation: ChaosSimulation, number: int) -> None:
    _at_write(simulation, number, Unavailable("the answer was lost"), landed=True)


for code, error in {
    "409": Conflict("HTTP 409"),
    "410": Unavailable("HTTP 410"),
    "429": Unavailable("HTTP 429"),
    "500": Unavailable("HTTP 500"),
    "time-out": Unavailable("TimeoutError"),
}.items():

    @kind(f"write answered by {code}")
    def _(simulation: ChaosSimulation, number: int, error: Exception = error) -> None:
        _at_write(simulation, number, error, landed=False)


@kind("API server or etcd away")
def _(simulation: ChaosSimulation, number: int) -> None:
    simulation.error = Unavailable("connection refused")
    simulation.trouble.api_down = _until(simulation, number, 10)


@kind("watch stalled")
def _(simulation: ChaosSimulation, number: int) -> None:
    simulation.trouble.stalled[WATCHED[number % len(WATCHED)]] = _until(simulation, number // 7, 12)


@kind("clock jumps ahead")
def _(simulation: ChaosSimulation, number: int) -> None:
    simulation.jump(10 + number % 400)


@kind("clock jumps back")
def _(simulation: ChaosSimulation, number: int) -> None:
    simulation.jump(-(1 + number % 60))


def _change_node(simulation: ChaosSimulation, number: int, longest: int, patch: dict) -> None:
    name = _node(number)
    if simulation.world.get(NODE, "", name) is not None:
        simulation.world.patch(NODE, "", name, patch)
        simulation.trouble.nodes[name] = _until(simulation, number // 3, longest)


NOT_READY = {"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}
TAINT = {"key": "maintenance", "effect": "NoSchedule"}


@kind("node lost")
def _(simulation: ChaosSimulation, number: int) -> None:
    _change_node(simulation, number, 30, NOT_READY)


@kind("node flaps")
def _(simulation: ChaosSimulation, number: int) -> None:
    _change_node(simulation, number, 2, NOT_READY)


@kind("node tainted")
def _(simulation: ChaosSimulation, number: int) -> None:
    _change_node(simulation, number, 20, {"spec": {"taints": [TAINT]}})


@kind("node cordoned")
def _(simulation: ChaosSimulation, number: int) -> None:
    _change_node(simulation, number, 20, {"spec": {"unschedulable": True}})


@kind("node relabelled")
def _(simulation: ChaosSimulation, number: int) -> None:
    _change_node(simulation, number, 20, {"metadata": {"labels": {"pool": "another"}}})


def restore_nodes(simulation: ChaosSimulation, *, all_of_them: bool = False) -> None:
    """Nodes whose time is over are as they were."""
    for name, until in list(simulation.trouble.nodes.items()):
        if all_of_them or simulation.number >= until:
            del simulation.trouble.nodes[name]
            simulation.world.put(NODE, node(name, *NODES[name]))


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


@kind("trainer hangs")
def _(simulation: ChaosSimulation, number: int) -> None:
    simulation.trouble.silent[_job(number)] = _until(simulation, number // 4, 40)


@kind("trainer does not change its size")
def _(simulation: ChaosSimulation, number: int) -> None:
    simulation.trouble.deaf[_job(number)] = _until(simulation, number // 4, 40)


@kind("trainer says that it has changed its size and has not")
def _(simulation: ChaosSimulation, number: int) -> None:
    name = _job(number)
    trainer = simulation.trainers[name]
    if not isinstance(trainer, Trainer):
        return
    config = simulation.world.get(CONFIG_MAP, NAMESPACE, plan_config_map_name(name))
    if config is None or PLAN_KEY not in config["data"]:
        return
    plan = Plan.from_json(config["data"][PLAN_KEY])
    lie = Ack(epoch=plan.epoch + 1, step=trainer.step).to_json()
    patch = {"metadata": {"annotations": {ACK_ANNOTATION: lie}}}
    if simulation.world.get(LEASE, NAMESPACE, lease_name(name)) is not None:
        simulation.world.patch(LEASE, NAMESPACE, lease_name(name), patch)


for name, (annotation, text) in LIES.items():
    if name in ("an epoch of the future",):
        continue  # a true acknowledgement never follows it: the liar's own job restarts by time-outs

    @kind(f"trainer says {name}")
    def _(simulation: ChaosSimulation, number: int, annotation: str = annotation, text: str = text) -> None:
        patch = {"metadata": {"annotations": {annotation: text}}}
        simulation.world.patch(LEASE, NAMESPACE, lease_name(_job(number)), patch)


for what, refusal in (
    ("quota is full", NotAllowed("exceeded quota: pods=0")),
    ("webhook refuses pods", Rejected("admission webhook denied the request")),
):

    @kind(what)
    def _(simulation: ChaosSimulation, number: int, refusal: Exception = refusal) -> None:
        def refuse(kind: object, body: object) -> None:
            raise refusal

        simulation.refusal = refuse
        simulation.trouble.refused = _until(simulation, number, 8)


@kind("webhook changes a pod")
def _(simulation: ChaosSimulation, number: int) -> None:
    names = _pods(simulation)
    if names:
        change = {"metadata": {"annotations": {"mesh": "injected"}}, "spec": {"priority": 7}}
        simulation.world.patch(POD, NAMESPACE, names[number % len(names)], change)


for what, lost in (("plan deleted", CONFIG_MAP), ("lease deleted", LEASE), ("role deleted", ROLE)):

    @kind(what)
    def _(simulation: ChaosSimulation, number: int, lost: object = lost) -> None:
        job = _job(number)
        names = {CONFIG_MAP: plan_config_map_name(job), LEASE: lease_name(job), ROLE: f"{job}-trainer"}
        simulation.world.drop(lost, NAMESPACE, names[lost])


def set_suspended(simulation: ChaosSimulation, name: str, wanted: bool) -> None:
    item = simulation.world.get(JOB, NAMESPACE, name)
    if item is not None:
        simulation.world.patch(JOB, NAMESPACE, name, {"spec": {**item["spec"], "suspend": wanted}})


@kind("job suspended and resumed")
def _(simulation: ChaosSimulation, number: int) -> None:
    name = _job(number)
    set_suspended(simulation, name, True)
    simulation.trouble.suspended[name] = _until(simulation, number // 4, 10)
