"""The contract between the cluster loop (operator) and the job loop (trainer).

Operator to trainer: a :class:`Plan`, the ``plan.json`` of the ConfigMap ``<job>-plan``.
Trainer to operator: the Lease ``<job>``, which rank 0 renews, with a :class:`Report`,
a :class:`Proposal` and an :class:`Ack` in its annotations.  Without Kubernetes the same four
values are files in a directory.

All of them are frozen pydantic models with one JSON form; ``tests/contract/golden`` holds
the bytes that both sides are tested against.
"""

from ballast_policies.contract.errors import ContractError
from ballast_policies.contract.messages import (
    Ack,
    Candidate,
    ExitCode,
    ExitReason,
    Proposal,
    Rank,
    Report,
    SlowRank,
    Stage,
    TerminationMessage,
    Tried,
)
from ballast_policies.contract.names import (
    ACK_ANNOTATION,
    CONFIG_KEY,
    EMULATED_SLOWDOWN_ENV,
    END_REASON_ANNOTATION,
    FINISHED_ANNOTATION,
    GPU_RESOURCE,
    HANDOVER_ENV,
    JOB_LABEL,
    LAUNCH_LABEL,
    PLAN_KEY,
    POD_IP_ENV,
    POD_RANKS_ENV,
    PROPOSAL_ANNOTATION,
    RANK_LABEL,
    RANK_RESTARTS,
    RANK_RESTARTS_ENV,
    RENDEZVOUS_PORT,
    RENEW_ENV,
    RENEW_SECONDS,
    REPORT_ANNOTATION,
    lease_name,
    plan_config_map_name,
    pod_name,
    process_name,
    rendezvous_config_map_name,
    rendezvous_key,
)
from ballast_policies.contract.plan import Directive, Plan

__all__ = [
    "ACK_ANNOTATION",
    "CONFIG_KEY",
    "EMULATED_SLOWDOWN_ENV",
    "END_REASON_ANNOTATION",
    "FINISHED_ANNOTATION",
    "GPU_RESOURCE",
    "HANDOVER_ENV",
    "JOB_LABEL",
    "LAUNCH_LABEL",
    "PLAN_KEY",
    "POD_IP_ENV",
    "POD_RANKS_ENV",
    "PROPOSAL_ANNOTATION",
    "RANK_LABEL",
    "RANK_RESTARTS",
    "RANK_RESTARTS_ENV",
    "RENDEZVOUS_PORT",
    "RENEW_ENV",
    "RENEW_SECONDS",
    "REPORT_ANNOTATION",
    "Ack",
    "Candidate",
    "ContractError",
    "Directive",
    "ExitCode",
    "ExitReason",
    "Plan",
    "Proposal",
    "Rank",
    "Report",
    "SlowRank",
    "Stage",
    "TerminationMessage",
    "Tried",
    "lease_name",
    "plan_config_map_name",
    "pod_name",
    "process_name",
    "rendezvous_config_map_name",
    "rendezvous_key",
]
