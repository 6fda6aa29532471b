"""Templates that cannot become pods, and clusters that do not allow them: found before GPUs are reserved."""

import datetime
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from ballast_operator.errors import (
    NAMESPACE_ENDS,
    Forbidden,
    NotAllowed,
    Rejected,
    ServerInternalError,
    TooSlow,
)
from ballast_operator.kube.kinds import CLAIM, CONFIG_MAP, JOB, NODE, POD, STORAGE_CLASS, Kind
from ballast_operator.kube.kinds import NAMESPACE as NAMESPACES
from ballast_operator.reconcile.pod_checks import ANSWER_LASTS_SECONDS
from ballast_policies.contract.messages import JOB_LABEL, RANK_LABEL, ExitCode, ExitReason, TerminationMessage

from tests.operator.loops.simulated.machines import end_pod, node
from tests.operator.loops.simulated.simulation import NAMESPACE, Simulation, at, template

GPU = "nvidia.com/gpu"


def refusing(error: Exception, *, when: Callable[[Mapping[str, Any]], bool] = lambda body: True) -> Any:
    def admission(kind: Kind, body: Mapping[str, Any]) -> None:
        if kind is POD and when(body):
            raise error

    return admission


def of(name: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda body: body["metadata"]["labels"]["ballast.dev/job"] == name


SIDECAR = {"name": "side", "resources": {"limits": {GPU: 3}}}
TEMPLATES = {
    "a variable without a name": (
        template({"name": "x", "env": [{"value": "x"}]}),
        "spec.template.spec.containers[1].env[0].name",
    ),
    "a grace period as text": (
        template(terminationGracePeriodSeconds="abc"),
        "spec.template.spec.terminationGracePeriodSeconds",
    ),
    "tolerations as text": (template(tolerations=["all"]), "spec.template.spec.tolerations[0]"),
    "a deadline for pods": (template(activeDeadlineSeconds=2), "activeDeadlineSeconds"),
    "a GPU in a side car": (
        template(SIDECAR),
        f"spec.template.spec.containers[1].resources.limits[{GPU}]: '3'",
    ),
    "a GPU in an init container": (
        template(initContainers=[SIDECAR]),
        f"spec.template.spec.initContainers[0].resources.limits[{GPU}]: '3'",
    ),
    "several GPUs in the trainer": (
        {"spec": {"containers": [{"name": "t", "resources": {"requests": {GPU: "2"}}}]}},
        f"spec.template.spec.containers[0].resources.requests[{GPU}]: '2'",
    ),
}


@pytest.mark.parametrize(("wrong", "said"), TEMPLATES.values(), ids=TEMPLATES.keys())
async def test_a_template_that_cannot_become_a_pod_holds_no_gpus(wrong, said):
    """The condition names the field; no launch is written; another job uses the GPUs at once."""
    simulation = Simulation(nodes={"fast-0": ("fast", 2)})
    simulation.add_job("one", template=wrong)
    simulation.add_job("two")
    await simulation.until(lambda: simulation.state("two") == "Succeeded")
    await simulation.refused("one", "Misconfigured", said)
    status = simulation.status("one")
    assert (status.launches, status.restarts) == (0, {})


async def test_what_the_api_server_refuses_is_found_before_gpus_are_reserved():
    """Its words are in the condition; a corrected template is launched.

    It is asked again, too: what it refuses may be what a LimitRange has put there.
    """
    simulation = Simulation(nodes={"fast-0": ("fast", 2)})
    words = "HTTP 422 Pod{} is invalid: spec.containers[0].image: Required value"
    refused = Rejected(words.format(' "one-1-0"'))
    simulation.world.admission = refusing(refused, when=lambda b: "bad" in b["spec"])
    simulation.add_job("one", template=template(bad=1))
    await simulation.ticks(10)
    await simulation.refused("one", "Misconfigured", words.format(""))
    assert simulation.status("one").launches == 0
    again = await simulation.reconciler.reconcile((NAMESPACE, "one"))
    assert again.after_seconds == ANSWER_LASTS_SECONDS
    item = simulation.world.items(JOB)[0]
    simulation.world.put(JOB, {**item, "spec": {**item["spec"], "template": template()}})
    await simulation.running("one")


@pytest.mark.slow
async def test_what_the_cluster_does_not_allow_is_waited_for():
    """No launch, no restart, no GPU; the condition quotes it; the job runs soon after it is allowed."""
    words = 'HTTP 403 violates PodSecurity "restricted:latest": allowPrivilegeEscalation != false'
    simulation = Simulation(nodes={"fast-0": ("fast", 2)})
    simulation.world.admission = refusing(NotAllowed(words), when=of("one"))
    simulation.add_job("one", backoffLimit=0)
    simulation.add_job("two", totalSteps=20, template=template(hostname="two"))
    await simulation.until(lambda: simulation.state("two") == "Succeeded")
    await simulation.ticks(60, seconds=5.0)
    await simulation.refused("one", "NotAllowed", words, "; the operator asks again every 30 s")
    assert simulation.status("one").launches == 0
    assert simulation.world.dry_runs < 20
    simulation.world.admission = refusing(NotAllowed(words), when=of("nobody"))
    await simulation.until(lambda: simulation.state("one") == "Succeeded", ticks=90)


async def test_a_namespace_that_is_being_deleted_is_promised_no_gpus(caplog):
    """Each of its jobs says so once, and none is launched, though its template was taken before."""
    caplog.set_level("INFO")
    simulation, names = Simulation(nodes={"fast-0": ("fast", 4)}), [f"job-{number}" for number in range(4)]
    for name in names:
        simulation.add_job(name, totalSteps=10**6)
    await simulation.running(*names[:2])
    await simulation.ticks(35)  # that the namespace stays is an answer for 30 s
    caplog.clear()

    def admission(kind: Kind, body: Mapping[str, Any]) -> None:
        raise NotAllowed(f"HTTP 403 unable to create new content in namespace {NAMESPACE} {NAMESPACE_ENDS}")

    simulation.world.admission = admission
    going = {"name": NAMESPACE, "deletionTimestamp": at(0)}
    simulation.world.put(NAMESPACES, NAMESPACES.object(metadata=going))
    for kind in (CONFIG_MAP, POD):
        for item in simulation.world.items(kind):
            simulation.world.drop(kind, NAMESPACE, item["metadata"]["name"])
    words = f"namespace {NAMESPACE} is being deleted"
    await simulation.until(
        lambda: all(words in simulation.condition(name, "Admitted").message for name in names)
    )
    await simulation.ticks(60, seconds=5.0)
    assert [simulation.status(name).launches for name in names] == [1, 1, 0, 0]
    told = [line for line in caplog.messages if "is being deleted" in line]
    assert len(told) == len(names) and NAMESPACE_ENDS not in caplog.text


async def test_jobs_that_the_cluster_does_not_allow_are_at_rest():
    """They share an answer, which names no pod of one of them: asked again, it changes nothing."""
    simulation = Simulation(nodes={"fast-0": ("fast", 2)})

    def admission(kind: Kind, body: Mapping[str, Any]) -> None:
        if kind is POD:
            name = body["metadata"]["name"]
            raise NotAllowed(
                f'HTTP 403 pods "{name}" is forbidden: exceeded quota: used: {asked}, limited: 0'
            )

    simulation.world.admission, asked = admission, 0
    simulation.change_policy(roundSeconds=3600)
    for number in range(6):
        simulation.add_job(f"job-{number}")
    await simulation.until(lambda: all(view.blocked for view in simulation.observer.jobs()))
    await simulation.ticks(5)
    writes, dry_runs = simulation.world.writes, simulation.world.dry_runs
    await simulation.ticks(40)
    assert simulation.world.dry_runs > dry_runs
    assert "pods is forbidden" in simulation.condition("job-0", "Admitted").message
    assert simulation.world.writes == writes
    # Other words are told, and are no reason for a decision.
    asked, decisions = 1, simulation.decisions
    await simulation.until(lambda: "used: 1" in simulation.condition("job-0", "Admitted").message)
    assert simulation.decisions == decisions


async def test_a_webhook_that_hangs_is_waited_for_once_in_a_namespace():
    """Each template would wait for it as long, and jobs of other namespaces for their turns."""
    simulation = Simulation(nodes={"fast-0": ("fast", 2)})
    simulation.world.admission = refusing(TooSlow("POST pods: no answer in 10 s"))
    names = [f"job-{number}" for number in range(8)]
    for name in names:
        simulation.add_job(name, totalSteps=20, template=template(hostname=name))
    await simulation.ticks(75)
    for name in names:
        await simulation.refused(name, "NotAllowed", "no answer in 10 s. To fix: see what asks about pods")
    assert 2 <= simulation.world.dry_runs <= 4
    simulation.world.admission = lambda kind, body: None
    await simulation.until(lambda: all(simulation.state(name) == "Succeeded" for name in names), ticks=400)


async def test_a_clock_that_is_set_back_keeps_no_refusal_and_no_progress_from_being_told():
    """Pauses between questions, and between writes of progress, are not those of the clock on the wall."""
    simulation = Simulation(nodes={"fast-0": ("fast", 2)})
    simulation.ahead = datetime.timedelta(days=1)
    simulation.world.admission = refusing(NotAllowed("HTTP 403 not now"), when=of("two"))
    await simulation.run_job("one", stages=(1, 1), totalSteps=10_000)
    simulation.add_job("two", stages=(1, 1), template=template(hostname="two"))
    await simulation.ticks(20)
    step = simulation.status("one").progress.step
    simulation.ahead = datetime.timedelta()
    simulation.world.admission = refusing(NotAllowed("HTTP 403 not now"), when=of("nobody"))
    await simulation.until(lambda: simulation.state("two") == "Succeeded")
    assert simulation.status("one").progress.step > step


@pytest.mark.slow
async def test_a_quota_that_the_gang_exceeds_gives_the_gpus_back_and_is_tried_again():
    """The first pod would be allowed, the second is not: all or none, with growing pauses, uncounted."""
    simulation = Simulation(nodes={"fast-0": ("fast", 2)})
    words = "HTTP 403 exceeded quota: pods=1"
    second = refusing(NotAllowed(words), when=lambda b: b["metadata"]["name"].endswith("-1"))
    simulation.world.admission = second
    simulation.add_job("one", backoffLimit=0)
    held = 0
    for _ in range(300):
        await simulation.tick()
        held += simulation.status("one").allocation is not None
    status = simulation.status("one")
    assert not status.is_true("Failed")
    assert set(status.restarts) == {"NotAllowed"}
    assert status.restarts["NotAllowed"] < 10
    assert held < 60
    assert simulation.pods("one") == []
    simulation.world.admission = lambda kind, body: None
    await simulation.until(lambda: simulation.state("one") == "Succeeded", ticks=400)


def quota(simulation: Simulation, job: str, gpus: int) -> Any:
    """Admission that lets the pods of the job have so many GPUs at a time."""

    def asked(body: Mapping[str, Any]) -> int:
        limits = (each.get("resources", {}).get("limits", {}) for each in body["spec"]["containers"])
        return sum(int(found.get(GPU, 0)) for found in limits)

    def admission(kind: Kind, body: Mapping[str, Any]) -> None:
        if kind is POD and of(job)(body):
            used, more = sum(map(asked, simulation.pods(job))), asked(body)
            if used + more > gpus:
                raise NotAllowed(
                    f"HTTP 403 exceeded quota: few, requested: {more}, used: {used}, limited: {gpus}"
                )

    return admission


@pytest.mark.slow
async def test_a_gang_larger_than_a_quota_disturbs_nobody_again_and_goes_on_once_it_fits():
    """One launch finds it; what others run is stopped for no second one."""
    simulation = Simulation(nodes={"fast-0": ("fast", 4)}, roundSeconds=20)
    simulation.world.admission = quota(simulation, "wide", 3)
    simulation.add_job("small", totalSteps=10**6)
    simulation.add_job("wide", stages=(4, 4), totalSteps=10**6, backoffLimit=0)
    await simulation.until(lambda: bool(simulation.status("wide").restarts))
    await simulation.running("small")
    launches = simulation.status("small").launches
    await simulation.ticks(60, seconds=5.0)
    assert simulation.status("small").launches == launches
    status = simulation.status("wide")
    assert (status.launches, status.restarts, status.allocation) == (1, {"NotAllowed": 1}, None)
    await simulation.refused("wide", "NotAllowed", "the job's 4 pods", "requested: 4, used: 0, limited: 3")
    assert "NotAllowed" in simulation.world.events
    simulation.world.admission = quota(simulation, "wide", 4)
    await simulation.running("wide", ticks=120)


@pytest.mark.slow
async def test_a_quota_that_others_use_up_before_the_launch_is_asked_again_before_the_next():
    """The launch that it refuses is the last one until it has room."""
    simulation = Simulation(nodes={"fast-0": ("fast", 4)}, roundSeconds=20)
    simulation.world.admission = quota(simulation, "wide", 3)
    simulation.add_job("small", totalSteps=10**6)
    simulation.add_job("wide", stages=(4, 4), totalSteps=10**6, backoffLimit=0)
    await simulation.until(lambda: bool(simulation.status("wide").restarts))
    simulation.world.admission = quota(simulation, "wide", 4)
    await simulation.until(lambda: simulation.status("wide").launches == 2, ticks=200)
    simulation.world.admission = quota(simulation, "wide", 3)
    await simulation.until(lambda: simulation.status("wide").restarts.get("NotAllowed") == 2, ticks=200)
    launches = simulation.status("wide").launches
    await simulation.ticks(60, seconds=5.0)
    assert simulation.status("wide").launches == launches
    simulation.world.admission = quota(simulation, "wide", 4)
    await simulation.running("wide", ticks=120)


@pytest.mark.slow
async def test_a_quota_is_asked_about_what_a_limit_range_gives_each_pod_and_allows_it():
    """A CPU for each container that asks for none, and a GPU at most."""
    simulation = Simulation(nodes={"fast-0": ("fast", 4)}, roundSeconds=20)

    def cpus(body: Mapping[str, Any]) -> int:
        found = (each.get("resources", {}).get("requests", {}) for each in body["spec"]["containers"])
        return sum(int(requests.get("cpu", 0)) for requests in found)

    def admission(kind: Kind, body: Mapping[str, Any]) -> None:
        if kind is not POD:
            return
        for each in body["spec"]["containers"]:
            each["resources"]["requests"].setdefault("cpu", "1")
            if int(each["resources"]["limits"][GPU]) > 1:
                raise NotAllowed("HTTP 403 maximum nvidia.com/gpu usage per Container is 1")
        used = sum(map(cpus, simulation.pods("one")))
        if used + cpus(body) > limit:
            raise NotAllowed(f"HTTP 403 exceeded quota: cpu, used: {used}, limited: {limit}")

    simulation.world.admission, limit = admission, 3
    simulation.add_job("one", stages=(4, 4), totalSteps=10**6)
    await simulation.until(lambda: bool(simulation.status("one").restarts))
    await simulation.ticks(40, seconds=5.0)
    assert simulation.status("one").launches == 1
    await simulation.refused("one", "NotAllowed", "the job's 4 pods", "used: 0, limited: 3")
    limit = 4
    await simulation.running("one", ticks=120)


@pytest.mark.slow
async def test_a_quota_is_asked_about_the_least_gang_that_its_schedule_supports():
    """Seven microbatches are in equal rounds for four ranks, not for three."""
    simulation = Simulation(nodes={"fast-0": ("fast", 4)}, roundSeconds=20)
    simulation.world.admission = quota(simulation, "one", 3)
    sizes = {"minStages": 3, "maxStages": 4, "microbatches": 7, "globalBatchSize": 14}
    simulation.add_job("one", totalSteps=10**6, pipeline={**sizes, "schedule": "ZeroBubbleH1"})
    await simulation.until(lambda: bool(simulation.status("one").restarts))
    await simulation.ticks(40, seconds=5.0)
    assert simulation.status("one").launches == 1
    await simulation.refused("one", "NotAllowed", "the job's 4 pods", "requested: 4, used: 0, limited: 3")


@pytest.mark.slow
@pytest.mark.parametrize("grow", [True, False])
async def test_a_gang_of_several_sizes_is_launched_with_one_for_which_a_quota_has_room(grow):
    simulation = Simulation(nodes={"fast-0": ("fast", 4)}, roundSeconds=20)
    simulation.world.admission = quota(simulation, "one", 2)
    await simulation.run_job("one", stages=(1, 4), totalSteps=10**6, grow=grow)
    await simulation.ticks(60, seconds=5.0)
    status = simulation.status("one")
    assert (status.launches, status.restarts) == (2, {"NotAllowed": 1})
    assert (simulation.state("one"), status.allocation.gpus) == ("Running", 1)


async def test_a_template_is_tried_again_once_the_pools_have_other_gpus():
    """An answer holds for the extended resources that the pools had."""
    simulation = Simulation(nodes={"fast-0": ("fast", 2)})
    for number in range(3):
        simulation.add_job(f"job-{number}", totalSteps=10**6)
    await simulation.ticks(10)
    assert simulation.world.dry_runs == 1
    with simulation.changed_pools() as pools:
        pools["fast"]["gpuResource"] = "amd.com/gpu"
    await simulation.until(lambda: simulation.world.dry_runs == 2, ticks=120)


async def test_a_missing_right_is_not_the_templates_fault():
    """The operator's account lacks it: nothing is said of the job's template."""
    simulation = Simulation(nodes={"fast-0": ("fast", 2)})
    simulation.world.admission = refusing(Forbidden("cannot create resource pods"))
    simulation.add_job("one")
    await simulation.ticks(5)
    await simulation.refused("one", "NotAllowed", "cannot create resource pods")


async def test_a_growth_that_is_not_allowed_does_not_touch_the_gang():
    """The new pods are given up; the ranks that train continue."""
    simulation = Simulation(nodes={"a": ("fast", 2)}, roundSeconds=600)
    await simulation.run_job("one", stages=(1, 4), grow=True, totalSteps=10**5)
    simulation.world.admission = refusing(NotAllowed("exceeded quota"))
    simulation.world.put(NODE, node("b", "fast", 2))
    await simulation.until(lambda: simulation.condition("one", "Grown") is not None)
    await simulation.tick()
    status = simulation.status("one")
    grown = status.condition("Grown")
    assert (grown.reason, "exceeded quota" in grown.message) == ("GrowthGivenUp", True)
    assert (simulation.state("one"), status.launches, status.restarts) == ("Running", 1, {})
    assert len(status.allocation.pods) == 2


def with_gpus(count: int) -> Any:
    """Admission that adds a side car with GPUs to each pod."""

    def admission(kind: Kind, body: Mapping[str, Any]) -> None:
        if kind is POD:
            body["spec"]["containers"].append({"name": "agent", "resources": {"limits": {GPU: str(count)}}})

    return admission


@pytest.mark.slow
@pytest.mark.parametrize("remembered", [False, True], ids=["found by the dry run", "found at the launch"])
async def test_gpus_that_admission_adds_are_named_and_none_is_held_for_them(remembered):
    """Nobody would count them; the job runs once they are no longer added."""
    simulation = Simulation(nodes={"fast-0": ("fast", 4)})
    if remembered:
        simulation.add_job("before", totalSteps=20)
        await simulation.until(lambda: simulation.state("before") == "Succeeded")
    simulation.world.admission = with_gpus(2)
    simulation.add_job("one", backoffLimit=0)
    await simulation.ticks(90)
    status = simulation.status("one")
    assert (status.launches, status.allocation) == (int(remembered), None)
    words = f"gives the pod 3 {GPU} instead of 1: container agent 2. To fix:"
    await simulation.refused("one", "NotAllowed", words)
    assert simulation.pods("one") == []
    simulation.world.admission = with_gpus(0)
    await simulation.until(lambda: simulation.state("one") == "Succeeded", ticks=400)


OTHER = {"key": "kubernetes.io/os", "operator": "Exists"}


def required_terms(pod: dict[str, Any]) -> list[dict[str, Any]]:
    affinity = pod["spec"]["affinity"]["nodeAffinity"]
    return affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]


@pytest.mark.parametrize(
    ("taken", "said"),
    [
        (lambda pod: pod["metadata"].pop("ownerReferences"), "changes the pod's ownerReferences"),
        (lambda pod: pod["metadata"].update(name="other"), "changes the pod's name"),
        (lambda pod: pod["metadata"]["labels"].pop(JOB_LABEL), f"changes the pod's label {JOB_LABEL}"),
        (lambda pod: pod["metadata"]["labels"].update({RANK_LABEL: "7"}), f"label {RANK_LABEL}"),
        (
            lambda pod: pod["spec"]["containers"][0].pop("resources"),
            f"0 {GPU} instead of 1: container trainer 0",
        ),
        (lambda pod: pod["spec"].pop("affinity"), "node affinity or nodeName"),
        (lambda pod: required_terms(pod).append({"matchExpressions": [OTHER]}), "node affinity or nodeName"),
        (lambda pod: pod["spec"].update(nodeName="fast-1"), "node affinity or nodeName"),
    ],
    ids=[
        "its owner",
        "its name",
        "its job",
        "its rank",
        "its GPUs",
        "its node",
        "its node, in one term of two",
        "the scheduler's choice",
    ],
)
@pytest.mark.parametrize("remembered", [False, True], ids=["found by the dry run", "found at the launch"])
async def test_what_admission_takes_from_a_pod_is_named_and_no_pod_left_without_it(taken, said, remembered):
    """Pods that nobody deletes stay on their GPUs, and GPUs that no pod names are given away twice."""
    simulation = Simulation(nodes={"fast-0": ("fast", 4)})
    if remembered:
        simulation.add_job("before", totalSteps=20)
        await simulation.until(lambda: simulation.state("before") == "Succeeded")
        simulation.world.drop(JOB, NAMESPACE, "before")
    simulation.world.admission = lambda kind, item: taken(item) if kind is POD else None
    simulation.add_job("one")
    await simulation.ticks(20)
    await simulation.refused("one", "NotAllowed", said)
    assert [pod for pod in simulation.world.items(POD) if "before" not in pod["metadata"]["name"]] == []
    simulation.world.admission = lambda kind, item: None
    await simulation.until(lambda: simulation.state("one") == "Succeeded", ticks=400)


@pytest.mark.slow
@pytest.mark.parametrize(
    "error",
    [
        ServerInternalError('HTTP 500 Internal error occurred: failed calling webhook "images.example"'),
        NotAllowed('HTTP 403 pods "one-1-0" is forbidden: exceeded quota: none'),
    ],
    ids=["a webhook that fails", "a quota"],
)
async def test_what_stands_in_the_way_after_the_template_was_tried_costs_one_launch(error):
    """It is quoted; GPUs are not reserved again before it is gone."""
    simulation = Simulation(nodes={"fast-0": ("fast", 2)})
    simulation.add_job("before", totalSteps=20)
    await simulation.until(lambda: simulation.state("before") == "Succeeded")
    simulation.world.admission = refusing(error)
    simulation.add_job("one", backoffLimit=0)
    await simulation.until(lambda: bool(simulation.status("one").restarts))
    await simulation.ticks(60)
    status = simulation.status("one")
    assert (status.launches, status.restarts, status.allocation) == (1, {"NotAllowed": 1}, None)
    await simulation.refused("one", "NotAllowed", str(error))
    simulation.world.admission = lambda kind, body: None
    await simulation.until(lambda: simulation.state("one") == "Succeeded", ticks=400)


async def test_a_webhook_that_fails_ends_no_gang_that_trains():
    """A plan that cannot be written is tried again."""
    simulation = Simulation(nodes={"fast-0": ("fast", 2)})
    await simulation.run_job("one")

    def failing(kind: Kind, body: Mapping[str, Any]) -> None:
        raise ServerInternalError("failed calling webhook")

    simulation.world.admission = failing
    simulation.world.drop(CONFIG_MAP, NAMESPACE, "one-plan")
    await simulation.ticks(5)
    simulation.world.admission = lambda kind, body: None
    await simulation.until(lambda: simulation.state("one") == "Succeeded", ticks=400)
    assert simulation.status("one").launches == 1


def claim(phase: str, *, old: bool = True, annotations: Any = None, **metadata: Any) -> dict[str, Any]:
    """The volume claim ``data`` of class ``slow``; ``old``: it is there since yesterday."""
    created = {"creationTimestamp": "2025-12-31T00:00:00Z"} if old else {}
    return {
        "metadata": {
            "namespace": NAMESPACE,
            "name": "data",
            "annotations": annotations or {},
            **created,
            **metadata,
        },
        "spec": {"storageClassName": "slow"},
        "status": {"phase": phase},
    }


def storage(mode: str) -> dict[str, Any]:
    return {"metadata": {"name": "slow"}, "volumeBindingMode": mode}


BEING_MADE = {"volume.kubernetes.io/selected-node": "fast-0"}
NEVER_BOUND: dict[str, tuple[Any, Any, str]] = {
    "no claim": (None, None, "volume claim data is not there"),
    "lost": (claim("Lost"), None, "volume claim data has lost its volume"),
    "on its way out": (
        claim("Bound", deletionTimestamp="2026-01-01T00:00:00Z"),
        None,
        "volume claim data is being deleted",
    ),
    "no class": (claim("Pending"), None, "volume claim data: there is no volume and no StorageClass slow"),
    "never provisioned": (
        claim("Pending"),
        storage("Immediate"),
        "volume claim data is not bound by StorageClass slow",
    ),
    "never provisioned for its first pod": (
        claim("Pending", annotations=BEING_MADE),
        storage("WaitForFirstConsumer"),
        "volume claim data is not bound: its volume is being made for node fast-0",
    ),
}
WITH_CLAIM = template(volumes=[{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}])


@pytest.mark.parametrize(("found", "storage_class", "said"), NEVER_BOUND.values(), ids=NEVER_BOUND.keys())
async def test_a_job_whose_volume_cannot_be_bound_waits_without_gpus(found, storage_class, said):
    """The condition names the claim and why; another job has the GPUs; it runs once the volume is there."""
    simulation = Simulation(nodes={"fast-0": ("fast", 2)})
    for kind, item in ((CLAIM, found), (STORAGE_CLASS, storage_class)):
        if item is not None:
            simulation.world.put(kind, item)
    simulation.add_job("one", template=WITH_CLAIM)
    simulation.add_job("two")
    await simulation.until(lambda: simulation.state("two") == "Succeeded")
    await simulation.refused("one", "WaitingForVolumes", said)
    assert simulation.status("one").launches == 0
    simulation.world.drop(CLAIM, NAMESPACE, "data")
    simulation.world.put(CLAIM, claim("Bound"))
    await simulation.until(lambda: simulation.state("one") == "Succeeded")
    assert simulation.status("one").restarts == {}


@pytest.mark.parametrize(
    ("found", "storage_class"),
    [
        (claim("Pending", old=False), storage("Immediate")),
        (claim("Pending"), storage("WaitForFirstConsumer")),
    ],
    ids=["one that is new", "one that waits for its first pod"],
)
async def test_a_claim_that_may_be_bound_soon_is_launched_with(found, storage_class):
    """Volumes are there within seconds, or only once a pod wants them."""
    simulation = Simulation(nodes={"fast-0": ("fast", 2)})
    simulation.world.put(CLAIM, found)
    simulation.world.put(STORAGE_CLASS, storage_class)
    await simulation.run_job("one", template=WITH_CLAIM)
    assert simulation.status("one").launches == 1


async def test_a_volume_of_each_pod_needs_its_class():
    """A generic ephemeral volume is a claim that exists only with its pod."""
    made = {"volumeClaimTemplate": {"spec": {"storageClassName": "slow"}}}
    simulation = Simulation(nodes={"fast-0": ("fast", 2)})
    for name, volume in (("one", "scratch"), ("two", "cache")):
        simulation.add_job(name, template=template(volumes=[{"name": volume, "ephemeral": made}]))
    await simulation.ticks(5)
    for name, volume in (("one", "scratch"), ("two", "cache")):
        said = simulation.condition(name, "Admitted").message
        assert f"volume {volume}: there is no volume and no StorageClass slow" in said
    simulation.world.put(STORAGE_CLASS, storage("Immediate"))
    await simulation.running("one")


@pytest.mark.parametrize("kind", [CLAIM, STORAGE_CLASS])
async def test_an_operator_that_may_not_read_volumes_launches_as_before(kind):
    """Roles that an administrator wrote before this right was asked for still work."""
    simulation = Simulation(nodes={"fast-0": ("fast", 2)})
    simulation.world.put(CLAIM, claim("Pending"))
    read = simulation.cluster.get

    async def refused(asked: Kind, namespace: str, name: str) -> Any:
        if asked is kind:
            raise Forbidden(f"cannot get {asked.plural}")
        return await read(asked, namespace, name)

    simulation.cluster.get = refused
    await simulation.run_job("one", template=WITH_CLAIM)


async def test_the_end_of_a_trainer_behind_a_container_that_a_webhook_puts_first_is_seen():
    """A mesh that is to be up before the trainer is the first container, and runs on when that has ended."""
    simulation = Simulation(nodes={"fast-0": ("fast", 2)})

    def inject(kind: Kind, body: Mapping[str, Any]) -> None:
        if kind is POD:
            body["spec"]["containers"].insert(0, {"name": "mesh"})

    simulation.world.admission = inject
    await simulation.run_job("one", totalSteps=100_000, backoffLimit=0)
    words = TerminationMessage(reason=ExitReason.FAILED, message="no such layer")
    end_pod(simulation.world, NAMESPACE, "one-1-0", ExitCode.ERROR, words)
    await simulation.until(lambda: simulation.state("one") == "Failed", ticks=30)
    assert "no such layer" in simulation.condition("one", "Failed").message
    await simulation.until(lambda: not simulation.pods("one"), ticks=30)
