"""Names and keys that the operator and the trainer share.

Each constant says who writes it, who reads it and what a missing one means.
"""

PLAN_KEY = "plan.json"
"""Key in the ConfigMap ``<job>-plan``. Written by the operator, read by every rank. Missing: wait."""

CONFIG_KEY = "config.json"
"""Key in the same ConfigMap: the fields of ``TrainingJob.spec`` that the trainer acts on, defaults filled in
(totalSteps, model, pipeline, dynamics, rebalance, repack, checkpoint). Written by the operator at a launch,
read by every rank. Missing: wait."""

REPORT_ANNOTATION = "ballast.dev/report"
"""On the Lease ``<job>``: a Report. Written by rank 0, read by the operator. Missing: no step yet."""

PROPOSAL_ANNOTATION = "ballast.dev/proposal"
"""On the Lease: a Proposal. Written by rank 0, read by the operator. Missing: nothing proposed."""

ACK_ANNOTATION = "ballast.dev/ack"
"""On the Lease: an Ack. Written by rank 0, read by the operator. Missing: no epoch reached yet."""

FINISHED_ANNOTATION = "ballast.dev/finished-step"
"""On the Lease: the last step, a decimal. Written by rank 0 after the last checkpoint. Missing: training."""

END_REASON_ANNOTATION = "ballast.dev/end-reason"
"""On the Lease: why the job ended before its last step, as text. Written by rank 0 with the finished step,
read by the operator. Missing: it trains, or all steps are done."""

JOB_LABEL = "ballast.dev/job"
"""On pods, ConfigMaps, Leases: the TrainingJob's name. Written and read by the operator."""

LAUNCH_LABEL = "ballast.dev/launch"
"""On pods: which launch of the job they belong to, a decimal from 1. Written and read by the operator."""

RANK_LABEL = "ballast.dev/rank"
"""On pods: the number in the pod's name, a decimal from 0; with one GPU a pod, its rank at launch. Written
and read by the operator."""

POD_IP_ENV = "BALLAST_POD_IP"
"""In a pod's environment: its own address, as a plan's ranks have it. Written by the operator, read by the
trainer, which follows no plan that names another one. Missing: it follows any."""

POD_RANKS_ENV = "BALLAST_POD_RANKS"
"""In a pod's environment: how many ranks it runs, one for each of its GPUs. Written by the operator, read by
the trainer. Missing: one."""

RANK_RESTARTS_ENV = "BALLAST_RANK_RESTARTS"
"""In a pod's environment: how often each of its ranks is started again when it is killed, while the others of
the gang wait and go on with it from their memory. Written by the operator, read by the trainer. Missing:
never; the pod ends with its rank."""

RANK_RESTARTS = 3
"""Number of times that a killed rank is started again, by its pod or by ``ballast-train run --ranks``."""

RENEW_ENV = "BALLAST_RENEW_SECONDS"
"""In a pod's environment: how often rank 0 renews its Lease with the newest report while it has nothing else
to tell, in seconds. Written by the operator, read by rank 0. Missing: :data:`RENEW_SECONDS`."""

HANDOVER_ENV = "BALLAST_HANDOVER_SECONDS"
"""In a pod's environment: how long after SIGTERM its ranks train on and wait for a plan that releases them,
in seconds, before they ask all ranks to save and stop. Written by the operator, read by every rank. Missing:
not at all, since no such plan will come."""

RENEW_SECONDS = 20.0
"""A third of the time after which a Lease that is not renewed counts as a hung job."""

EMULATED_SLOWDOWN_ENV = "BALLAST_EMULATED_SLOWDOWN"
"""In a pod's environment: JSON {model family or "default": factor >= 1}. Written by the process node,
read by the trainer, which pads its layers' compute time by the factor. Missing: nothing is emulated."""

GPU_RESOURCE = "nvidia.com/gpu"
"""The extended resource that nodes offer and pods ask for, where a node pool names no other."""

RENDEZVOUS_PORT = 29400
"""TCP port on rank 0's pod address where ranks meet."""


def plan_config_map_name(job: str) -> str:
    """Name of the ConfigMap that holds the job's plan."""
    return f"{job}-plan"


def rendezvous_config_map_name(job: str) -> str:
    """Name of the ConfigMap with the address of rank 0, under :func:`rendezvous_key`; of scripts only."""
    return f"{job}-rendezvous"


def rendezvous_key(launch: int) -> str:
    """Key of the address of rank 0 in a launch; missing: the kubelet waits with the other ranks' start."""
    return f"launch-{launch}"


def lease_name(job: str) -> str:
    """Name of the Lease that rank 0 renews."""
    return job


def pod_name(job: str, launch: int, number: int) -> str:
    """Name of pod ``number`` of the job's ``launch``, from 0; the same inputs give the same name."""
    return f"{job}-{launch}-{number}"


def process_name(pod: str, local_rank: int) -> str:
    """Name of one of a pod's processes: that of the pod for the first, ``pod/1``, ``pod/2`` and so on."""
    return f"{pod}/{local_rank}" if local_rank else pod
