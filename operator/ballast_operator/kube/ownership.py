"""Objects that a job needs: made where their name is free, brought up to date where they are the job's.

An object of anybody else is never adopted, changed or deleted, whatever its name and labels: an object is
a job's where the job, by UID, is its controller.
"""

from typing import Any

from ballast_operator.errors import Conflict, NameTaken
from ballast_operator.kube.caches import Caches
from ballast_operator.kube.client import Cluster
from ballast_operator.kube.kinds import Kind, Object


def controlled_by(item: Object, uid: str) -> bool:
    """True if the object with this UID is the controller of ``item``."""
    owners = item["metadata"].get("ownerReferences") or []
    return any(owner.get("uid") == uid and owner.get("controller") for owner in owners)


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
        found = await cluster.apply(kind, {**body, "metadata": {**body["metadata"], **version}})
    caches.wrote(kind, found)


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
