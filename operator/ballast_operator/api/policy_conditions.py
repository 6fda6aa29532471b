"""Condition types and reasons of a ClusterPolicy, one sentence each."""

import enum

NO_POLICY = "there is no ClusterPolicy. To fix: create one"
"""Why no job gets GPUs before the first is there."""


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
    """No node of the pools is closed or avoided by ``spec.nodeHealth``. Absent: none is."""
    WITHIN_SPOT_LIMITS = "WithinSpotLimits"
    """``spec.spot`` keeps no job off spot machines, and what runs is within it. Absent: no limit is set."""
    TWIN_AGREES = "TwinAgrees"
    """A replay of the last day in the simulator ends as the day did, within a tenth; Unknown: no job ended.
    Absent: no history is kept, or nothing was replayed yet."""
    READY = "Ready"
    """The policy is in force: rounds are decided by it."""


class PolicyReason(enum.StrEnum):
    """Reasons of the conditions of a ClusterPolicy."""

    # Valid
    VALID = "Valid"
    """Valid: pools match nodes, and no node matches two."""
    MISCONFIGURED = "Misconfigured"
    """Not valid: the spec cannot be used; the message names the field."""
    OVERLAPPING_POOLS = "OverlappingPools"
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
    FALLBACK_AFTER_TIMEOUT = "FallbackAfterTimeout"
    """Not solved: the solver took too long and was ended; the greedy fallback decided."""
    FALLBACK_AFTER_SOLVER_ERROR = "FallbackAfterSolverError"
    """Not solved: the solver failed or died; the greedy fallback decided."""
    NO_CAPACITY = "NoCapacity"
    """Not solved: no pool has a GPU."""

    # SolverHealthy
    SOLVER_ANSWERS = "SolverAnswers"
    """Healthy: the last question was answered in time."""
    SOLVER_TIMED_OUT = "SolverTimedOut"
    """Not healthy: no answer within the time limit; the process was ended, the greedy fallback decided."""
    SOLVER_DIED = "SolverDied"
    """Not healthy: the process ended over the last question; the greedy fallback decided."""

    # InputsComplete
    COMPLETE = "Complete"
    """InputsComplete: no default is used."""
    DEFAULTS_USED = "DefaultsUsed"
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
    SICK_NODES = "SickNodes"
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
    DECISIONS_FAIL = "DecisionsFail"
    """Not ready: the last decisions failed; the message has the error. Jobs that run continue."""
    ANOTHER_POLICY_IN_FORCE = "AnotherPolicyInForce"
    """Not ready: an older ClusterPolicy is in force; there is one at a time."""
