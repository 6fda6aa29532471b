"""Trainers hang or lie, what belongs to a job is deleted, and a job is suspended."""

from ballast_operator.kube.kinds import CONFIG_MAP, JOB, LEASE, ROLE
from ballast_policies.contract.messages import ACK_ANNOTATION, PLAN_KEY, Ack, lease_name, plan_config_map_name
from ballast_policies.contract.plan import Plan

from tests.chaos.cluster import ChaosSimulation
from tests.chaos.kinds.registry import job_of, kind, until
from tests.operator.loops.hostile.test_lies import LIES
from tests.operator.loops.simulated.machines import Trainer
from tests.operator.loops.simulated.simulation import NAMESPACE


@kind("trainer hangs")
def _(simulation: ChaosSimulation, number: int) -> None:
    simulation.trouble.silent[job_of(number)] = until(simulation, number // 4, 40)


@kind("trainer does not change its size")
def _(simulation: ChaosSimulation, number: int) -> None:
    simulation.trouble.deaf[job_of(number)] = until(simulation, number // 4, 40)


@kind("trainer says that it has changed its size and has not")
def _(simulation: ChaosSimulation, number: int) -> None:
    name = job_of(number)
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
        simulation.world.patch(LEASE, NAMESPACE, lease_name(job_of(number)), patch)


for what, lost in (("plan deleted", CONFIG_MAP), ("lease deleted", LEASE), ("role deleted", ROLE)):

    @kind(what)
    def _(simulation: ChaosSimulation, number: int, lost: object = lost) -> None:
        job = job_of(number)
        names = {CONFIG_MAP: plan_config_map_name(job), LEASE: lease_name(job), ROLE: f"{job}-trainer"}
        simulation.world.drop(lost, NAMESPACE, names[lost])


def set_suspended(simulation: ChaosSimulation, name: str, wanted: bool) -> None:
    item = simulation.world.get(JOB, NAMESPACE, name)
    if item is not None:
        simulation.world.patch(JOB, NAMESPACE, name, {"spec": {**item["spec"], "suspend": wanted}})


@kind("job suspended and resumed")
def _(simulation: ChaosSimulation, number: int) -> None:
    name = job_of(number)
    set_suspended(simulation, name, True)
    simulation.trouble.suspended[name] = until(simulation, number // 4, 10)
