"""Condition types and reasons of a TrainingJob and of a ClusterPolicy, one sentence each.

A reason is never renamed; a finer one extends it as a prefix.
A wait, a refusal and a user's error have different reasons, so that it is clear which of them needs a change.
"""

import enum
from collections.abc import Sequence
from typing import Self

from ballast_policies.scheduling.refusals import Obstacle

NO_POLICY = "there is no ClusterPolicy. To fix: create one"
"""Reason that no job gets GPUs before the first exists."""


class PolicyCondition(enum.StrEnum):
    """Types of ``ClusterPolicy.status.conditions``."""

    VALID = "Valid"
    """The policy can be used."""
    SOLVED = "Solved"
    """The last allocation came from the solver of the chosen policy."""
    SOLVER_HEALTHY = "SolverHealthy"
    """The solver's process answers in time."""
    INPUTS_COMPLETE = "InputsComplete"
    """All that the policy reads is stated; False: the message names the defaults in use."""
    PRICES_CURRENT = "PricesCurrent"
    """The prices of all price feeds are readable and recent; False: the last good ones count."""
    CAPACITY_TYPES_AGREE = "CapacityTypesAgree"
    """The labels of the pools' nodes say what counts for their pool. Absent: they do."""
    NODES_HEALTHY = "NodesHealthy"
    """No node of the pools is closed or avoided by ``spec.nodeHealth``, or has lost GPUs. Absent: none is."""
    WITHIN_SPOT_LIMITS = "WithinSpotLimits"
    """``spec.spot`` keeps no job off spot machines, and what runs is within it. Absent: no limit is set."""
    TWIN_AGREES = "TwinAgrees"
    """A replay of the last day in the simulator ends as the day did, within a tenth; Unknown: no job ended.
    Absent: no history is kept, or nothing was replayed yet."""
    READY = "Ready"
    """The policy is in force: rounds are decided by it."""


class Told(enum.Enum):
    """Kind of the Event that reports a condition's reason."""

    NORMALLY = enum.auto()
    WARNING = enum.auto()
    """It asks for a person's attention."""
    NOT_AT_FIRST = enum.auto()
    """A job's life may begin with it: the condition says it, thousands of Events would not help."""
    NEVER = enum.auto()
    """It lasts for a moment, or points to another condition."""


class Reason(enum.StrEnum):
    """A reason of conditions, in a stable word, and how Events tell of it."""

    told: Told

    def __new__(cls, word: str, told: Told = Told.NORMALLY) -> Self:
        """The word itself, as the API has it."""
        reason = str.__new__(cls, word)
        reason._value_, reason.told = str(word), told
        return reason


class PolicyReason(Reason):
    """Reasons of the conditions of a ClusterPolicy."""

    # Valid
    VALID = "Valid"
    """Valid: pools match nodes, and no node matches two."""
    MISCONFIGURED = "Misconfigured", Told.WARNING
    """Not valid: the spec cannot be used; the message names the field."""
    OVERLAPPING_POOLS = "OverlappingPools", Told.WARNING
    """Valid, with a warning: no gang is started on nodes that match two pools; the message names both."""
    NO_SUCH_NODES = "NoSuchNodes"
    """Valid, with a warning: the named pools match no node at present."""
    NO_GPUS = "NoGpus"
    """Valid, with a warning: nodes of the named pools do not offer the pool's GPU resource."""

    # Solved
    OPTIMAL = "Optimal"
    """Solved by the chosen policy; the message says how: optimal, in closed form, or by its heuristic."""
    NOTHING_TO_ALLOCATE = "NothingToAllocate"
    """Solved: no job wants GPUs."""
    FALLBACK_AFTER_TIMEOUT = "FallbackAfterTimeout", Told.WARNING
    """Not solved: the solver took too long and was ended; the greedy fallback decided."""
    FALLBACK_AFTER_SOLVER_ERROR = "FallbackAfterSolverError", Told.WARNING
    """Not solved: the solver failed or died; the greedy fallback decided."""
    NO_CAPACITY = "NoCapacity"
    """Not solved: no GPU for any job."""

    # SolverHealthy
    SOLVER_ANSWERS = "SolverAnswers"
    """Healthy: the last question was answered in time."""
    SOLVER_TIMED_OUT = "SolverTimedOut", Told.WARNING
    """Not healthy: no answer within the time limit; the process was ended, the greedy fallback decided."""
    SOLVER_DIED = "SolverDied", Told.WARNING
    """Not healthy: the process ended over the last question; the greedy fallback decided."""

    # InputsComplete
    COMPLETE = "Complete"
    """InputsComplete: no default is used."""
    DEFAULTS_USED = "DefaultsUsed", Told.WARNING
    """InputsComplete is False: the message names pools and jobs, the fields, and what counts instead."""

    # PricesCurrent
    PRICES_READ = "PricesRead"
    """PricesCurrent: every price feed has a price that is recent enough."""
    PRICE_MISSING = "PriceMissing"
    """PricesCurrent is False: no such ConfigMap or key, or no answer yet; the last good price counts."""
    PRICE_UNAVAILABLE = "PriceUnavailable"
    """PricesCurrent is False: a cloud does not answer, or refuses; the last good price counts."""
    PRICE_UNREADABLE = "PriceUnreadable"
    """PricesCurrent is False: the value is no price; the last good price counts."""
    PRICE_IMPLAUSIBLE = "PriceImplausible"
    """PricesCurrent is False: the price is far from the on-demand price; the last good price counts."""
    PRICE_STALE = "PriceStale"
    """PricesCurrent is False: the price is older than ``staleAfterSeconds``, and still counts."""

    # CapacityTypesAgree
    TYPES_DIFFER = "TypesDiffer"
    """CapacityTypesAgree is False: the message names pools, nodes and labels; the pool's type counts."""

    # NodesHealthy
    SICK_NODES = "SickNodes", Told.WARNING
    """NodesHealthy is False: the message names nodes, why, and until when."""

    # WithinSpotLimits
    SPOT_AS_ALLOWED = "SpotAsAllowed"
    """WithinSpotLimits: the message says what is in use."""
    SPOT_LIMIT_REACHED = "SpotLimitReached"
    """WithinSpotLimits is False: the message names jobs that are kept off, and the limits."""
    SPOT_LIMIT_EXCEEDED = "SpotLimitExceeded"
    """WithinSpotLimits is False: more is in use than may be started; nothing that runs is stopped for it."""

    # TwinAgrees
    REPLAY_AGREES = "ReplayAgrees"
    """TwinAgrees: the message has the errors."""
    REPLAY_DIFFERS = "ReplayDiffers"
    """TwinAgrees is False: a sum is off by more than a tenth, or jobs do not end in the replay."""
    NOTHING_TO_REPLAY = "NothingToReplay"
    """TwinAgrees is Unknown: no job has ended that could be replayed."""

    # Ready
    IN_FORCE = "InForce"
    """Ready: rounds are decided by this policy."""
    DRY_RUN = "DryRun"
    """Not ready: ``spec.dryRun`` is set; status says what the policy would do."""
    NOT_VALID = "NotValid"
    """Not ready: see Valid."""
    DECISIONS_FAIL = "DecisionsFail", Told.WARNING
    """Not ready: the last decisions failed; the message has the error. Jobs that run continue."""
    ANOTHER_POLICY_IN_FORCE = "AnotherPolicyInForce"
    """Not ready: an older ClusterPolicy is in force; there is one at a time."""


class JobState(enum.StrEnum):
    """``TrainingJob.status.state``: one word for ``kubectl get tj``, derived from the conditions."""

    WAITING = "Waiting"
    """Admitted is False: no GPUs are assigned; the condition says why."""
    STARTING = "Starting"
    """GPUs are assigned and pods are on their way; not every rank trains yet."""
    RUNNING = "Running"
    """Every rank of the plan trains."""
    REPACKING = "Repacking"
    """It trains, and is about to hand pods back."""
    STOPPING = "Stopping"
    """It saves a checkpoint, or its pods are on their way out."""
    SUSPENDED = "Suspended"
    """``spec.suspend`` is set, or a budget or deadline suspends it, and it holds nothing."""
    SUCCEEDED = "Succeeded"
    """All steps are done."""
    FAILED = "Failed"
    """It failed for good."""


STATES = ("New", *(state.value for state in JobState))
"""States of a TrainingJob as they are shown; New: no operator has looked at it yet."""


class JobCondition(enum.StrEnum):
    """Types of ``TrainingJob.status.conditions``."""

    ADMITTED = "Admitted"
    """The allocator has assigned GPUs to the job."""
    RUNNING = "Running"
    """Every rank of the plan trains."""
    REBALANCED = "Rebalanced"
    """Layers have moved between ranks while training."""
    REPACKED = "Repacked"
    """The job has handed pods back while training."""
    GROWN = "Grown"
    """The job has taken more GPUs while training."""
    SHRUNK = "Shrunk"
    """The job has given GPUs back while training, for other jobs, or because their nodes go. Absent: it
    was never asked."""
    PREEMPTED = "Preempted"
    """The job was stopped with a checkpoint, so that its GPUs serve another purpose."""
    NODES_STAY = "NodesStay"
    """No node of the gang has announced that it goes. Absent: none ever did."""
    INPUTS_COMPLETE = "InputsComplete"
    """The job states all that the policy reads; False: defaults are used. Absent: none was ever used."""
    ON_TIME = "OnTime"
    """The policy keeps ``spec.deadline``. Absent: there is none, or the policy does not read deadlines."""
    DEADLINE_AT_RISK = "DeadlineAtRisk"
    """``spec.deadline`` has passed, or is not met as things are; False: it can be. Absent: there is none."""
    CONSOLIDATED = "Consolidated"
    """False: the gang is on more nodes than would hold it. Absent: it is not, or holds no GPUs."""
    BUDGET_EXHAUSTED = "BudgetExhausted"
    """``spec.budget``, or the team's, is spent; False: it is not, and the message says whether it will be
    enough. Absent: there is none."""
    MESSAGES_READABLE = "MessagesReadable"
    """The trainer's messages can be used. Absent: none was ever refused."""
    REPORTING = "Reporting"
    """A job without a model uses the client library; False: progress, loss and speed are not known.
    Absent: it has a model, or has not run yet."""
    DECIDED = "Decided"
    """False: an error keeps the job out of the allocator's decisions; its gang keeps the GPUs that it has.
    Absent: it takes part."""
    RECONCILED = "Reconciled"
    """The operator can act on the job. Absent: it always could."""
    SUCCEEDED = "Succeeded"
    """All steps are done. Excludes Failed."""
    FAILED = "Failed"
    """It failed for good. Excludes Succeeded."""


class JobReason(Reason):
    """Reasons of the conditions of a TrainingJob."""

    # Admitted=True
    ASSIGNED = "Assigned"
    """Admitted: GPUs are assigned; the message names pool, type and number."""

    # Admitted=False: waits
    PENDING = "Pending", Told.NEVER
    """Not admitted: the allocator has not looked at the job yet."""
    WAITING_FOR_POLICY = "WaitingForPolicy", Told.NOT_AT_FIRST
    """Not admitted: there is no usable ClusterPolicy."""
    WAITING_FOR_CAPACITY = Obstacle.CAPACITY, Told.NOT_AT_FIRST
    """Not admitted: it fits, but other jobs hold the GPUs this round."""
    WAITING_FOR_RELEASED_PODS = "WaitingForReleasedPods"
    """Not admitted: pods of another job that hold its GPUs are not gone yet."""
    NOT_ALLOWED = "NotAllowed", Told.WARNING
    """Not admitted or not running: a quota, Pod Security, a webhook or a missing PriorityClass forbids
    the pods now; the message quotes the API server. Retried."""
    WAITING_FOR_VOLUMES = "WaitingForVolumes"
    """Not admitted: a volume claim of its pods is missing, not bound, or lost. Retried."""
    NAME_TAKEN = "NameTaken", Told.WARNING
    """Not admitted or not running: an object of somebody else has a name that the job needs. Retried."""
    BACKING_OFF = "BackingOff"
    """Not admitted: it failed and is launched again after a pause that doubles each time."""
    DRY_RUN = Obstacle.DRY_RUN
    """Not admitted: the ClusterPolicy only says what it would do."""
    SUSPENDED = "Suspended", Told.NOT_AT_FIRST
    """Not admitted or not running: ``spec.suspend`` is set."""
    QUEUED = "Queued"
    """Not admitted or not running: Kueue has not admitted the job's Workload, or has evicted it."""

    # Admitted=False: refusals
    EXCEEDS_CAPACITY = Obstacle.EXCEEDS_CAPACITY, Told.WARNING
    """Not admitted: even an empty cluster has too few GPUs of one pool for ``pipeline.minStages``."""
    NO_MATCHING_GPU_TYPE = Obstacle.NO_MATCHING_GPU_TYPE, Told.WARNING
    """Not admitted: no node pool has a GPU type that ``gpuTypes`` allows."""
    NO_MATCHING_CAPACITY_TYPE = "NoMatchingCapacityType"
    """Not admitted: ``spec.spot`` rules out all pools with its GPU types."""
    NO_DATA_PRICE = "NoDataPrice"
    """Not admitted: no pool that it may use has a price for reading ``spec.dataLocation`` there."""
    EXCEEDS_MEMORY = Obstacle.EXCEEDS_MEMORY, Told.WARNING
    """Not admitted: the job does not fit the memory of the GPUs; the message says what needs how much."""

    SPOT_LIMIT = Obstacle.SPOT_LIMIT
    """Not admitted: ``spec.spot`` of the ClusterPolicy keeps it off spot machines, and no others are free."""
    NAMESPACE_LIMIT = Obstacle.TENANT_LIMIT
    """Not admitted: a limit of the ClusterPolicy's ``tenants`` is reached; the message says which."""
    TEAM_LIMIT = Obstacle.TEAM_LIMIT
    """Not admitted: ``maxGpusByType`` of its team is reached."""

    # Admitted=False: user errors
    MISCONFIGURED = Obstacle.MISCONFIGURED, Told.WARNING
    """Not admitted or failed: the spec cannot be used; the message names the field; a gang stops."""

    # Reporting
    CLIENT_CONNECTED = "ClientConnected"
    """Reporting: the command of a job without a model has acknowledged the plan."""
    NO_CLIENT = "NoClient"
    """Not reporting: the command of a job without a model has not; the message says what is lost."""

    # Running
    ALL_RANKS_TRAIN = "AllRanksTrain"
    """Running: rank 0 has acknowledged the plan for all ranks."""
    NOT_ADMITTED = "NotAdmitted", Told.NEVER
    """Not running: see Admitted."""
    PODS_STARTING = "PodsStarting"
    """Not running: pods are made, bound, or pull their image."""
    RANKS_MEETING = "RanksMeeting"
    """Not running: all pods have an address and the plan; ranks connect and load the checkpoint."""
    STOPPING = "Stopping"
    """Not running: the trainer saves and stops, or the pods are being deleted."""
    NOT_BOUND = "NotBound", Told.WARNING
    """Not running: not every pod of the gang ran in time, so all were taken back."""
    FINISHED = "Finished"
    """Not admitted and not running: the job has ended."""

    # Running=False after a launch ended early; also the keys of status.restarts
    USER_ERROR = "UserError", Told.WARNING
    """Restarts: the user's model, data, configuration or memory failed; counts toward ``backoffLimit``."""
    HUNG = "Hung", Told.WARNING
    """Restarts: pods ran, but nothing was heard from them in time; counts toward ``backoffLimit``."""
    POD_LOST = "PodLost", Told.WARNING
    """Restarts: a pod was killed, evicted or deleted by someone else."""
    NODE_LOST = "NodeLost", Told.WARNING
    """Restarts: a node went away under a pod."""
    NODE_LEAVING = "NodeLeaving"
    """NodesStay is False: nodes go; the message says which, when, and by what. Restarts: the gang could
    not continue without such a node, and saved first."""
    PEER_LOST = "PeerLost", Told.WARNING
    """Restarts: ranks lost touch with each other."""
    STEPS_ADDED = "StepsAdded"
    """Restarts: ``totalSteps`` was raised while it trained; it continues from the former last step."""
    SHRINK_TIMEOUT = "ShrinkTimeout", Told.WARNING
    """Restarts: a shrink was not acknowledged in time."""

    GROW_TIMEOUT = "GrowTimeout", Told.WARNING
    """Restarts: new ranks did not join in time."""

    # Rebalanced
    LAYERS_MOVED = "LayersMoved"
    """Rebalanced: the trainer moved layers; the message has the imbalance before and after."""

    # Repacked
    REPACKING = "Repacking"
    """Not repacked yet: a shrink is under way; the message names the pods that will go."""
    PODS_RELEASED = "PodsReleased"
    """Repacked: the named pods are gone and their GPUs are free."""
    PROPOSAL_REFUSED = "ProposalRefused", Told.WARNING
    """Not repacked: the trainer's proposal breaks the spec's limits; the message says which."""

    # Grown
    GROWING = "Growing"
    """Not grown yet: the message names the pods that are to join."""
    RANKS_JOINED = "RanksJoined"
    """Grown: the named pods are ranks of the gang."""
    GROWTH_GIVEN_UP = "GrowthGivenUp", Told.WARNING
    """Not grown: new pods failed or did not run in time; the gang continues without them."""

    # Shrunk
    SHRINKING = "Shrinking"
    """Not shrunk yet: it has been asked to; the message names the pods that will go, and why."""
    GPUS_GIVEN_BACK = "GpusGivenBack"
    """Shrunk: the named pods are gone and their GPUs are free."""

    # Preempted
    PREEMPTED = "Preempted"
    """Preempted: this round gives the GPUs to another job, or this job to other GPUs."""
    RESUMED = "Resumed"
    """No longer preempted: it resumes from its checkpoint."""

    # NodesStay
    NODES_LEFT = "NodesLeft"
    """NodesStay again: the gang no longer needs a node that goes, or the notice was taken back."""

    # InputsComplete
    COMPLETE = "Complete"
    """InputsComplete: no default is used."""
    DEFAULTS_USED = "DefaultsUsed", Told.WARNING
    """InputsComplete is False: the message names the fields that are missing, and what counts instead."""

    # OnTime
    DEADLINE_WITHIN_REACH = "DeadlineWithinReach", Told.NOT_AT_FIRST
    """The job can meet its deadline, on time or not at risk."""
    DEADLINE_PASSED = "DeadlinePassed", Told.WARNING
    """Not on time, or at risk: the deadline has passed."""
    DEADLINE_OUT_OF_REACH = "DeadlineOutOfReach", Told.WARNING
    """Not on time, or at risk: alone on its fastest GPUs it would be late."""
    DEADLINE_CONTENDED = "DeadlineContended", Told.WARNING
    """Not on time, or at risk: earlier deadlines need the GPUs."""

    DEADLINE_SPEED_TOO_LOW = "DeadlineSpeedTooLow", Told.WARNING
    """Deadline at risk: at its present speed the job would be late; faster GPUs could keep it."""
    DEADLINE_MET = "DeadlineMet"
    """Deadline not at risk: the job succeeded before it."""
    DEADLINE_MISSED = "DeadlineMissed", Told.WARNING
    """Not admitted or failed: the deadline has passed, and ``onDeadlineMissed`` ends the job."""
    ACTIVE_DEADLINE_EXCEEDED = "DeadlineExceeded", Told.WARNING
    """Not admitted or failed: the job has held GPUs for ``activeDeadlineSeconds``."""
    SPEED_UNKNOWN = "SpeedUnknown", Told.NOT_AT_FIRST
    """Deadline or budget: no speed of the job is stated or measured yet."""

    # Consolidated
    ON_MORE_NODES = "OnMoreNodes"
    """Not consolidated: the message has the nodes, and both speeds where known."""

    # BudgetExhausted
    BUDGET_SPENT = "BudgetSpent", Told.WARNING
    """Budget exhausted, not admitted, or failed: the job has cost what ``spec.budget`` allows."""
    TEAM_BUDGET_SPENT = "TeamBudgetSpent", Told.WARNING
    """Budget exhausted or not admitted: the team's jobs have cost what the ClusterPolicy allows."""
    BUDGET_SUFFICIENT = "BudgetSufficient", Told.NOT_AT_FIRST
    """Budget not exhausted: it is enough on the cheapest GPUs."""
    BUDGET_TOO_SMALL = "BudgetTooSmall", Told.WARNING
    """Budget not exhausted yet: even the cheapest GPUs would cost more than is left."""
    PRICE_UNKNOWN = "PriceUnknown", Told.NOT_AT_FIRST
    """Budget not exhausted: no pool that the job may use has a price."""

    # MessagesReadable
    ALL_MESSAGES_READ = "AllMessagesRead"
    """MessagesReadable again: the trainer's newest messages are in force."""
    MESSAGE_REFUSED = "MessageRefused", Told.WARNING
    """Not readable: a trainer's message is malformed or out of range; the last good one counts."""

    # Reconciled
    PASS_COMPLETED = "PassCompleted"
    """Reconciled again: the error is gone."""
    INTERNAL_ERROR = "InternalError", Told.WARNING
    """Not reconciled, decided or admitted: an error of the operator, in the message; it tries again."""
    ACTION_REFUSED = "ActionRefused"
    """Not reconciled: the API server refuses an action, such as the deletion of a pod, for the reason in the
    message; it is tried again after growing pauses."""
    STATUS_REFUSED = "StatusRefused", Told.WARNING
    """Not reconciled: the API server refuses what the operator writes of the job; the job continues, and
    texts of its status are shortened."""
    CHANGED_BY_OTHERS = "ChangedByOthers", Told.WARNING
    """Not reconciled: another controller changes what the operator writes of the job, again and again."""

    # Succeeded, Failed
    ALL_STEPS_DONE = "AllStepsDone"
    """Succeeded: the last step is saved."""
    ENDED_BY_CALLBACK = "EndedByCallback"
    """Succeeded: the job's callback ended the training early, for the reason in the message."""
    BACKOFF_LIMIT_EXCEEDED = "BackoffLimitExceeded", Told.WARNING
    """Failed: it failed more often than ``backoffLimit`` allows; lost pods and nodes do not count."""
    FAILURE_POLICY = "FailurePolicy", Told.WARNING
    """Failed: by ``failurePolicy.failOn``."""


SUSPENSIONS = frozenset(
    {
        JobReason.SUSPENDED,
        JobReason.BUDGET_SPENT,
        JobReason.TEAM_BUDGET_SPENT,
        JobReason.DEADLINE_MISSED,
        JobReason.ACTIVE_DEADLINE_EXCEEDED,
    }
)
"""Reasons of Admitted with which a job waits for its owner, and not for GPUs."""

TOLD = {str(reason): reason.told for kind in (PolicyReason, JobReason) for reason in kind}
"""Reason of a TrainingJob's or a ClusterPolicy's condition -> how Events tell of it."""


MOST_NAMES = 5


def some_of(names: Sequence[str], most: int = MOST_NAMES, *, between: str = ", ", kind: str = "") -> str:
    """The first ``most`` names, and how many more there are, of which ``kind``."""
    left = len(names) - most
    more = f"{' ' if between == ', ' else between}and {left} more{kind}" if left > 0 else ""
    return between.join(names[:most]) + more
