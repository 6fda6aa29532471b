"""Tries of a job's pods on the API server, before GPUs are reserved for them.

The API server is asked by a dry run of the first pod: schema, defaults, quotas, Pod Security, webhooks; for
the namespace; and for the volume claims that the pod names. Jobs of a namespace with the same template share
one answer, and at most a few are asked at a time: 5,000 jobs that wait cost a handful of requests.
"""

import asyncio
import functools
import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ballast_policies.contract.messages import (
    GPU_RESOURCE,
    lease_name,
    plan_config_map_name,
    pod_name,
    rendezvous_config_map_name,
)
from ballast_policies.scheduling.refusals import Refusal
from kubernetes.utils.quantity import parse_quantity

from ballast_operator.api.conditions import JobCondition, JobReason, some_of
from ballast_operator.api.job_allocation import JobAllocation
from ballast_operator.desired import (
    access_objects,
    changed_by_admission,
    gpus_elsewhere,
    owned,
    pod_group_name,
    pod_object,
)
from ballast_operator.errors import (
    OVER_QUOTA,
    Conflict,
    Forbidden,
    NameTaken,
    NotAllowed,
    NotFound,
    Rejected,
    ServerInternalError,
    TooSlow,
)
from ballast_operator.kube.client import Cluster
from ballast_operator.kube.kinds import CLAIM, CONFIG_MAP, LEASE, NAMESPACE, POD, POD_GROUP, STORAGE_CLASS
from ballast_operator.reconcile.actions import own_object
from ballast_operator.settings import JobSettings
from ballast_operator.views.clock import Time, parse
from ballast_operator.views.job import JobView
from ballast_operator.views.spec import JobSpec

ANSWER_LASTS_SECONDS = 600.0
"""Seconds for which an answer holds of a template that the API server takes, or refuses for what it is."""

MOST_ANSWERS = 10_000
"""Answers that are remembered; the oldest go first."""

AT_ONCE = 4
"""Dry runs under way at a time."""

_NODE = "not-chosen-yet"

_PROVISIONING_ON = "volume.kubernetes.io/selected-node"
"""Annotation of a claim: kube-scheduler has chosen a node for its first pod, and its volume is being made."""


class PodChecks:
    """Answers about templates, each asked for once in a while; ``clock`` counts seconds."""

    def __init__(
        self, cluster: Cluster, settings: JobSettings, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cluster = cluster
        self._settings = settings
        self._clock = clock
        self._answers: OrderedDict[tuple[str, ...], tuple[Refusal | None, float]] = OrderedDict()
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def why_blocked(
        self, view: JobView, gpu_resources: frozenset[str], now: Time, *, launches: bool = False
    ) -> Refusal | None:
        """Reason that no pod of the job can be made, or run, now; None: one can.

        ``gpu_resources``: the extended resources that count as GPUs in the pools. ``launches``: GPUs wait for
        the answer, and its namespace is looked at anew.

        Raises:
            Unavailable: the API server does not answer.
        """
        spec, resources = view.spec, _sorted(gpu_resources)
        assert spec is not None
        problem = gpus_elsewhere(spec.template, resources, spec.gpus_per_pod)
        if problem:
            return Refusal(JobReason.MISCONFIGURED, problem)
        namespace, asked = view.key[0], _asked(view, spec, resources)
        ask = functools.partial(self._namespace, namespace)
        if launches:
            self._answers.pop(("namespace", namespace), None)
        answer = await self._remembered(("namespace", namespace), ask, lasts=False)
        if answer is None:
            answer = await self._remembered(asked, lambda: self._ask(view, spec, resources, now))
        if answer is None and view.over_quota:
            ask = functools.partial(self._over_quota, view, spec, resources, now)
            answer = await self._remembered(_of_gang(asked, spec), ask, lasts=False)  # others' pods come
        if answer is None:
            answer = await self._volumes(view, spec, now)
        return answer if answer is not None else await self._name_taken(view, spec)

    def forget(self, view: JobView, gpu_resources: frozenset[str]) -> None:
        """A launch of the job was refused: ask anew, rather than reserve GPUs for the next one."""
        if view.spec is not None:
            asked = _asked(view, view.spec, _sorted(gpu_resources))
            for key in (asked, _of_gang(asked, view.spec)):
                self._answers.pop(key, None)

    async def _remembered(
        self, asked: tuple[str, ...], ask: Callable[[], Awaitable[Refusal | None]], *, lasts: bool = True
    ) -> Refusal | None:
        """The answer to ``asked``; ``lasts``: one that nothing but an edit changes is kept for long."""
        known = self._answers.get(asked)
        if known is not None and self._clock() < known[1]:
            return known[0]
        async with self._turns:
            known = self._answers.get(asked)  # while this job waited for its turn
            if known is not None and self._clock() < known[1]:
                return known[0]
            answer = await ask()
        brief = not lasts or (answer is not None and answer.may_pass)
        seconds = self._settings.ask_again_seconds if brief else ANSWER_LASTS_SECONDS
        self._answers[asked] = (answer, self._clock() + seconds)
        while len(self._answers) > MOST_ANSWERS:
            self._answers.popitem(last=False)
        return answer

    async def _namespace(self, name: str) -> Refusal | None:
        """Refusal where the namespace is being deleted; None: it is not, or that is not known."""
        try:
            found = await self._cluster.get(NAMESPACE, "", name)
        except (NotFound, Forbidden):
            return None
        if not found["metadata"].get("deletionTimestamp"):
            return None
        fix = "create the job in another namespace"
        message = f"namespace {name} is being deleted, and no pod can be made in it. To fix: {fix}"
        return Refusal(JobReason.NOT_ALLOWED, message, may_pass=True)

    async def _ask(
        self, view: JobView, spec: JobSpec, gpu_resources: Sequence[str], now: Time
    ) -> Refusal | None:
        name = pod_name(view.name, view.status.launches + 1, 0)
        try:
            body = _first_pod(view, spec, name, gpu_resources[0], now)
        except Exception as error:  # whatever the template holds that its schema lets through
            message = f"spec.template: no pod can be made of it: {type(error).__name__}: {error}"
            return Refusal(JobReason.MISCONFIGURED, message[:1024])

        def said(error: Exception) -> str:
            return str(error).replace(f' "{name}"', "")  # the answer is all jobs' with this template

        slow = "slow", view.key[0]
        if (known := self._answers.get(slow)) is not None and self._clock() < known[1]:
            return known[0]  # each that asks would wait as long, and all others for it
        try:
            made = await self._cluster.try_create(POD, body)
        except (Conflict, NotFound):
            return None  # the launch will tell
        except Forbidden as error:
            return Refusal(JobReason.NOT_ALLOWED, error.told, may_pass=True)
        except (NotAllowed, ServerInternalError) as error:
            if "service account" in str(error):
                return None  # the namespace's default one is missing; the job has its own
            message = f"the cluster does not allow the job's pods now: {said(error)}"
            return Refusal(JobReason.NOT_ALLOWED, message[:4096], may_pass=True)
        except TooSlow as error:
            fix = "see what asks about pods: kubectl get mutatingwebhookconfigurations"
            message = f"whether the job's pods can be made, nothing says: {error}. To fix: {fix}"
            refusal = Refusal(JobReason.NOT_ALLOWED, message, may_pass=True)
            self._answers[slow] = refusal, self._clock() + self._settings.ask_again_seconds
            return refusal
        except Rejected as error:
            message = f"spec.template: the API server refuses its pod: {said(error)}"
            return Refusal(JobReason.MISCONFIGURED, message[:4096])
        if problem := changed_by_admission(body, made, gpu_resources):
            return Refusal(JobReason.NOT_ALLOWED, problem, may_pass=True)
        return None

    async def _over_quota(
        self, view: JobView, spec: JobSpec, gpu_resources: Sequence[str], now: Time
    ) -> Refusal | None:
        """Refusal while no quota has room for the least gang, for which one refused a launch; None: it has.

        Each dry run counts alone, so that of the gang is of one pod that has the containers of all its pods:
        a LimitRange adds to each, and limits each, as in those. A quota of the number of pods is met by the
        launch only.
        """
        name = pod_name(view.name, view.status.launches + 1, 0)
        body, pods = _first_pod(view, spec, name, gpu_resources[0], now), _fewest_pods(spec)
        content, counted = body["spec"], ("image", "resources", "securityContext")
        content["containers"] += [
            {"name": f"copy-{pod}-{at}", **{key: each[key] for key in counted if key in each}}
            for pod in range(1, pods)
            for at, each in enumerate(content["containers"])
        ]
        for part in (content, *content.get("initContainers", ())):
            for amounts in (part.get("resources") or {}).values():
                if isinstance(amounts, dict):
                    amounts |= {key: f"{parse_quantity(each) * pods:f}" for key, each in amounts.items()}
        try:
            await self._cluster.try_create(POD, body)
        except (Conflict, NotFound, Rejected, ServerInternalError, TooSlow) as error:
            if OVER_QUOTA in str(error):
                words = str(error).replace(f' "{name}"', "")
                message = f"the cluster does not allow the job's {pods} pods now: {words}"
                return Refusal(JobReason.NOT_ALLOWED, message[:4096], may_pass=True)
        return None

    async def _volumes(self, view: JobView, spec: JobSpec, now: Time) -> Refusal | None:
        """The first volume that keeps each pod of the job from being scheduled, if any does."""
        namespace = view.key[0]
        for volume in (spec.template.get("spec") or {}).get("volumes") or ():
            claim = (volume.get("persistentVolumeClaim") or {}).get("claimName")
            made = (volume.get("ephemeral") or {}).get("volumeClaimTemplate") or {}
            name = (made.get("spec") or {}).get("storageClassName")
            if claim:
                asked: tuple[str, ...] = ("claim", namespace, claim)
                ask = functools.partial(self._claim, namespace, claim, now)
            elif name:
                what = f"volume {volume.get('name')}"
                asked = ("class", namespace, name, what)
                ask = functools.partial(self._class, what, name)
            else:
                continue
            if answer := await self._remembered(asked, ask, lasts=False):
                return answer
        return None

    async def _claim(self, namespace: str, name: str, now: Time) -> Refusal | None:
        """Reason that no pod with the claim can be scheduled; None: one can, or that is not known.

        One that is young is left to Kubernetes: most volumes are there within seconds. One whose volume is
        made for its first pod is bound by the launch, which has to be tried.
        """
        what = f"volume claim {name}"
        try:
            claim = await self._cluster.get(CLAIM, namespace, name)
        except NotFound:
            return _waits_for(f"{what} is not there. To fix: create it, or name another one in spec.template")
        except Forbidden:
            return None
        metadata, spec, phase = (
            claim["metadata"],
            claim.get("spec") or {},
            (claim.get("status") or {}).get("phase"),
        )
        if metadata.get("deletionTimestamp"):
            return _waits_for(f"{what} is being deleted. To fix: create it anew once it is gone")
        if phase == "Lost":
            return _waits_for(f"{what} has lost its volume. To fix: restore it, or name another claim")
        age = (now - parse(metadata["creationTimestamp"])).total_seconds()
        if phase == "Bound" or age < self._settings.bind_seconds:
            return None
        chosen = spec.get("storageClassName")
        on = (metadata.get("annotations") or {}).get(_PROVISIONING_ON)
        if on is None and chosen and not spec.get("volumeName"):
            return await self._class(what, chosen, until_bound=True)
        why = f"its volume is being made for node {on}" if on else "no volume has been bound to it"
        return _waits_for(f"{what} is not bound: {why}. To fix: see kubectl describe pvc {name}")

    async def _class(self, what: str, name: str, *, until_bound: bool = False) -> Refusal | None:
        """Reason that no volume of the class can be made; None: one can, or that is not known.

        ``until_bound``: nor is one made for its first pod.
        """
        try:
            found = await self._cluster.get(STORAGE_CLASS, "", name)
        except NotFound:
            fix = f"create a PersistentVolume of class {name}, or the class, or use another"
            return _waits_for(f"{what}: there is no volume and no StorageClass {name}. To fix: {fix}")
        except Forbidden:
            return None
        if not until_bound or found.get("volumeBindingMode") == "WaitForFirstConsumer":
            return None
        return _waits_for(f"{what} is not bound by StorageClass {name}. To fix: see kubectl describe pvc")

    async def _name_taken(self, view: JobView, spec: JobSpec) -> Refusal | None:
        """Refusal while the obstacle of the last launch remains; None: it is gone."""
        running = view.status.condition(JobCondition.RUNNING)
        if running is None or running.reason != JobReason.NAME_TAKEN:
            return None
        needed = [
            *access_objects(view),
            (LEASE, owned(view, LEASE, lease_name(view.name))),
            (CONFIG_MAP, owned(view, CONFIG_MAP, plan_config_map_name(view.name))),
            (POD_GROUP, owned(view, POD_GROUP, pod_group_name(view, spec))),
            (CONFIG_MAP, owned(view, CONFIG_MAP, rendezvous_config_map_name(view.name))),
            (POD, owned(view, POD, pod_name(view.name, view.status.launches + 1, 0))),
        ]
        taken: dict[str, str] = {}
        for kind, body in needed:
            try:
                await own_object(self._cluster, kind, body)
            except (Conflict, NotFound):
                continue
            except NameTaken as error:
                taken[f"{kind.kind} {body['metadata']['name']}"] = str(error)
        if not taken:
            return None
        first, *others = taken
        message = taken[first] + (f". The same is true of {some_of(others, len(needed))}" if others else "")
        return Refusal(JobReason.NAME_TAKEN, message, may_pass=True)


def _first_pod(view: JobView, spec: JobSpec, name: str, gpu_resource: str, now: Time) -> dict[str, Any]:
    """The first pod of the next launch, without the service account, which is made at the launch."""
    allocation = JobAllocation(
        launch=view.status.launches + 1,
        gpu_type="any",
        pool="any",
        gpus=spec.gpus_per_pod,
        gpus_per_pod=spec.gpus_per_pod,
        pods=(name,),
        nodes=(_NODE,),
        plan_id="",
        since=now,
    )
    body = pod_object(view, spec, allocation, number=0, pod=name, gpu_resource=gpu_resource)
    body["spec"].pop("serviceAccountName", None)
    return body


def _waits_for(message: str) -> Refusal:
    return Refusal(JobReason.WAITING_FOR_VOLUMES, message, may_pass=True)


def _sorted(gpu_resources: frozenset[str]) -> Sequence[str]:
    return sorted(gpu_resources) or [GPU_RESOURCE]


def _asked(view: JobView, spec: JobSpec, gpu_resources: Sequence[str]) -> tuple[str, ...]:
    """Key of jobs that have the same answer."""
    template = json.dumps(spec.template, sort_keys=True, default=str)
    digest = hashlib.sha256(template.encode()).hexdigest()
    return (view.key[0], str(spec.gpus_per_pod), digest, *gpu_resources)


def _of_gang(asked: tuple[str, ...], spec: JobSpec) -> tuple[str, ...]:
    """Key of those among them whose least gang has as many pods."""
    return (*asked, "gang", str(_fewest_pods(spec)))


def _fewest_pods(spec: JobSpec) -> int:
    """Pods of the least gang that its schedule supports."""
    sizes = range(spec.smallest_gang, spec.largest_gang + 1)
    return next(filter(spec.suits, sizes), spec.smallest_gang) // spec.gpus_per_pod
