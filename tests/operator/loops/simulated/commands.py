"""A job without a model, as a cluster sees it: a command in each pod, with the client library or without."""

import dataclasses
from typing import Any

from ballast_operator.kube.kinds import CONFIG_MAP, LEASE, POD
from ballast_operator.views.clock import Time, show_micro
from ballast_policies.contract.messages import (
    ACK_ANNOTATION,
    JOB_LABEL,
    LAUNCH_LABEL,
    PLAN_KEY,
    REPORT_ANNOTATION,
    Ack,
    ExitCode,
    Report,
    lease_name,
    plan_config_map_name,
)
from ballast_policies.contract.plan import Directive, Plan

from tests.operator.loops.simulated.machines import end_pod
from tests.operator.loops.simulated.world import World


@dataclasses.dataclass(slots=True)
class Command:
    """All ranks of a script. They meet, work through ``total`` steps, and exit with success.

    ``client``: rank 0 speaks to the operator. ``silent``: nothing happens, as in a command that hangs.
    """

    namespace: str
    job: str
    total: int = 100
    pace: int = 10
    client: bool = False
    silent: bool = False
    launch: int = 0
    met: bool = False
    step: int = 0
    saved: int = 0
    acknowledged: int = 0
    resumed_from: list[int] = dataclasses.field(default_factory=list)

    def act(self, world: World, now: Time) -> None:
        """One step of all ranks."""
        pods = [pod for pod in world.items(POD) if pod["metadata"]["labels"].get(JOB_LABEL) == self.job]
        if not pods or self.silent:
            return
        launch = max(int(pod["metadata"]["labels"][LAUNCH_LABEL]) for pod in pods)
        ranks = [pod for pod in pods if pod["metadata"]["labels"][LAUNCH_LABEL] == str(launch)]
        phases = [pod["status"]["phase"] for pod in ranks]
        if launch != self.launch:
            self.launch, self.met, self.step = launch, False, self.saved
            self.resumed_from.append(self.saved)
        environment = {one["name"]: one for one in ranks[0]["spec"]["containers"][0]["env"]}
        whole = len(ranks) == int(environment["WORLD_SIZE"]["value"])
        if not self.met:
            self.met = whole and all(phase == "Running" for phase in phases)
            return
        if not whole or "Failed" in phases:
            self._exit(world, ranks, ExitCode.ERROR, now)  # a peer is gone
            return
        plan = self._plan(world) if self.client else None
        if plan is not None and plan.launch == launch and plan.directive is Directive.CHECKPOINT_AND_STOP:
            self.saved = self.step
            self._exit(world, ranks, ExitCode.STOPPED, now)
            return
        self.step = min(self.total, self.step + self.pace)
        self.saved = self.step - self.step % 20
        if plan is not None:
            self._write(world, now, plan)
        if self.step >= self.total:
            self._exit(world, ranks, ExitCode.OK, now)

    def _exit(self, world: World, ranks: list[dict[str, Any]], code: int, now: Time) -> None:
        for pod in ranks:
            end_pod(world, self.namespace, pod["metadata"]["name"], code, at=now)

    def _plan(self, world: World) -> Plan | None:
        config = world.get(CONFIG_MAP, self.namespace, plan_config_map_name(self.job))
        return None if config is None else Plan.from_json(config["data"][PLAN_KEY])

    def _write(self, world: World, now: Time, plan: Plan) -> None:
        report = Report(epoch=plan.epoch, step=self.step, loss=1.0, steps_per_second=5.0)
        annotations = {
            ACK_ANNOTATION: Ack(epoch=plan.epoch, step=self.step).to_json(),
            REPORT_ANNOTATION: report.to_json(),
        }
        spec = {"holderIdentity": plan.ranks[0].pod, "renewTime": show_micro(now)}
        patch = {"metadata": {"annotations": annotations}, "spec": spec}
        world.patch(LEASE, self.namespace, lease_name(self.job), patch)
