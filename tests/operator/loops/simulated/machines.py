"""What the rest of a cluster does: nodes that run pods, and trainers that keep the contract."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ballast_operator.kube.kept_fields import pinned_node
from ballast_operator.kube.kinds import CONFIG_MAP, LEASE, NODE, POD
from ballast_operator.views.clock import Time, parse, show, show_micro
from ballast_policies.contract.job.job import JobConfig
from ballast_policies.contract.messages import (
    ACK_ANNOTATION,
    CONFIG_KEY,
    FINISHED_ANNOTATION,
    JOB_LABEL,
    LAUNCH_LABEL,
    PLAN_KEY,
    POD_IP_ENV,
    PROPOSAL_ANNOTATION,
    REPORT_ANNOTATION,
    Ack,
    ExitCode,
    ExitReason,
    Proposal,
    Report,
    SlowRank,
    Stage,
    TerminationMessage,
    Tried,
    lease_name,
    plan_config_map_name,
)
from ballast_policies.contract.plan import Directive, Plan

from tests.operator.loops.simulated.world import World


def run_pods(world: World, now: Time) -> None:
    """One step of all kubelets: pinned pods start, pods that are deleted go when their grace is over."""
    for pod in world.items(POD):
        namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        node = world.get(NODE, "", pinned_node(pod))
        dead = node is not None and node["status"]["conditions"][0]["status"] != "True"
        unbound = not pod["spec"].get("nodeName")
        if dead and not (unbound and pod["metadata"].get("deletionTimestamp")):
            continue
        if _is_over(pod, now):
            world.drop(POD, namespace, name)
        elif pod["status"]["phase"] == "Pending" and node is not None and _can_start(world, pod):
            number = int(pod["metadata"]["uid"].split("-")[1])
            world.patch(
                POD,
                namespace,
                name,
                {
                    "spec": {"nodeName": pinned_node(pod)},
                    "status": {"phase": "Running", "podIP": f"127.1.{number // 250 % 250}.{number % 250}"},
                },
            )


def _is_over(pod: dict[str, Any], now: Time) -> bool:
    ends = pod["metadata"].get("deletionTimestamp")
    return ends is not None and (pod["status"]["phase"] != "Running" or parse(ends) <= now)


def evict(world: World, namespace: str, name: str, at: Time, *, reason: str) -> None:
    """The pod is told to end, and is killed ``at``; ``reason``: of the eviction; empty: it is deleted."""
    condition = {"type": "DisruptionTarget", "status": "True", "reason": reason}
    status = {"status": {"conditions": [condition]}} if reason else {}
    world.patch(POD, namespace, name, {"metadata": {"deletionTimestamp": show(at)}, **status})


def _can_start(world: World, pod: dict[str, Any]) -> bool:
    """Whether the ConfigMaps that the container's environment refers to have the keys."""
    for variable in pod["spec"]["containers"][0].get("env", []):
        wanted = variable.get("valueFrom", {}).get("configMapKeyRef")
        if wanted is not None:
            found = world.get(CONFIG_MAP, pod["metadata"]["namespace"], wanted["name"])
            if found is None or wanted["key"] not in found["data"]:
                return False
    return True


def end_pod(
    world: World,
    namespace: str,
    name: str,
    code: int,
    message: TerminationMessage | None = None,
    at: Time | None = None,
    *,
    reason: str = "Error",
) -> None:
    """The pod's trainer ends, and with it the pod, unless there are sidecars."""
    pod = world.get(POD, namespace, name)
    if pod is None or pod["status"]["phase"] in ("Succeeded", "Failed"):
        return
    ended: dict[str, Any] = {"exitCode": code, "reason": "Completed" if code == 0 else reason}
    if at is not None:
        ended["finishedAt"] = show(at)
    if message is not None:
        ended["message"] = message.to_json()
    containers = {each["name"]: each for each in pod["spec"]["containers"]}
    ours = {"name": POD_IP_ENV, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    container = next(name for name, each in containers.items() if ours in each.get("env", ()))
    sidecars = containers.keys() - {container}
    status = {"phase": "Running" if sidecars else "Succeeded" if code == 0 else "Failed"}
    status["containerStatuses"] = [
        {"name": container, "state": {"terminated": ended}},
        *({"name": name, "state": {"running": {}}} for name in sidecars),
    ]
    world.patch(POD, namespace, name, {"status": status})


@dataclasses.dataclass(slots=True)
class Trainer:
    """All ranks of one job, as far as the operator can see them.

    Attributes:
        speed: steps/s, unless it ``scales``.
        spread: its speed on several nodes over that on one.
        beside: its speed while a pod of another job runs on its node, over that alone.
        layers: seconds of each layer for a sample on one GPU; empty: they are not reported.
        layer_bytes: of each; empty: not reported.
        stages: in which it has them by now; empty: not reported.
        slow: ranks that it reports as slow.
        start_seconds: from its plan to its first step.
        tries: seconds of a step under its plan's candidates, of which each act tries one; None: one fails.
    """

    namespace: str
    job: str
    total: int = 100
    pace: int = 10
    speed: float = 5.0
    spread: float = 1.0
    beside: float = 1.0
    shares: bool = False
    shrink_at: int | None = None
    shrink_to: int = 1
    silent: bool = False
    deaf: bool = False
    saves: bool = True
    scales: bool = False
    layers: tuple[float, ...] = ()
    layer_bytes: tuple[int, ...] = ()
    stages: tuple[Stage, ...] = ()
    growth_pause_ms: float | None = None
    handover_seconds: float = 15.0
    slow: tuple[SlowRank, ...] = ()
    start_seconds: float = 0.0
    planned_at: Time | None = None
    tries: tuple[float | None, ...] = ()
    told_at: Time | None = None
    ranks: tuple[str, ...] = ()
    nodes: int = 1
    epoch: int = 0
    launch: int = 0
    step: int = 0
    saved: int = 0
    resumed_from: list[int] = dataclasses.field(default_factory=list)

    def act(self, world: World, now: Time) -> None:
        """One step of rank 0 and the ranks that follow it."""
        config = world.get(CONFIG_MAP, self.namespace, plan_config_map_name(self.job))
        if config is None or PLAN_KEY not in config["data"] or self.silent:
            return
        plan = Plan.from_json(config["data"][PLAN_KEY])
        pods = {name: world.get(POD, self.namespace, name) for name in plan.pods}
        if any(pod is None or pod["status"]["phase"] != "Running" for pod in pods.values()):
            return
        if plan.launch != self.launch:
            self.launch, self.step, self.planned_at = plan.launch, self.saved, now
            self.resumed_from.append(self.saved)
        if self.planned_at is not None and (now - self.planned_at).total_seconds() < self.start_seconds:
            return
        if self._saves_since_told(world, plan, [pod for pod in pods.values() if pod is not None], now):
            return
        changes = plan.directive in (Directive.GROW, Directive.SHRINK)
        stops = plan.directive is Directive.CHECKPOINT_AND_STOP
        if plan.epoch > self.epoch and not (self.deaf and changes) and (self.saves or not stops):
            self.epoch = plan.epoch
            self._reach(world, plan, now)
            return
        if stops and self.saves:
            return
        if plan.epoch > self.epoch:
            self._write(world, now)  # alive, and no more
            return
        self.ranks = plan.pods
        self.step = min(self.total, self.step + self.pace)
        self.saved = self.step - self.step % 20
        self.nodes = len({pod["spec"]["nodeName"] for pod in pods.values() if pod is not None})
        self.shares = self.beside != 1.0 and self._has_company(world, pods)
        report = self._report(plan)
        if self.layers:
            report = report.replace(layer_seconds=self._layer_seconds(config), stages=self.stages)
        if plan.candidates and self.tries:
            report = report.replace(**self._tried(plan))
        self._write(world, now, report=report)
        if self.step >= self.total:
            self._write(world, now, finished=str(self.step))
            for pod in plan.pods:
                end_pod(world, self.namespace, pod, ExitCode.OK)
        elif self.shrink_at is not None and self.step >= self.shrink_at and len(plan.pods) > self.shrink_to:
            self._propose(world, plan, now)

    def _saves_since_told(self, world: World, plan: Plan, pods: list[dict[str, Any]], now: Time) -> bool:
        """Whether ranks of evicted pods have waited long enough for a plan that releases them."""
        told = [bool(pod["metadata"].get("deletionTimestamp")) for pod in pods]
        if not any(told):
            self.told_at = None
            return False
        self.told_at = self.told_at or now
        waits = (now - self.told_at).total_seconds() < self.handover_seconds
        # The ranks that a plan releases have left it already.
        if plan.epoch > self.epoch or (waits and not told[0] and not all(told)):
            return False
        self.saved = self.step
        message = TerminationMessage(reason=ExitReason.STOPPED, message="told to stop", step=self.step)
        for pod in plan.pods:
            end_pod(world, self.namespace, pod, ExitCode.STOPPED, message)
        return True

    def _reach(self, world: World, plan: Plan, now: Time) -> None:
        if plan.directive is Directive.CHECKPOINT_AND_STOP:
            self.saved = self.step
            ack = Ack(epoch=plan.epoch, step=self.step, checkpoint_step=self.saved)
            self._write(world, now, ack=ack)
            message = TerminationMessage(reason=ExitReason.STOPPED, message="as asked", step=self.step)
            for pod in {*plan.pods, *self.ranks}:
                end_pod(world, self.namespace, pod, ExitCode.STOPPED, message)
            return
        pause = 12.5 if plan.directive is Directive.SHRINK else None
        if plan.directive is Directive.GROW:
            pause = self.growth_pause_ms
        if plan.directive is Directive.SHRINK:
            message = TerminationMessage(reason=ExitReason.RELEASED, message="released", step=self.step)
            for pod in world.items(POD):
                labels = pod["metadata"].get("labels") or {}
                name = pod["metadata"]["name"]
                mine = labels.get(JOB_LABEL) == self.job and labels.get(LAUNCH_LABEL) == str(plan.launch)
                if mine and plan.rank_of(name) is None:
                    end_pod(world, self.namespace, name, ExitCode.OK, message)
        self._write(world, now, ack=Ack(epoch=plan.epoch, step=self.step, pause_ms=pause))

    def _propose(self, world: World, plan: Plan, now: Time) -> None:
        names = plan.pods
        proposal = Proposal(
            epoch=plan.epoch,
            step=self.step,
            kept_pods=names[: self.shrink_to],
            released_pods=names[self.shrink_to :],
            stages=(),
            step_seconds_before=0.10,
            step_seconds_after=0.105,
            reason="the layers got cheaper",
        )
        self._write(world, now, proposal=proposal)

    def _has_company(self, world: World, own: Mapping[str, Any]) -> bool:
        nodes = {pod["spec"]["nodeName"] for pod in own.values() if pod is not None}
        return any(
            pod["spec"].get("nodeName") in nodes and pod["status"]["phase"] == "Running"
            for pod in world.items(POD)
            if pod["metadata"]["name"] not in own
        )

    def _tried(self, plan: Plan) -> dict[str, Any]:
        count = len(plan.candidates)
        done = self.tries[: min(count, (self.step - self.resumed_from[-1]) // self.pace)]
        measured = [Tried() if took is not None else Tried(reason="no room") for took in done]
        measured = [one.replace(step_seconds=took) for one, took in zip(measured, done, strict=True)]
        ran = {took: number for number, took in enumerate(done) if took is not None}
        kept = ran[min(ran)] if len(done) == count else None
        return {"tried": (*measured, *(Tried(),) * (count - len(done))), "kept": kept}

    def _layer_seconds(self, config: Mapping[str, Any]) -> tuple[float, ...]:
        """Of a rank's step, forwards as well where they are repeated: a third of a layer."""
        launched = JobConfig.from_json(config["data"][CONFIG_KEY])
        samples = launched.pipeline.global_batch_size / launched.parallelism.ranks_per_position
        repeated = 4 / 3 if launched.training.recompute else 1.0
        return tuple(samples * repeated * seconds for seconds in self.layers)

    def _report(self, plan: Plan) -> Report:
        speed = 2.5 * len(plan.ranks) ** 0.8 if self.scales else self.speed
        speed *= self.beside if self.shares else 1.0
        return Report(
            epoch=plan.epoch,
            step=self.step,
            loss=1.0 / (1 + self.step),
            steps_per_second=speed * (self.spread if self.nodes > 1 else 1.0),
            checkpoint_step=self.saved,
            slow_ranks=self.slow,
            layer_bytes=self.layer_bytes,
        )

    def _write(self, world: World, now: Time, **messages: Any) -> None:
        names = {
            "ack": ACK_ANNOTATION,
            "report": REPORT_ANNOTATION,
            "proposal": PROPOSAL_ANNOTATION,
            "finished": FINISHED_ANNOTATION,
        }
        annotations = {
            names[kind]: value if isinstance(value, str) else value.to_json()
            for kind, value in messages.items()
        }
        patch = {"metadata": {"annotations": annotations}, "spec": {"renewTime": show_micro(now)}}
        world.patch(LEASE, self.namespace, lease_name(self.job), patch)


def node(name: str, pool: str, gpus: int, *, ready: bool = True) -> dict[str, Any]:
    """A Node."""
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"pool": pool}},
        "spec": {},
        "status": {
            "allocatable": {"nvidia.com/gpu": str(gpus)},
            "nodeInfo": {"bootID": "1"},
            "conditions": [{"type": "Ready", "status": "True" if ready else "Unknown"}],
        },
    }
