"""A job as the machine sees it: as it is stored, and as its pods and its trainer show themselves."""

import dataclasses
import enum
from collections.abc import Collection

from ballast_policies.contract.limits import MOST_EPOCH
from ballast_policies.contract.plan import Directive


class Cause(enum.StrEnum):
    """Cause of a launch's end; keys of ``status.restarts``."""

    COMPLETED = "Completed"
    """All steps are done."""
    SUSPENDED = "Suspended"
    """``spec.suspend`` was set."""
    PREEMPTED = "Preempted"
    """The allocator gave the GPUs to another job, or this job to other GPUs."""
    NOT_BOUND = "NotBound"
    """Not every pod of the gang ran in time: all or none, so none."""
    NOT_ALLOWED = "NotAllowed"
    """A quota, an admission policy or a missing class of the cluster forbade a pod."""
    NAME_TAKEN = "NameTaken"
    """An object of somebody else has the name of one that the launch needs."""
    USER_ERROR = "UserError"
    """The user's model, data, configuration, image or memory limit failed. Counts toward ``backoffLimit``."""
    HUNG = "Hung"
    """Pods ran, but the lease was not renewed or the start took too long. Counts toward ``backoffLimit``."""
    POD_LOST = "PodLost"
    """A pod was killed, evicted or deleted by someone else."""
    NODE_LOST = "NodeLost"
    """A node went away under a pod."""
    NODE_LEAVING = "NodeLeaving"
    """A node has announced that it goes, and the gang could not continue without it."""
    PEER_LOST = "PeerLost"
    """Ranks lost their connections and no other pod or node has failed."""
    STEPS_ADDED = "StepsAdded"
    """The launch has done the steps that it was told of, and the job has got more since."""
    SHRINK_TIMEOUT = "ShrinkTimeout"
    """A shrink was not acknowledged in time."""
    GROW_TIMEOUT = "GrowTimeout"
    """New ranks did not join in time."""

    @property
    def is_restart(self) -> bool:
        """The launch ended early and is followed by another: counted in ``status.restarts``."""
        return self not in (Cause.COMPLETED, Cause.SUSPENDED)

    @property
    def may_pass(self) -> bool:
        """Nothing is wrong with the job: what kept its pods from running may pass by itself."""
        return self in (Cause.NOT_BOUND, Cause.NOT_ALLOWED, Cause.NAME_TAKEN)

    @property
    def counts(self) -> bool:
        """It counts toward ``backoffLimit``."""
        return self in (Cause.USER_ERROR, Cause.HUNG)

    @property
    def graceful(self) -> bool:
        """The trainer is asked to save and stop before its pods are deleted."""
        return self in (Cause.SUSPENDED, Cause.PREEMPTED, Cause.NODE_LEAVING, Cause.STEPS_ADDED)

    @property
    def saves_first(self) -> bool:
        """True if ``graceful``, or the trainer lives and has only not changed its size: it may still save."""
        return self.graceful or self in (Cause.SHRINK_TIMEOUT, Cause.GROW_TIMEOUT)


class Phase(enum.StrEnum):
    """Phase of a pod."""

    PENDING = "Pending"
    """It does not run yet, or has no address yet."""
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class Failure(enum.StrEnum):
    """Kind of a pod's failure."""

    AT_FAULT = "AtFault"
    """The user's model, data, configuration or memory made it fail."""
    PEER_LOST = "PeerLost"
    """Another rank was lost."""
    STOPPED = "Stopped"
    """It stopped as it was told, with its state saved or not."""
    KILLED = "Killed"
    """The cluster, a signal, or somebody ended it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pod:
    """A pod of the job.

    Attributes:
        launch: of the job, that it was made for.
        number: in its name; its rank at launch.
        forced: its deletion waits for none of its processes.
        failure: how it failed; None unless ``phase`` is FAILED.
        node_ready: whether its node is there and ready.
        leaves: its node has announced that it goes, or the cluster is about to end the pod; it still runs.
        broken: it cannot run until somebody changes the job, or makes what the job names.
    """

    name: str
    launch: int
    number: int
    phase: Phase = Phase.PENDING
    leaving: bool = False
    forced: bool = False
    failure: Failure | None = None
    node_ready: bool = True
    leaves: bool = False
    broken: bool = False

    @property
    def alive(self) -> bool:
        """It holds, or may come to hold, its GPU."""
        return self.phase in (Phase.PENDING, Phase.RUNNING)

    @property
    def answers(self) -> bool:
        """Its ranks may still run, on a node that says so."""
        return self.alive and self.node_ready and not self.forced

    @property
    def ready(self) -> bool:
        """A plan may name it."""
        return self.phase is Phase.RUNNING and not self.leaving


@dataclasses.dataclass(frozen=True, slots=True)
class Gang:
    """The launch that holds GPUs, one for each of its pods: written before the first pod is made.

    Attributes:
        pods: names.
        joining: those of ``pods`` that are to join the running gang, and have not.
        first_newcomer: number in the name of the first pod of the last growth; 0: it has not grown.
        ending: why it has to end; never unset.
    """

    launch: int
    pods: tuple[str, ...]
    joining: tuple[str, ...] = ()
    first_newcomer: int = 0
    ending: Cause | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class WrittenPlan:
    """The newest plan, as far as the machine reads it; ``pods`` by rank."""

    epoch: int
    launch: int
    directive: Directive
    pods: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ProposedShrink:
    """The trainer's proposal; ``wanted``: the job's spec allows its size and its speed."""

    epoch: int
    kept: tuple[str, ...]
    released: tuple[str, ...]
    wanted: bool = True


class Action(enum.StrEnum):
    """Action that the allocator wants of a job's gang."""

    KEEP = "keep"
    """Continue where it runs."""
    PLACE = "place"
    """Run on these nodes: launch there, or move there."""
    RELEASE = "release"
    """Hold no GPUs: wait, or stop."""


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """The allocator's assignment.

    Attributes:
        launch: number of launches of the job when it was decided.
        size: PLACE: pods of the gang; KEEP: pods that may be added to it.
        same_placement: KEEP: it is about the nodes that the gang is on.
        keep: KEEP: pods that the gang is to continue with, by rank; empty: all.
    """

    kind: Action
    launch: int
    size: int = 0
    same_placement: bool = True
    keep: tuple[str, ...] = ()


class Deadline(enum.StrEnum):
    """Wait that has a limit."""

    PAUSE = "Pause"
    """Pause after a failure, before the next launch."""
    BIND = "Bind"
    """Every pod of a launch or of a growth runs."""
    ACKNOWLEDGEMENT = "Acknowledgement"
    """Rank 0 has reached the plan."""
    HEARTBEAT = "Heartbeat"
    """The trainer's lease is renewed."""
    QUIET = "Quiet"
    """The lease was last renewed long enough ago that what ended its ranks has been seen."""
    SETTLE = "Settle"
    """A script's rank ended with an error long enough ago that a lost peer or node would have been seen."""
    NOTICE = "Notice"
    """A node that leaves leaves the time to save, and no more."""
    SAVE = "Save"
    """The trainer has saved and its pods have ended."""
    EXIT = "Exit"
    """Pods that have to end have ended by themselves, or their node has confirmed their deletion."""
    KEPT = "Kept"
    """A finished job is kept for its readers."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One job, read once.

    Attributes:
        ended: it succeeded, or failed for good.
        launches: how often it was launched.
        gang: the launch that holds GPUs; None: none does.
        plan: the newest, of whichever launch; None: there is none.
        acknowledged: the epoch that rank 0 has acknowledged; 0: none.
        heard: the highest epoch that the trainer has spoken of; 0: none.
        finished: the last step is done and saved.
        steps_added: the launch has done all steps that it was told of, and the job has more by now.
        suspended: it should hold no GPUs: its owner, its budget or its deadline says so.
        fails: with ``suspended``: it is not resumed, and has failed once it holds nothing.
        offer: None: the allocator has not decided.
        survivors: pods that the gang can continue with, by rank, once those that leave or are lost are gone;
            empty: it cannot, or none is.
        copies: its ranks hold copies of each other's layers, so that those that are left train on in place
            after a pod is lost.
        gpus_free: the GPUs that the next launch or growth would take are free; of a launch whose pods have
            not been made: no other job has taken them.
        over: deadlines that have passed.
        tries_left: one more failure of the job's own is within its limit.
        script: it runs its template's own command: no rank need acknowledge a plan, its pods' ends say what
            became of it, and it never changes its size while it runs.
        listens: its ranks read the plan, so that they can be asked to save; False: a script that has not
            acknowledged the plan of this launch.
    """

    job: str
    ended: bool = False
    launches: int = 0
    gang: Gang | None = None
    plan: WrittenPlan | None = None
    pods: tuple[Pod, ...] = ()
    acknowledged: int = 0
    heard: int = 0
    proposal: ProposedShrink | None = None
    finished: bool = False
    steps_added: bool = False
    suspended: bool = False
    fails: bool = False
    offer: Offer | None = None
    survivors: tuple[str, ...] = ()
    copies: bool = False
    gpus_free: bool = True
    over: frozenset[Deadline] = frozenset()
    tries_left: bool = True
    script: bool = False
    listens: bool = True

    @property
    def gang_plan(self) -> WrittenPlan | None:
        """The plan, if it is one of the gang's launch."""
        same = self.plan is not None and self.gang is not None and self.plan.launch == self.gang.launch
        return self.plan if same else None

    @property
    def reached(self) -> bool:
        """Rank 0 has acknowledged the gang's plan; a script need not."""
        plan = self.gang_plan
        return plan is not None and (self.script or self.acknowledged >= plan.epoch)

    @property
    def done(self) -> bool:
        """The last step is done and saved; of a script: every rank has exited with success, by itself.

        A pod that is being deleted, or that was asked to save and stop, may exit with success before it is
        done.
        """
        gang, plan = self.gang, self.gang_plan
        if not self.script:
            return self.finished
        if gang is None or (plan is not None and plan.directive is Directive.CHECKPOINT_AND_STOP):
            return gang is not None and self.finished
        well = {pod.name for pod in self.gang_pods if pod.phase is Phase.SUCCEEDED and not pod.leaving}
        return well >= set(gang.pods)

    def may_start(self, pod: Pod) -> bool:
        """True if the first plan may name the pod; a short script may have ended by then."""
        return pod.ready or (self.script and pod.phase is Phase.SUCCEEDED and not pod.leaving)

    @property
    def gang_pods(self) -> tuple[Pod, ...]:
        """Pods of the gang that exist."""
        gang = self.gang
        if gang is None:
            return ()
        return tuple(pod for pod in self.pods if pod.launch == gang.launch and pod.name in gang.pods)

    @property
    def ranks(self) -> tuple[Pod, ...]:
        """Pods of the gang that its plan names."""
        plan = self.gang_plan
        return () if plan is None else tuple(pod for pod in self.gang_pods if pod.name in plan.pods)

    @property
    def released(self) -> tuple[Pod, ...]:
        """Pods of the gang that its plan leaves out."""
        plan = self.gang_plan
        return () if plan is None else tuple(pod for pod in self.gang_pods if pod.name not in plan.pods)

    @property
    def leaving(self) -> tuple[str, ...]:
        """Pods that the gang needs, on nodes that are about to go.

        Of a shrink that is not acknowledged, the pods to be released, too: they still hold their layers.
        """
        plan = self.gang_plan
        needed = set(self.gang.pods if self.gang is not None else ())
        if plan is not None and not (plan.directive is Directive.SHRINK and not self.reached):
            needed &= set(plan.pods)
        elif self.gang is not None:
            needed -= set(self.gang.joining)
        return tuple(pod.name for pod in self.gang_pods if pod.leaves and pod.alive and pod.name in needed)

    @property
    def abandoned(self) -> tuple[Pod, ...]:
        """Pods that hold a GPU, or a name, without a right to it."""
        gang = self.gang
        if gang is None:
            return tuple(pod for pod in self.pods if pod.alive)
        return tuple(
            pod
            for pod in self.pods
            if (pod.alive if pod.launch != gang.launch else pod.name not in gang.pods)
        )

    @property
    def settling(self) -> bool:
        """A rank may have ended because of another one, whose end has not been observed yet."""
        return Deadline.QUIET not in self.over and any(pod.alive and pod.node_ready for pod in self.gang_pods)

    @property
    def next_epoch(self) -> int:
        """Epoch of the next plan: above the last one's; where that is lost, above the trainer's newest.

        So an old acknowledgement is never taken for one of the next plan.
        """
        return self.plan.epoch + 1 if self.plan is not None else min(self.heard, MOST_EPOCH - 1) + 1


def held_pods(gang: Collection[str], *, alive: Collection[str], ended: Collection[str]) -> frozenset[str]:
    """Names of pods whose GPUs no other job may count on.

    A pod that was to be made may exist without being known: the answer to its creation was lost and the
    watch is late. So the GPUs of a launch are held from its writing to its release, made or not; of a launch
    that is ending, or whose job is being deleted, those of pods that have ended are free before, from when
    that is written.

    Args:
        gang: pods of the launch that the job holds.
        alive: pods of the job, of whichever launch, that are known to hold or to wait for a GPU.
        ended: pods that have ended, as far as it is written; of a launch that goes on, none.
    """
    return frozenset(alive) | {name for name in gang if name not in ended}
