"""Reads the caches into views. Nothing here talks to the API server."""

import dataclasses
import logging
import time
from collections.abc import Callable

from ballast_policies.contract import (
    CONFIG_KEY,
    PLAN_KEY,
    Plan,
    lease_name,
    plan_config_map_name,
)

from ballast_operator.api.read import read_job_status
from ballast_operator.api.training_job_status import JobAllocation, TrainingJobStatus
from ballast_operator.kube.caches import Caches
from ballast_operator.kube.kinds import CONFIG_MAP, JOB, LEASE, NODE, POD, Key, Object, key_of
from ballast_operator.ownership import controlled_by
from ballast_operator.views.clock import Time, parse
from ballast_operator.views.job import PLAN_WRITTEN_ANNOTATION, Blocked, JobView
from ballast_operator.views.lease import LeaseReader, LeaseView
from ballast_operator.views.nodes import NodeView, read_node
from ballast_operator.views.pod import PodView, read_pod
from ballast_operator.views.spec import JobSpec, read_spec

logger = logging.getLogger(__name__)


class Observer:
    """Views of jobs and nodes, from the caches at this moment."""

    def __init__(self, caches: Caches, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.caches = caches
        self._clock = clock
        self._leases: dict[Key, LeaseReader] = {}
        self._plans: dict[Key, KnownPlan] = {}
        self._specs: dict[Key, tuple[tuple[str, int], tuple[JobSpec | None, str]]] = {}
        self._statuses: dict[Key, tuple[tuple[str, str | None], TrainingJobStatus]] = {}
        self._told: dict[Key, str] = {}
        self._blocked: dict[Key, tuple[str, int, Blocked]] = {}
        self.reservations: dict[Key, JobAllocation] = {}

    def job(self, key: Key) -> JobView | None:
        """The job as it is known now; None: there is no such job.

        Raises:
            ValueError: its status cannot be read.
        """
        item = self.caches[JOB].get(key)
        if item is None:
            self.forget(key)
            return None
        metadata = item["metadata"]
        spec, problem = self._spec(key, item)
        known = self._plan(key, metadata["uid"])
        pods = [self._pod(pod) for pod in self.caches[POD].of_job(key) if controlled_by(pod, metadata["uid"])]
        return JobView(
            key=key,
            uid=metadata["uid"],
            generation=metadata.get("generation", 0),
            spec=spec,
            spec_problem=problem,
            deleting=bool(metadata.get("deletionTimestamp")),
            status=self._status(key, item),
            pods=tuple(sorted(pods, key=lambda pod: (pod.launch, pod.rank))),
            lease=self._lease(key, metadata["uid"]),
            plan=known.plan if known is not None else None,
            plan_written=known.written if known is not None else None,
            plan_config=known.config if known is not None else "",
            plan_intact=known is None or known.intact,
            blocked=self._blocked_by(key, metadata["uid"], metadata.get("generation", 0)),
            created=parse(metadata["creationTimestamp"]) if "creationTimestamp" in metadata else None,
        )

    def jobs(self) -> list[JobView]:
        """All jobs, by age and name."""
        items = sorted(
            self.caches[JOB],
            key=lambda item: (item["metadata"].get("creationTimestamp", ""), item["metadata"]["name"]),
        )
        views = []
        for item in items:
            key = key_of(item)
            try:
                views.append(self.job(key))
            except Exception as error:  # one job must not hide the others, whatever is wrong with it
                self._unreadable(key, error)
        return [view for view in views if view is not None]

    def nodes(self) -> dict[str, NodeView]:
        """All nodes by name."""
        return {item["metadata"]["name"]: read_node(item) for item in self.caches[NODE]}

    def allocations(self) -> dict[Key, JobAllocation]:
        """GPUs that jobs hold by their status, or are about to hold by a write under way."""
        found: dict[Key, JobAllocation] = {}
        for item in self.caches[JOB]:
            key = key_of(item)
            try:
                allocation = self._status(key, item).allocation
            except ValueError as error:  # its pods count all the same
                self._unreadable(key, error)
                continue
            if allocation is not None:
                found[key] = allocation
        return {**found, **self.reservations}

    def block(self, view: JobView, why: Blocked | None) -> bool:
        """Remember why the job cannot be launched, for this generation of it; says whether that is news."""
        self._blocked.pop(view.key, None)
        if why is not None:
            self._blocked[view.key] = (view.uid, view.generation, why)
        return why != view.blocked

    def _blocked_by(self, key: Key, uid: str, generation: int) -> Blocked | None:
        known = self._blocked.get(key)
        return known[2] if known is not None and known[:2] == (uid, generation) else None

    def forget(self, key: Key) -> None:
        """The job is gone."""
        self._leases.pop(key, None)
        self._plans.pop(key, None)
        self._told.pop(key, None)
        self._blocked.pop(key, None)
        self._specs.pop(key, None)
        self._statuses.pop(key, None)

    def _spec(self, key: Key, item: Object) -> tuple[JobSpec | None, str]:
        version = (item["metadata"]["uid"], item["metadata"].get("generation", 0))
        known = self._specs.get(key)
        if known is None or known[0] != version:
            known = (version, read_spec(item))
            self._specs[key] = known
        return known[1]

    def _status(self, key: Key, item: Object) -> TrainingJobStatus:
        version = (item["metadata"]["uid"], item["metadata"].get("resourceVersion"))
        known = self._statuses.get(key)
        if known is None or known[0] != version:
            known = (version, read_job_status(item))
            self._statuses[key] = known
        return known[1]

    def _pod(self, item: Object) -> PodView:
        name = (item.get("spec") or {}).get("nodeName", "")
        node = self.caches[NODE].get(("", name)) if name else None
        return read_pod(item, node_ready=not name or (node is not None and read_node(node).ready))

    def _lease(self, key: Key, uid: str) -> LeaseView | None:
        item = self.caches[LEASE].get((key[0], lease_name(key[1])))
        if item is None or not controlled_by(item, uid):
            return None
        reader = self._leases.setdefault(key, LeaseReader())
        return reader.read(item, now=self._clock())

    def _plan(self, key: Key, uid: str) -> "KnownPlan | None":
        """The plan in the job's ConfigMap; where that has none, the last one."""
        item = self.caches[CONFIG_MAP].get((key[0], plan_config_map_name(key[1])))
        known = self._plans.get(key)
        if known is not None and known.job_uid != uid:
            known = None
        if item is None or not controlled_by(item, uid):
            return None if known is None else dataclasses.replace(known, intact=False, version="")
        version = f"{item['metadata'].get('uid')} {item['metadata'].get('resourceVersion')}"
        if known is not None and known.version == version:
            return known
        data, metadata = item.get("data") or {}, item["metadata"]
        written = (metadata.get("annotations") or {}).get(PLAN_WRITTEN_ANNOTATION)
        try:
            known = KnownPlan(
                job_uid=uid,
                plan=Plan.from_json(data.get(PLAN_KEY, "")),
                written=parse(written if written else metadata["creationTimestamp"]),
                config=data.get(CONFIG_KEY, ""),
                version=version,
            )
        except ValueError as error:
            self._unreadable(key, error)
            known = None if known is None else dataclasses.replace(known, intact=False, version=version)
        if known is not None:
            self._plans[key] = known
        return known

    def _unreadable(self, key: Key, error: Exception) -> None:
        """Log it once, not in every round."""
        if self._told.get(key) != str(error):
            self._told[key] = str(error)
            logger.error("job=%s/%s cannot be read: %s", *key, error)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KnownPlan:
    """A job's newest plan.

    Attributes:
        job_uid: of which job of this name.
        written: when.
        config: the trainer's configuration beside it, as JSON.
        version: uid and resourceVersion of the ConfigMap that it was read from.
        intact: whether the ConfigMap still has it.
    """

    job_uid: str
    plan: Plan
    written: Time
    config: str
    version: str
    intact: bool = True
