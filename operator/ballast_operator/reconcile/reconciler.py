"""A pass over a job: observe, decide, apply, report."""

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable

from ballast_policies.contract.messages import JOB_LABEL, lease_name
from ballast_policies.protocol.observed import Cause
from ballast_policies.scheduling.refusals import Refusal

from ballast_operator.api.conditions import JobCondition, JobReason
from ballast_operator.api.read import read_job_status, readable_status, unknown_fields
from ballast_operator.api.training_job_status import (
    TrainingJobStatus,
    asks_or_frees,
    least_status,
    plain,
    progress_alone,
    reconciled,
    refused_since,
    status_content,
    waits_alone,
)
from ballast_operator.errors import (
    ActionRefused,
    Forbidden,
    NameTaken,
    NotAllowed,
    NotFound,
    NotLeader,
    OperatorError,
    Rejected,
    ServerInternalError,
    Unavailable,
    for_good,
)
from ballast_operator.kube.client import Cluster
from ballast_operator.kube.kinds import EVENT, JOB, LEASE, POD, Key, Object
from ballast_operator.metrics import Metrics
from ballast_operator.observation.events import EventToPost, Recorder, flips
from ballast_operator.observation.findings import QUIET_SECONDS, Complaint
from ballast_operator.observation.observer import Observer
from ballast_operator.reconcile.actions import carry_out_all, together
from ballast_operator.reconcile.kueue import ask_kueue
from ballast_operator.reconcile.pod_checks import ANSWER_LASTS_SECONDS, PodChecks
from ballast_operator.reconcile.surroundings import (
    capacity_shortfall,
    failed_on,
    jobs_to_requeue,
    not_reached,
    older_nodes,
    on_the_same_gpu,
    slow_on,
)
from ballast_operator.settings import JobSettings
from ballast_operator.steps.context import DeletePod, JobCounter, StepResult, Surroundings, WritePlan
from ballast_operator.steps.decide import decide, refused
from ballast_operator.views.job import JobView

PROGRESS_WRITES_PER_SECOND = 20.0
"""Writes of progress, and of words for waiting jobs, at most: with more jobs, each is written less often."""

POOLS_SOON_SECONDS = 1.0
"""Seconds until a job is looked at again that waits for this operator's first decision, with the pools."""

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Requeue:
    """Request of a pass to look again.

    Attributes:
        after_seconds: when to look at the job even if nothing changes; None: only on a change.
        others: jobs to look at now: they share, or have shared, its GPU.
    """

    after_seconds: float | None = None
    others: frozenset[Key] = frozenset()

    def within(self, seconds: float) -> "Requeue":
        """The same, after ``seconds`` at the latest."""
        known = self.after_seconds
        return dataclasses.replace(self, after_seconds=seconds if known is None else min(known, seconds))


class Reconciler:
    """Drives jobs to what the allocator and their trainers want. One pass a job at a time.

    Attributes:
        has_pod_groups: launches are PodGroups of Kubernetes from now on.
    """

    def __init__(
        self,
        cluster: Cluster,
        observer: Observer,
        *,
        settings: JobSettings,
        metrics: Metrics,
        allocate: Callable[[], None],
        recorder: Recorder,
    ) -> None:
        self._cluster = cluster
        self._observer = observer
        self._findings = observer.findings
        self._settings = settings
        self._counters = {
            JobCounter.LAUNCHES: metrics.launches,
            JobCounter.RESTARTS: metrics.restarts,
            JobCounter.REPACKS: metrics.repacks,
            JobCounter.RELEASED_GPUS: metrics.released_gpus,
            JobCounter.GROWN_GPUS: metrics.grown_gpus,
        }
        for cause in Cause:
            if cause.is_restart:
                metrics.restarts.labels(cause)
        self._allocate = allocate
        self._clock = observer.clock.now
        self._recorder = recorder
        self._checks = PodChecks(cluster, settings, clock=observer.clock.seconds)
        self._progress_written: dict[Key, float] = {}
        self._written: dict[Key, tuple[str, Object | None]] = {}
        self._unanswered: set[Key] = set()
        self.has_pod_groups = False

    async def reconcile(self, key: Key) -> Requeue:
        """One pass.

        Returns:
            When to look again, and at which other jobs now.

        Raises:
            Conflict, NotFound: the caches were behind; look again soon.
            ActionRefused: the API server refuses what the job needs, and no launch can end for it.
            Unavailable: the API server did not answer; look again later.
            NotLeader: another replica leads.
        """
        # 1. Observe.
        if key in self._unanswered:
            await self._read_status(key)
        view = self._observer.job(key)
        if view is None:
            self._forget(key)
            return Requeue()
        self._findings.saw(view)
        view = (await self._with_kueues_word(view)).as_launched()
        if view.status.allocation is None:
            view = await self._look_at_pods(view)
            if view is None:
                return Requeue(0.0)
        # 2. Decide. Up to the reservation nothing is awaited: no two launches count on one GPU.
        item = self._observer.caches[JOB].get(key)
        assert item is not None
        result = self._decide(view)
        if _gives_up_waiting(view, result):
            view = await self._with_pulls(view)
            result = self._decide(view)
        if result.needs_fresh_view and not await self._is_as_observed(view):
            return Requeue(0.0)
        before, after = view.status.allocation, result.status.allocation
        result = dataclasses.replace(result, restores=self._restores(view, item, result))
        if result.restores and (pause := self._findings.pause_before_restoring(view)) > 0:
            return Requeue(pause)
        if after is not None and (before is None or len(after.pods) > len(before.pods)):
            self._findings.reservations[key] = after
        try:
            # 3. Apply.
            try:
                await carry_out_all(self._cluster, self._observer.caches, view, result.actions, self._clock())
                if result.grants_rights:
                    self._findings.rights_granted(view)
            except Forbidden as error:  # a person has to grant it: no launch ends for it
                raise ActionRefused(error.told) from error
            except (Rejected, NameTaken, ServerInternalError) as error:
                if isinstance(error, ServerInternalError) and not result.makes_pods:
                    raise  # it ends no gang that trains
                self._checks.forget(view, self._gpu_resources)
                ended = refused(view, error, now=self._clock(), settings=self._settings)
                if ended is None:
                    raise ActionRefused(str(error)) from error
                result = ended
            self._avoid_nodes(view, result)
            # 4. Report.
            prepares = [self._prepare(view, result)] if result.meanwhile else []
            again: Requeue = (await together(self._report(view, item, result), *prepares))[0]
            self._findings.reservations.pop(key, None)
        except Unavailable:
            self._unanswered.add(key)  # a launch may have been written: its GPUs stay reserved
            raise
        except BaseException:
            self._findings.reservations.pop(key, None)
            raise
        return self._asking_again(view, result, again)

    def _asking_again(self, view: JobView, result: StepResult, again: Requeue) -> Requeue:
        """The same, sooner where somebody may allow meanwhile what the job needs."""
        if view.queue and not result.status.finished:
            known = self._gpu_resources or view.key in self._observer.decided.jobs
            return again.within(self._settings.ask_again_seconds if known else POOLS_SOON_SECONDS)
        if view.blocked is not None and result.status.allocation is None:
            # What a template lacks may be what a LimitRange or a webhook has put there.
            soon = self._settings.ask_again_seconds if view.blocked.may_pass else ANSWER_LASTS_SECONDS
            return again.within(soon)
        return again

    def _avoid_nodes(self, view: JobView, result: StepResult) -> None:
        """Remember nodes of slow ranks, and, of a launch that ends, of pods that failed or did not run."""
        before, after = view.status.allocation, result.status.allocation
        if node := slow_on(view):
            self._findings.complain(view.key, Complaint(node, self._clock(), slow=True))
        if before is None or before.ending is not None or after is None or after.ending is None:
            return
        if after.ending.cause is Cause.NOT_BOUND:
            self._findings.avoid(view, not_reached(view, before, self._observer.decided.pools))
        elif after.ending.cause in (Cause.USER_ERROR, Cause.POD_LOST) and (node := failed_on(view)):
            self._findings.complain(view.key, Complaint(node, self._clock()))

    async def _prepare(self, view: JobView, result: StepResult) -> None:
        """Make what the launch that is being written needs first; what fails, the next pass tells."""
        allocation = result.status.allocation
        if allocation is None:
            return
        with contextlib.suppress(OperatorError):
            await carry_out_all(self._cluster, self._observer.caches, view, result.meanwhile, self._clock())
            self._findings.account_made(view, allocation.launch)

    @property
    def _gpu_resources(self) -> frozenset[str]:
        """The extended resources that count as GPUs in the pools."""
        return frozenset(info.pool.gpu_resource for info in self._observer.decided.pools.values())

    async def _look_at_pods(self, view: JobView) -> JobView | None:
        """The job with what keeps its pods from being made, if anything does; None: it is gone."""
        if view.spec is None or view.deleting or view.status.finished or view.hold(self._clock()):
            return view
        assignment = self._observer.decided.on(view.key, view.uid)
        launches = assignment is not None and assignment.placement is not None
        why = await self._checks.why_blocked(view, self._gpu_resources, self._clock(), launches=launches)
        if self._findings.block(view, why):
            self._allocate()
        assignment = self._observer.decided.on(view.key, view.uid)
        if view.spec.question is not None and assignment is not None and assignment.placement is not None:
            # The launch reads what is kept of it: schedules are played for up to a second.
            await asyncio.to_thread(view.spec.candidates_on, assignment.placement.by_pool, assignment.memory)
        return self._observer.job(view.key)

    async def _with_kueues_word(self, view: JobView) -> JobView:
        """The job with what Kueue says of its Workload."""
        leaves = self._settings.kueue and self._findings.left_queue(view)
        if not (view.queue or leaves) or view.spec is None or view.deleting:
            return view
        if self._settings.kueue:
            why = await ask_kueue(self._cluster, view, self._gpu_resources, self._clock())
        else:
            fix = "helm upgrade ... --set kueue.enabled=true, or take the job's label away"
            message = f"it is in queue {view.queue}, and this operator does not ask Kueue. To fix: {fix}"
            why = Refusal(JobReason.QUEUED, message)
        if self._findings.queue(view, why):
            self._allocate()
        return dataclasses.replace(view, queued=why if view.queue else None)

    def _decide(self, view: JobView) -> StepResult:
        assignment = self._observer.decided.on(view.key, view.uid)
        allocation = view.status.allocation
        placement = assignment.placement if assignment is not None else None
        if allocation is not None:
            allocation = allocation.named_as(placement)
            view = dataclasses.replace(view, status=view.status.replace(allocation=allocation))
            placement = allocation.placement
        sharer, partner_left = on_the_same_gpu(self._observer, view, assignment)
        around = Surroundings(
            shortage=capacity_shortfall(self._observer, view, assignment, placement),
            pools=self._observer.pools,
            older_nodes=older_nodes(self._observer, allocation),
            sharer=sharer,
            partner_left=partner_left,
            has_pod_groups=self.has_pod_groups,
        )
        return decide(
            view,
            assignment=assignment,
            around=around,
            now=self._clock(),
            settings=self._settings,
        )

    async def _with_pulls(self, view: JobView) -> JobView:
        """The job with its pods as pulling whose nodes say so in Events.

        A pod says it itself only when kubelet looks at it again, which is once the pull has ended.

        Raises:
            Unavailable: the API server does not answer.
        """
        try:
            of_pulls = "involvedObject.kind=Pod,reason=Pulling"
            events, _ = await self._cluster.list(EVENT, namespace=view.key[0], field_selector=of_pulls)
        except Forbidden as error:
            logger.warning("job=%s/%s whether its images are pulled is not known: %s", *view.key, error)
            return view
        named = {(event.get("involvedObject") or {}).get("uid") for event in events}
        pods = tuple(pod.while_pulling() if pod.uid in named else pod for pod in view.pods)
        return dataclasses.replace(view, pods=pods)

    async def _is_as_observed(self, view: JobView) -> bool:
        """True if a fresh look at the job's pods and its lease shows what was observed."""
        selector = f"{JOB_LABEL}={view.name}"
        items, _ = await self._cluster.list(POD, namespace=view.key[0], label_selector=selector)
        for item in items:
            self._observer.caches.wrote(POD, item)
        with contextlib.suppress(NotFound):
            lease = await self._cluster.get(LEASE, view.key[0], lease_name(view.name))
            if JOB_LABEL in (lease["metadata"].get("labels") or {}):
                self._observer.caches.wrote(LEASE, lease)
        fresh = self._observer.job(view.key)
        if fresh is not None:
            fresh = fresh.as_launched()
        return fresh is not None and (fresh.pods, fresh.finished_step) == (view.pods, view.finished_step)

    def _restores(self, view: JobView, item: Object, result: StepResult) -> tuple[str, ...]:
        """Changes by others that a result undoes, and that may wait."""
        if _cannot_wait(view, result):
            return ()
        return (*self._restored_status(view, item, result.status), *result.restores)

    def _restored_status(self, view: JobView, item: Object, new: TrainingJobStatus) -> tuple[str, ...]:
        """Its status, where others have changed what was written of it, and ``new`` puts that right.

        Of an allocation that is gone nothing is put right: the next launch is counted.
        """
        uid, written = self._written.get(view.key, ("", None))
        stored = item.get("status") or {}
        if written is None or uid != view.uid or written == stored:
            return ()
        others, wanted = unknown_fields(TrainingJobStatus, stored), new.to_dict()
        undone = any(
            written.get(field) != stored.get(field)
            and (stored.get(field) != wanted.get(field) or field == "allocation")
            for field in (written.keys() | stored.keys()) - others.keys() - {"state"}
        )
        return ("its status",) if undone else ()

    async def _read_status(self, key: Key) -> None:
        """An answer was lost: read what the job's status is before anything is decided on it."""
        with contextlib.suppress(NotFound):
            self._observer.caches.wrote(JOB, await self._cluster.get(JOB, *key))
        self._findings.reservations.pop(key, None)
        self._unanswered.discard(key)
        self._written.pop(key, None)

    async def report_error(self, key: Key, error: Exception) -> None:
        """Show on the job that no pass over it succeeds; nothing else of its status is touched.

        A status that cannot be read is replaced by the one that was written last, where that is known, or by
        what of it can be read.

        Raises:
            NotLeader: another replica leads.
        """
        item = self._observer.caches[JOB].get(key)
        if item is None:
            return
        metadata = item["metadata"]
        reason, message = JobReason.INTERNAL_ERROR, f"{type(error).__name__}: {error}"[:1000]
        if isinstance(error, ActionRefused | Forbidden):
            reason = JobReason.ACTION_REFUSED
            told = error.told if isinstance(error, Forbidden) else str(error)
            message = f"an action was refused, and is tried again: {plain(told)}"
        elif for_good(error):
            reason, message = (
                JobReason.STATUS_REFUSED,
                f"the API server refused a request: {plain(str(error))}",
            )
        elif isinstance(error, NotAllowed):
            reason = JobReason.ACTION_REFUSED
            message = (
                f"a webhook or an admission policy refuses what the operator writes: {plain(str(error))}. "
                "To fix: except the operator's service account from it"
            )
        notice = EventToPost(type="Warning", reason=reason, message=message)
        try:
            self._recorder.post(JOB, *key, metadata["uid"], (notice,))
            unreadable = False
            try:
                old = read_job_status(item)
            except ValueError:
                uid, written = self._written.get(key, ("", None))
                if written is None or uid != metadata["uid"]:  # e.g. before this process began
                    written = readable_status(item)
                item, unreadable = {**item, "status": written}, True
                old = read_job_status(item)
            new = old.with_condition(
                JobCondition.RECONCILED,
                False,
                reason,
                message,
                now=self._clock(),
                generation=metadata.get("generation", 0),
            )
            if unreadable or new != old:
                await self._write_status(key, item, new)
        except NotLeader:
            raise
        except Exception as second:
            logger.warning("job=%s/%s the error is not in its status: %s", *key, second)

    async def _write_status(self, key: Key, item: Object, status: TrainingJobStatus) -> TrainingJobStatus:
        """Write the status, or as much of it as the API server does not refuse; returns what is written."""
        try:
            await self._replace_status(key, item, status)
            return status
        except Rejected as error:
            if not for_good(error):
                raise
            logger.error("job=%s/%s status refused by the API server: %s", *key, error)
            old, generation = read_job_status(item), item["metadata"].get("generation", 0)
            least = least_status(old, status, str(error), self._clock(), generation)
        if least != old:
            await self._replace_status(key, item, least)
        return least

    async def _replace_status(self, key: Key, item: Object, status: TrainingJobStatus) -> None:
        foreign = unknown_fields(TrainingJobStatus, item.get("status") or {})
        # Decided on this version: a write by anybody else since then makes this a Conflict.
        version = item["metadata"]["resourceVersion"]
        metadata = {"namespace": key[0], "name": key[1], "resourceVersion": version}
        body = JOB.object(metadata=metadata, status={**foreign, **status_content(status)})
        written = await self._cluster.write_status(JOB, body)
        self._observer.caches.wrote(JOB, written)
        self._written[key] = item["metadata"]["uid"], written.get("status")

    async def _report(self, view: JobView, item: Object, result: StepResult) -> Requeue:
        """Write the status that was decided on ``item``."""
        if self._observer.caches[JOB].get(view.key) is None:
            return Requeue()
        again = Requeue(result.requeue_after_seconds)
        old, new = view.status, result.status
        if result.restores:
            self._findings.restored(view, result.restores)
        if contested := self._findings.contested(view.key):
            message = (
                f"others change {contested} again and again, and it is put right after growing pauses. "
                "To fix: end that controller; kubectl get with --show-managed-fields names it"
            )
            kind, reason = JobCondition.RECONCILED, JobReason.CHANGED_BY_OTHERS
            new = new.with_condition(
                kind, False, reason, message, now=self._clock(), generation=view.generation
            )
            again = again.within(QUIET_SECONDS)
        # That a status was refused stays said: what it lacks since then, later ones lack too.
        elif new.launches != old.launches or not refused_since(old, view.generation):
            new = reconciled(new, self._clock(), view.generation)
        new = self._as_kept(new.replace(state=new.summary_state))
        if old != new and not result.write_later:
            wait = self._too_soon(view.key, old, new)
            if wait > 0:
                return again.within(wait)
            written = await self._write_status(view.key, item, new)
            if 0 < old.observed_generation < new.observed_generation:
                self._progress_written.pop(view.key, None)  # what is decided on an edit comes afterwards
            else:
                self._progress_written[view.key] = self._observer.clock.seconds()
            again = dataclasses.replace(again, others=frozenset(jobs_to_requeue(old, new)))
            self._count(result)
            notices = flips(old.conditions, written.conditions)
            for notice in notices:
                logger.info("job=%s/%s reason=%s: %s", *view.key, notice.reason, notice.message)
            self._recorder.post(JOB, view.key[0], view.name, view.uid, notices)
        if result.allocate or asks_or_frees(old, new):
            self._allocate()
        return again

    def _as_kept(self, status: TrainingJobStatus) -> TrainingJobStatus:
        """The status without what an older definition drops: it would differ from what is stored for ever."""
        content = status.to_dict()
        kept = self._cluster.dropped.without(JOB, content)
        return status if kept is content else TrainingJobStatus.model_validate(kept)

    def _too_soon(self, key: Key, old: TrainingJobStatus, new: TrainingJobStatus) -> float:
        """Seconds to wait where nothing but progress, or why it waits, has changed since a recent write.

        A gang's launch and its first step change the words of all jobs that wait for its GPUs, a node that
        comes and goes the reason, too.
        """
        last = self._progress_written.get(key)
        first = old.progress is None and new.progress is not None
        if last is None or first:
            return 0.0
        if waits_alone(old, new):
            pause = len(self._observer.decided.assignments) / PROGRESS_WRITES_PER_SECOND
        elif progress_alone(old, new):
            pause = max(
                self._settings.progress_seconds, len(self._observer.gpu_holders) / PROGRESS_WRITES_PER_SECOND
            )
        else:
            return 0.0
        return pause - (self._observer.clock.seconds() - last)

    def _count(self, result: StepResult) -> None:
        for name, label, amount in result.metric_increments:
            metric = self._counters[name]
            (metric.labels(label) if label else metric).inc(amount)

    def _forget(self, key: Key) -> None:
        self._findings.forget(key)
        self._progress_written.pop(key, None)
        self._written.pop(key, None)
        self._unanswered.discard(key)
        self._allocate()


def _cannot_wait(view: JobView, result: StepResult) -> bool:
    """True if a result frees GPUs of the gang, all or some, or has when its nodes were first seen to go."""
    before, after, plan = view.status.allocation, result.status.allocation, view.launched_plan
    if before is None:
        return False
    if after is None or after.ending is not None or len(after.pods) < len(before.pods):
        return True
    if after.leaving != before.leaving:
        return True
    return any(
        isinstance(action, DeletePod)
        or (isinstance(action, WritePlan) and plan is not None and len(action.plan.ranks) < len(plan.ranks))
        for action in result.actions
    )


def _gives_up_waiting(view: JobView, result: StepResult) -> bool:
    """True if a launch or a growth ends since pods whose containers are being made do not run in time."""
    before, after = view.status.allocation, result.status.allocation
    if before is None or after is None or before.ending is not None:
        return False
    ends = after.ending is not None and after.ending.cause is Cause.NOT_BOUND
    return (ends or after.failed_growths > before.failed_growths) and any(pod.creating for pod in view.gang)
