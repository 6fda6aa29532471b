"""Reads the caches into views. Nothing here talks to the API server."""

import logging
import time
from collections.abc import Callable

from ballast_policies.contract import (
    CONFIG_KEY,
    PLAN_KEY,
    ContractError,
    Plan,
    lease_name,
    plan_config_map_name,
)

from ballast_operator.api.read import read_job_status
from ballast_operator.api.training_job_status import JobAllocation, TrainingJobStatus
from ballast_operator.kube.caches import Caches
from ballast_operator.kube.kinds import CONFIG_MAP, JOB, LEASE, NODE, POD, Key, Object, key_of
from ballast_operator.views.clock import Time, parse
from ballast_operator.views.job import PLAN_WRITTEN_ANNOTATION, JobView
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
        self._plans: dict[Key, _KnownPlan] = {}
        self._specs: dict[Key, tuple[tuple[str, int], tuple[JobSpec | None, str]]] = {}
        self._statuses: dict[Key, tuple[tuple[str, str | None], TrainingJobStatus]] = {}
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
        plan, written, config = self._plan(key, metadata["uid"])
        pods = [self._pod(pod) for pod in self.caches[POD].of_job(key) if _owned(pod, metadata["uid"])]
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
            plan=plan,
            plan_written=written,
            plan_config=config,
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
            except ValueError as error:  # one unreadable object must not hide the others
                logger.error("job=%s/%s cannot be read: %s", *key, error)
        return [view for view in views if view is not None]

    def nodes(self) -> dict[str, NodeView]:
        """All nodes by name."""
        return {item["metadata"]["name"]: read_node(item) for item in self.caches[NODE]}

    def allocations(self) -> dict[Key, JobAllocation]:
        """GPUs that jobs hold by their status, or are about to hold by a write under way."""
        found: dict[Key, JobAllocation] = {}
        for item in self.caches[JOB]:
            key = key_of(item)
            allocation = self._status(key, item).allocation
            if allocation is not None:
                found[key] = allocation
        return {**found, **self.reservations}

    def forget(self, key: Key) -> None:
        """The job is gone."""
        self._renewals.pop(key, None)
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
        if item is None or not _owned(item, uid):
            return None
        renewed = (item.get("spec") or {}).get("renewTime") or ""
        known = self._renewals.get(key)
        if known is None or known[0] != renewed:
            known = (renewed, self._clock())
            self._renewals[key] = known
        return read_lease(item, quiet_seconds=self._clock() - known[1])

    def _plan(self, key: Key, uid: str) -> tuple[Plan | None, Time | None, str]:
        """(plan, when it was written, the trainer's configuration beside it)."""
        item = self.caches[CONFIG_MAP].get((key[0], plan_config_map_name(key[1])))
        if item is None or not _owned(item, uid):
            return None, None, ""
        try:
            plan = Plan.from_json((item.get("data") or {}).get(PLAN_KEY, ""))
        except ContractError:
            return None, None, ""
        written = (item["metadata"].get("annotations") or {}).get(PLAN_WRITTEN_ANNOTATION)
        when = parse(written if written else item["metadata"]["creationTimestamp"])
        return plan, when, (item.get("data") or {}).get(CONFIG_KEY, "")


def _owned(item: Object, uid: str) -> bool:
    return any(owner.get("uid") == uid for owner in item["metadata"].get("ownerReferences") or [])
