"""Actions of a pass, carried out on objects of the job and on no others.

What a job needs is made where its name is free, and brought up to date where it is the job's. An object of
anybody else is never adopted, changed or deleted, whatever its name and labels: an object is a job's where
the job, by UID, is its controller.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from typing import Any

from ballast_policies.contract.messages import JOB_LABEL, plan_config_map_name
from ballast_policies.contract.plan import Plan

from ballast_operator.desired import changed_by_admission, plan_object
from ballast_operator.errors import Conflict, NameTaken, NotAllowed, OperatorError, Rejected
from ballast_operator.kube.caches import Caches
from ballast_operator.kube.client import Cluster
from ballast_operator.kube.kinds import CONFIG_MAP, JOB, POD, Kind, Object, controlled_by
from ballast_operator.steps.context import Action, Apply, CreatePod, DeleteJob, DeletePod, WritePlan
from ballast_operator.views.clock import Time
from ballast_operator.views.job import JobView

logger = logging.getLogger(__name__)


PODS_AT_ONCE = 16
"""Pods of a gang that are created at the same time."""


def batches(actions: Sequence[Action]) -> Iterator[Sequence[Action]]:
    """The actions in their order, those of a batch at the same time.

    Neighbours that only make sure that an object is there are a batch. The first of several new pods is
    alone: what is in the way of one, be it a quota or a webhook, is mostly in the way of all.
    """
    for kind, neighbours in itertools.groupby(actions, key=type):
        group = tuple(neighbours)
        if kind is Apply:
            yield group
        elif kind is CreatePod:
            yield group[:1]
            rest = group[1:]
            yield from (rest[at : at + PODS_AT_ONCE] for at in range(0, len(rest), PODS_AT_ONCE))
        else:
            yield from ((action,) for action in group)


async def carry_out_all(
    cluster: Cluster, caches: Caches, view: JobView, actions: Sequence[Action], now: Time
) -> None:
    """Carry out all in order, beside them what nothing waits for, to the end. Raises as :func:`carry_out`."""
    if not actions:
        return
    beside = [action for action in actions if isinstance(action, Apply) and action.beside]
    rest = [action for action in actions if not (isinstance(action, Apply) and action.beside)]

    async def in_order(groups: Iterable[Sequence[Action]]) -> None:
        for batch in groups:
            await together(*(carry_out(cluster, caches, view, action, now=now) for action in batch))

    works = [in_order(batches(rest))]
    if beside:
        works.append(in_order([action] for action in beside))
    await together(*works)


async def together(*works: Awaitable[Any]) -> list[Any]:
    """Carry out all at the same time; the error of the first that failed is raised once all have ended."""
    if len(works) == 1:  # in this task: another one would wait for its turn of the event loop
        return [await works[0]]
    results = await asyncio.gather(*works, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


async def carry_out(cluster: Cluster, caches: Caches, view: JobView, action: Action, *, now: Time) -> None:
    """Carry out an action for the job of ``view``; the answer goes into the caches ahead of the watch.

    Raises:
        Conflict, NotFound: the caches were behind.
        NameTaken: an object of somebody else has the name.
        NotAllowed: admission has changed the pod; one that the job would not find again is deleted.
        Rejected: the API server refuses it.
        Unavailable: the API server does not answer.
    """
    namespace = view.key[0]
    match action:
        case Apply(kind, body):
            await ensure(cluster, caches, kind, body)
        case CreatePod(body, gpu_resource):
            made = await _create(cluster, caches, POD, body)
            logger.info("pod created job=%s/%s pod=%s", *view.key, body["metadata"]["name"])
            if problem := changed_by_admission(body, made, (gpu_resource,)):
                if not _is_known_by(view, made):  # the end of the launch would leave it
                    with contextlib.suppress(OperatorError):
                        metadata = made["metadata"]
                        await cluster.delete(POD, namespace, metadata["name"], uid=metadata["uid"])
                raise NotAllowed(f"pod {body['metadata']['name']}: {problem}")
        case DeletePod(name, uid, grace_seconds):
            left = await cluster.delete(POD, namespace, name, uid=uid, grace_seconds=grace_seconds)
            if left is not None:
                caches.wrote(POD, left)
            logger.info("pod deletion asked job=%s/%s pod=%s uid=%s", *view.key, name, uid)
        case WritePlan(plan):
            await _write_plan(cluster, caches, view, plan, now)
        case DeleteJob(uid):
            await cluster.delete(JOB, namespace, view.name, uid=uid)


def _is_known_by(view: JobView, pod: Object) -> bool:
    """True if the job finds the pod among its own."""
    label = (pod["metadata"].get("labels") or {}).get(JOB_LABEL)
    return label == view.name and controlled_by(pod, view.uid)


async def _write_plan(cluster: Cluster, caches: Caches, view: JobView, plan: Plan, now: Time) -> None:
    spec = view.launched_spec
    assert spec is not None
    known = caches[CONFIG_MAP].get((view.key[0], plan_config_map_name(view.name)))
    if known is not None and controlled_by(known, view.uid):
        version = known["metadata"]["resourceVersion"]
        body = plan_object(view, spec, plan, now=now, resource_version=version)
        caches.wrote(CONFIG_MAP, await _apply(cluster, CONFIG_MAP, body, known))
    else:
        # The object must not exist yet: a plan written by an earlier leader is never replaced unread.
        body = plan_object(view, spec, plan, now=now, resource_version=None)
        await _create(cluster, caches, CONFIG_MAP, body)
    logger.info(
        "plan written job=%s/%s epoch=%d launch=%d directive=%s ranks=%d",
        *view.key,
        plan.epoch,
        plan.launch,
        plan.directive,
        len(plan.ranks),
    )


async def _create(cluster: Cluster, caches: Caches, kind: Kind, body: Object) -> Object:
    """Create an object that the caches do not have.

    Raises:
        Conflict: it is the job's own; the caches were behind.
        NameTaken: somebody else's object has the name.
    """
    try:
        made = await cluster.create(kind, body)
    except Conflict:
        caches.wrote(kind, await own_object(cluster, kind, body))
        raise
    caches.wrote(kind, made)
    return made


async def ensure(cluster: Cluster, caches: Caches, kind: Kind, body: Object) -> None:
    """Bring the object about, as a part of the job that ``body`` names as its controller.

    Raises:
        NameTaken: an object of somebody else has the name.
        Conflict: it is on its way out, or has changed meanwhile.
    """
    try:
        caches.wrote(kind, await cluster.create(kind, body))
        return
    except Conflict:
        found = await own_object(cluster, kind, body)
    if not _up_to_date(found, body):
        # On the version that was looked at: an object that was replaced meanwhile makes this a Conflict.
        version = {"resourceVersion": found["metadata"]["resourceVersion"]}
        found = await _apply(cluster, kind, {**body, "metadata": {**body["metadata"], **version}}, found)
    caches.wrote(kind, found)


async def _apply(cluster: Cluster, kind: Kind, body: Object, found: Object) -> Object:
    """Bring ``found`` up to date. Raises NotAllowed: it is immutable, and the operator may not delete it."""
    try:
        return await cluster.apply(kind, body)
    except Rejected as error:
        if not found.get("immutable"):
            raise
        where = f"{found['metadata']['name']} -n {found['metadata']['namespace']}"
        raise NotAllowed(
            f"{error}. To fix: kubectl delete {kind.plural} {where}; the operator makes it anew"
        ) from error


async def own_object(cluster: Cluster, kind: Kind, body: Object) -> Object:
    """The object of ``body``'s name, which is known to be there.

    Raises:
        NameTaken: it is somebody else's.
        Conflict: it is on its way out.
        NotFound: it is gone.
    """
    metadata = body["metadata"]
    found = await cluster.get(kind, metadata["namespace"], metadata["name"])
    (owner,) = metadata["ownerReferences"]
    if not controlled_by(found, owner["uid"]):
        raise NameTaken(
            f"{kind.kind} {metadata['name']} is not the job's: {_owner_of(found)}. "
            "To fix: delete or rename it, or rename the job"
        )
    if found["metadata"].get("deletionTimestamp"):
        raise Conflict(f"{kind.kind} {metadata['name']} is being deleted")
    return found


def _owner_of(item: Object) -> str:
    for owner in item["metadata"].get("ownerReferences") or []:
        if owner.get("controller"):
            return f"{owner.get('kind')} {owner.get('name')} with UID {owner.get('uid')} controls it"
    return "no TrainingJob controls it"


def _up_to_date(found: Object, body: Object) -> bool:
    """True if the object has all that ``body`` says."""
    labels = found["metadata"].get("labels") or {}
    wanted: dict[str, Any] = body["metadata"].get("labels") or {}
    if any(labels.get(name) != value for name, value in wanted.items()):
        return False
    return all(
        _same(found.get(name), value)
        for name, value in body.items()
        if name not in ("apiVersion", "kind", "metadata")
    )


def _same(found: Any, wanted: Any) -> bool:
    """True if all of ``wanted`` is in ``found``; the API server adds defaults to objects."""
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(_same(found.get(name), item) for name, item in wanted.items())
    if isinstance(wanted, list):
        return (
            isinstance(found, list)
            and len(found) == len(wanted)
            and all(_same(*pair) for pair in zip(found, wanted, strict=True))
        )
    return bool(found == wanted)
