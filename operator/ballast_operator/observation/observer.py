"""Views of jobs and nodes, read from the caches. Nothing here talks to the API server."""

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from ballast_policies.contract.limits import MOST_EPOCH_READ
from ballast_policies.contract.messages import CONFIG_KEY, PLAN_KEY, lease_name, plan_config_map_name
from ballast_policies.contract.plan import Plan

from ballast_operator.api.job_allocation import JobAllocation
from ballast_operator.api.training_job_status import TrainingJobStatus
from ballast_operator.kube.caches import Caches, job_of
from ballast_operator.kube.kept_fields import pinned_node
from ballast_operator.kube.kinds import (
    CONFIG_MAP,
    JOB,
    LEASE,
    NODE,
    POD,
    POLICY,
    Key,
    Kind,
    Object,
    controlled_by,
    key_of,
)
from ballast_operator.observation.decoded import DecodedJobs
from ballast_operator.observation.findings import Findings
from ballast_operator.views.assignment import Decided, PoolInfo, billed_pools
from ballast_operator.views.clock import OPERATORS, Clock, Time, parse
from ballast_operator.views.job import PLAN_WRITTEN_ANNOTATION, QUEUE_LABEL, JobView
from ballast_operator.views.lease import LeaseReader, LeaseView
from ballast_operator.views.nodes import NodeView, is_ours, read_node, restarted
from ballast_operator.views.notices import NODE_DELETED
from ballast_operator.views.pod import PodView, read_pod


class GpuHolders:
    """GPUs that jobs hold by their ``status``, or are about to by a write under way (``reservations``)."""

    def __init__(
        self,
        status: Callable[[Key], TrainingJobStatus | None],
        reservations: Mapping[Key, JobAllocation] = MappingProxyType({}),
    ) -> None:
        self._status = status
        self._held: dict[Key, JobAllocation] = {}
        self._on_node: dict[str, set[Key]] = {}
        self._changed: set[Key] = set()
        self._reservations = reservations

    def __len__(self) -> int:
        """Number of jobs that hold GPUs by their status."""
        self._read()
        return len(self._held)

    def changed(self, key: Key) -> None:
        """The job has changed, or is gone."""
        self._changed.add(key)

    def allocations_on(self, names: Iterable[str]) -> dict[Key, JobAllocation]:
        """Jobs that hold GPUs of one of the nodes by their status, with all that they hold."""
        self._read()
        return {key: self._held[key] for name in set(names) for key in self._on_node.get(name, ())}

    def on_nodes(self, names: Iterable[str]) -> dict[Key, JobAllocation]:
        """Jobs that take GPUs of one of the nodes, with all that they take."""
        wanted = set(names)
        found = self.allocations_on(wanted)
        return found | {key: held for key, held in self._reservations.items() if wanted & set(held.nodes)}

    def _read(self) -> None:
        while self._changed:
            key = self._changed.pop()
            before = self._held.pop(key, None)
            for name in set(before.nodes) if before is not None else ():
                self._on_node[name].discard(key)
                if not self._on_node[name]:
                    del self._on_node[name]
            status = self._status(key)
            allocation = status.allocation if status is not None else None
            if allocation is not None:
                self._held[key] = allocation
                for name in set(allocation.nodes):
                    self._on_node.setdefault(name, set()).add(key)


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


logger = logging.getLogger(__name__)


class Observer:
    """Views of jobs and nodes, from the caches at this moment.

    Views are kept until something that they were read from changes: with thousands of jobs, a decision reads
    the few that did. What ``caches`` have already counts as seen now.

    Attributes:
        findings: what passes have learned and no object says.
        decided: what the allocator has decided last.
        clock: of all that decide by it.
    """

    def __init__(
        self,
        caches: Caches,
        decoded: DecodedJobs | None = None,
        *,
        clock: Clock = OPERATORS,
    ) -> None:
        self.caches = caches
        self.findings = Findings(clock.seconds)
        self.decided = Decided()
        self.clock = clock
        self._leases: dict[Key, LeaseReader] = {}
        self._plans: dict[Key, KnownPlan] = {}
        self._views: dict[Key, JobView] = {}
        self._nodes: dict[str, NodeView] = {}
        self._order: list[Key] | None = None
        self._decoded = decoded if decoded is not None else DecodedJobs(caches)
        self._told: dict[Key, str] = {}
        self._ended: dict[str, float] = {}
        self._restarted: set[str] = set()
        self.gpu_holders = GpuHolders(self.status, self.findings.reservations)
        caches.store_listeners.append(self._invalidate)
        self._decoded.listeners.append(self._planned)
        for kind, store in caches.stores.items():
            for item in store:
                self._invalidate(kind, None, item)

    @property
    def pools(self) -> Mapping[str, PoolInfo]:
        """Pools as the allocator last saw them; before its first decision, with the prices of the bill.

        A pass that comes before the first decision sums up a job's cost, too.
        """
        return self.decided.pools or billed_pools(self.caches[POLICY])

    def job(self, key: Key) -> JobView | None:
        """The job as known now; None: there is no such job. Raises ValueError: its status cannot be read."""
        view = self._view(key)
        if view is None:
            return None
        lease, now = self._lease(key, view.uid), self.clock.seconds()
        if any(pod.uid in self._ended for pod in view.pods):
            pods = tuple(
                dataclasses.replace(pod, ended_seconds=now - self._ended[pod.uid])
                if pod.uid in self._ended
                else pod
                for pod in view.pods
            )
            view = dataclasses.replace(view, pods=pods)
        return view if lease is None else dataclasses.replace(view, lease=lease)

    def jobs(self) -> list[JobView]:
        """Jobs, by age and name; how long their Leases have been quiet may be out of date."""
        if self._order is None:
            items = sorted(
                self.caches[JOB],
                key=lambda item: (item["metadata"].get("creationTimestamp", ""), item["metadata"]["name"]),
            )
            self._order = [key_of(item) for item in items]
        views = []
        for key in self._order:
            try:
                views.append(self._view(key))
            except Exception as error:  # one job must not hide the others, whatever is wrong with it
                self._unreadable(key, error)
        return [view for view in views if view is not None]

    def lease(self, key: Key) -> LeaseView | None:
        """The job's Lease as it is known now; None: the job has none."""
        item = self.caches[JOB].get(key)
        return None if item is None else self._lease(key, item["metadata"]["uid"])

    def status(self, key: Key) -> TrainingJobStatus | None:
        """The job's status; None where there is no such job, or it cannot be read."""
        item = self.caches[JOB].get(key)
        try:
            return None if item is None else self._decoded.status(key, item)
        except ValueError as error:  # its pods count all the same
            self._unreadable(key, error)
            return None

    def nodes(self) -> dict[str, NodeView]:
        """Nodes by name; the mapping is the caller's."""
        for item in self.caches[NODE] if len(self._nodes) < len(self.caches[NODE]) else ():
            self.node(item["metadata"]["name"])
        return dict(self._nodes)

    def node(self, name: str) -> NodeView | None:
        """The node of this name; None: there is none."""
        view = self._nodes.get(name)
        if view is None:
            item = self.caches[NODE].get(("", name))
            if item is None:
                return None
            view = self._nodes[name] = read_node(item, self.caches[POD].on_node(name))
        return view

    def _invalidate(self, kind: Kind, old: Object | None, new: Object | None) -> None:
        """Drop the views that a change makes out of date."""
        item = new if new is not None else old
        assert item is not None
        if kind is JOB:
            self._views.pop(key_of(item), None)
            self.gpu_holders.changed(key_of(item))
            if old is None or new is None or old["metadata"].get("uid") != new["metadata"].get("uid"):
                self._order = None
        elif kind is NODE:
            name = item["metadata"]["name"]
            self._invalidate_node(name, new)
            if old is not None and new is not None and restarted(old, new):
                pods = [self._pod(pod) for pod in self.caches[POD].on_node(name) if is_ours(pod)]
                self._restarted.update(pod.uid for pod in pods if pod.phase == "Running")
        else:
            for version in filter(None, (old, new)):
                self._forget_view_of(version)
                if kind is POD and not is_ours(version):  # it leaves less to jobs' pods
                    self._nodes.pop(pinned_node(version), None)
            if kind is POD and new is None:
                self._ended.pop(item["metadata"].get("uid", ""), None)
                self._restarted.discard(item["metadata"].get("uid", ""))
            key = job_of(new) if kind is LEASE and new is not None else None
            if new is not None and key is not None and new["metadata"]["name"] == lease_name(key[1]):
                self._leases.setdefault(key, LeaseReader()).quiet_seconds(new, now=self.clock.seconds())

    def _invalidate_node(self, name: str, new: Object | None) -> None:
        before = self._nodes.pop(name, None)
        after = read_node(new, self.caches[POD].on_node(name)) if new is not None else None
        if after is not None:
            self._nodes[name] = after
        if before is None or after is None or (before.ready, before.leaving) != (after.ready, after.leaving):
            for pod in self.caches[POD].on_node(name):
                self._forget_view_of(pod)

    def _planned(self, key: Key) -> None:
        self._views.pop(key, None)

    def _forget_view_of(self, part: Object) -> None:
        if (key := job_of(part)) is not None:
            self._views.pop(key, None)

    def _view(self, key: Key) -> JobView | None:
        view = self._views.get(key) or self._read(key)
        if view is None:
            return None
        found = self.findings.of(view)
        if found != (view.avoided, view.blocked, view.lacks_rights, view.lacks_account, view.queued):
            view = dataclasses.replace(view, **found._asdict())
        self._views[key] = view
        return view

    def _read(self, key: Key) -> JobView | None:
        item = self.caches[JOB].get(key)
        if item is None:
            for kept in (self._views, self._leases, self._plans, self._told):
                kept.pop(key, None)
            return None
        metadata = item["metadata"]
        spec, problem = self._decoded.spec(key, item)
        asked = item.get("spec")  # any value, where the CRD was installed without its schema
        ttl = asked.get("ttlSecondsAfterFinished") if isinstance(asked, Mapping) else None
        known, status = self._plan(key, metadata["uid"]), self._decoded.status(key, item)
        pods = [self._pod(pod) for pod in self.caches[POD].of_job(key) if controlled_by(pod, metadata["uid"])]
        if status.launches > MOST_EPOCH_READ:
            numbers = [0, *(part.launch for part in (status.allocation, known and known.plan, *pods) if part)]
            status = status.replace(launches=max(one for one in numbers if one <= MOST_EPOCH_READ))
        created = parse(metadata["creationTimestamp"]) if "creationTimestamp" in metadata else None
        held = status.allocation
        if held is not None and created is not None and held.since < created:
            # A backup has brought it back with its status: it holds and pays anew.
            status = status.replace(allocation=held.replace(since=created))
        return JobView(
            key=key,
            uid=metadata["uid"],
            generation=metadata.get("generation", 0),
            spec=spec,
            spec_problem=problem,
            ttl_seconds=ttl if isinstance(ttl, int) else None,
            deleting=bool(metadata.get("deletionTimestamp")),
            orphans="orphan" in (metadata.get("finalizers") or ()),
            status=status,
            pods=tuple(sorted(pods, key=lambda pod: (pod.launch, pod.rank))),
            lease=self._lease(key, metadata["uid"]),
            plan=known.plan if known is not None else None,
            plan_written=known.written if known is not None else None,
            plan_config=known.config if known is not None else "",
            plan_intact=known is None or known.intact,
            queue=(metadata.get("labels") or {}).get(QUEUE_LABEL, ""),
            created=created,
        )

    def _pod(self, item: Object) -> PodView:
        name = (item.get("spec") or {}).get("nodeName", "")
        node = self.node(name) if name else None
        if name and node is None:
            pod = read_pod(item, node_ready=False, leaving=NODE_DELETED)
        else:
            ready = node is None or node.ready
            leaving = None if node is None else node.leaving
            again = item["metadata"].get("uid", "") in self._restarted
            pod = read_pod(item, node_ready=ready, leaving=leaving, restarted=again)
        if not pod.alive:  # its node's clock may be wrong
            self._ended.setdefault(pod.uid, self.clock.seconds())
        return pod

    def _lease(self, key: Key, uid: str) -> LeaseView | None:
        item = self.caches[LEASE].get((key[0], lease_name(key[1])))
        if item is None or not controlled_by(item, uid):
            return None
        return self._leases.setdefault(key, LeaseReader()).read(item, now=self.clock.seconds())

    def _plan(self, key: Key, uid: str) -> KnownPlan | None:
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
            plan = Plan.from_json(data.get(PLAN_KEY, ""))
            if max(plan.epoch, plan.launch) > MOST_EPOCH_READ:
                raise ValueError(f"its plan has epoch {plan.epoch} of launch {plan.launch}")
            known = KnownPlan(
                job_uid=uid,
                plan=plan,
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
