"""The operator's client over a cluster in memory: it has the rights of the operator's account, no others.

It checks what the operator writes: no pod without a written intent, no released pod deleted before the
acknowledgement.
"""

from collections.abc import Callable, Mapping
from typing import Any

from ballast_operator.api.read import read_job_status
from ballast_operator.errors import Conflict, NotFound, Rejected
from ballast_operator.kube.client import METADATA, DroppedFields
from ballast_operator.kube.kinds import CONFIG_MAP, EVENT, JOB, LEASE, POD, Key, Kind, key_of
from ballast_policies.contract.messages import (
    ACK_ANNOTATION,
    JOB_LABEL,
    LAUNCH_LABEL,
    PLAN_KEY,
    Ack,
    plan_config_map_name,
)
from ballast_policies.contract.plan import Plan

from tests.operator.loops.simulated.rights import has_right
from tests.operator.loops.simulated.world import Crash, World, as_sent, merged


def _selected(selector: str, labels: Mapping[str, str]) -> bool:
    """Whether labels are there as ``selector`` says: a name, or a name with its value."""
    name, _, value = selector.partition("=")
    return not name or (name in labels and (not value or labels[name] == value))


def _field(item: Any, path: str) -> Any:
    for name in path.split("."):
        item = (item or {}).get(name)
    return item


class FakeCluster:
    """The operator's client over a :class:`World`, with the rights of its account."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.fence: Callable[[], None] = lambda: None
        self.on_write: Callable[[str, Kind], None] = lambda verb, kind: None
        self.on_dropped: Callable[[Kind, list[str]], None] = lambda kind, fields: None
        self.dropped = DroppedFields()
        self._sent: dict[tuple[Kind, Key], tuple[str, dict[str, Any]]] = {}
        self._dead = False

    async def get(self, kind: Kind, namespace: str, name: str) -> dict[str, Any]:
        has_right("get", kind)
        item = self.world.get(kind, namespace, name)
        if item is None:
            raise NotFound(f"{kind.kind} {namespace}/{name}")
        return as_sent(item)

    async def list(
        self,
        kind: Kind,
        *,
        namespace: str = "",
        label_selector: str = "",
        field_selector: str = "",
        accept: str = "",
    ) -> Any:
        has_right("list", kind)
        fields = [field.split("=") for field in field_selector.split(",") if field]
        found = [
            self._listed(kind, item)
            for item in self.world.items(kind)
            if (not namespace or item["metadata"].get("namespace") == namespace)
            and _selected(label_selector, item["metadata"].get("labels") or {})
            and all(_field(item, path) == value for path, value in fields)
        ]
        if accept == METADATA:
            found = [{part: item[part] for part in ("apiVersion", "kind", "metadata")} for item in found]
        return found, self.world.version

    def _listed(self, kind: Kind, item: dict[str, Any]) -> dict[str, Any]:
        """The copy that this client was sent when the object last changed."""
        key, version = (kind, key_of(item)), item["metadata"]["resourceVersion"]
        sent = self._sent.get(key)
        if sent is None or sent[0] != version:
            sent = (version, as_sent(item))
            self._sent[key] = sent
        return sent[1]

    async def apply(self, kind: Kind, body: Any, *, subresource: str = "") -> dict[str, Any]:
        metadata = body["metadata"]
        namespace, name = metadata.get("namespace", ""), metadata["name"]
        has_right("patch", kind, subresource)
        self._begin(f"apply {kind.kind} {name} {subresource}".strip())
        old = self.world.get(kind, namespace, name)
        if old is None:
            if subresource or metadata.get("resourceVersion"):
                raise NotFound(f"{kind.kind} {namespace}/{name}")
            return self._end(kind, "patch", self.world.put(kind, body))
        wanted = metadata.get("resourceVersion")
        if wanted is not None and wanted != old["metadata"]["resourceVersion"]:
            found = old["metadata"]["resourceVersion"]
            raise Conflict(f"{kind.kind} {name}: version {wanted} is not {found}")
        if subresource:
            new = {**old, "status": as_sent(body["status"])}
        else:
            new = {**old, **{k: as_sent(v) for k, v in body.items() if k != "metadata"}}
            new["metadata"] = merged(
                old["metadata"], {k: v for k, v in metadata.items() if k != "resourceVersion"}
            )
        if new == old:
            return self._end(kind, "patch", old)
        if old.get("immutable") and new.get("data") != old.get("data"):
            raise Rejected("HTTP 422 data: Forbidden: field is immutable when `immutable` is set")
        return self._end(kind, "patch", self.world.put(kind, new))

    async def write_status(self, kind: Kind, body: Any) -> dict[str, Any]:
        sent = body["status"]
        kept = {name: part for name, part in sent.items() if name not in self.world.lacking}
        written = await self.apply(kind, {**body, "status": kept}, subresource="status")
        if (dropped := self.dropped.learn(kind, sent, written["status"])) is not None:
            self.on_dropped(kind, dropped)
        return written

    async def try_create(self, kind: Kind, body: Any) -> dict[str, Any]:
        has_right("create", kind)
        self.world.dry_runs += 1
        item = as_sent(body)
        self.world.admission(kind, item)
        return item

    async def create(self, kind: Kind, body: Any) -> dict[str, Any]:
        has_right("create", kind)
        namespace, name = body["metadata"].get("namespace", ""), body["metadata"]["name"]
        self._begin(f"create {kind.kind} {name}")
        item = as_sent(body)
        self.world.admission(kind, item)
        if self.world.get(kind, namespace, name) is not None:
            raise Conflict(f"{kind.kind} {namespace}/{name} exists")
        if kind is EVENT:
            self.world.events.append(body["reason"])
            return self._end(kind, "post", item)
        if kind is POD:
            self._intent_is_written(body)
            item["status"] = {"phase": "Pending"}
        return self._end(kind, "post", self.world.put(kind, item))

    async def replace(self, kind: Kind, body: Any) -> dict[str, Any]:
        has_right("update", kind)
        return await self.apply(kind, body)

    async def delete(
        self, kind: Kind, namespace: str, name: str, *, uid: str, grace_seconds: int | None = None
    ) -> dict[str, Any] | None:
        has_right("delete", kind)
        self._begin(f"delete {kind.kind} {name}")
        item = self.world.get(kind, namespace, name)
        if item is None:
            return None
        if item["metadata"]["uid"] != uid:
            raise Conflict(f"{kind.kind} {name} has another uid")
        if kind is POD and grace_seconds != 0:
            self._release_is_acknowledged(item)
            leaving = merged(item, {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}})
            return self._end(kind, "delete", self.world.put(kind, leaving))
        self.world.drop(kind, namespace, name)
        self.world.wrote()
        return None

    def _begin(self, what: str) -> None:
        if self._dead:
            raise Crash
        self.fence()
        self.world.write(what)

    def _end(self, kind: Kind, verb: str, result: dict[str, Any]) -> dict[str, Any]:
        try:
            self.world.wrote()
        except Crash:
            self._dead = True  # whatever else the process was about to write at the same time
            raise
        self.on_write(verb, kind)
        return as_sent(result)

    def _intent_is_written(self, pod: Mapping[str, Any]) -> None:
        labels = pod["metadata"]["labels"]
        job = self.world.get(JOB, pod["metadata"]["namespace"], labels[JOB_LABEL])
        allocation = read_job_status(job).allocation if job is not None else None
        assert allocation is not None, (
            f"pod {pod['metadata']['name']} was made before its launch was written down"
        )
        assert pod["metadata"]["name"] in allocation.pods
        assert allocation.ending is None, "a pod was made for a launch that is ending"

    def _release_is_acknowledged(self, pod: Mapping[str, Any]) -> None:
        """A gang of a job that stays loses a pod only after the plan left it out and rank 0 said so."""
        namespace, labels = pod["metadata"]["namespace"], pod["metadata"]["labels"]
        if JOB_LABEL not in labels or not pod["metadata"].get("ownerReferences"):
            return  # admission made it nobody's
        job = self.world.get(JOB, namespace, labels[JOB_LABEL])
        allocation = read_job_status(job).allocation if job is not None else None
        if (
            allocation is None
            or allocation.ending is not None
            or allocation.launch != int(labels[LAUNCH_LABEL])
            or job["metadata"].get("deletionTimestamp")
        ):
            return
        config = self.world.get(CONFIG_MAP, namespace, plan_config_map_name(labels[JOB_LABEL]))
        assert config is not None, "a pod of a launch without a plan was deleted"
        plan = Plan.from_json(config["data"][PLAN_KEY])
        assert plan.rank_of(pod["metadata"]["name"]) is None, "a pod that the plan keeps was deleted"
        lease = self.world.get(LEASE, namespace, labels[JOB_LABEL])
        assert lease is not None
        ack = Ack.from_json(lease["metadata"]["annotations"][ACK_ANNOTATION])
        assert ack.epoch >= plan.epoch, "a pod was released before the acknowledgement"
