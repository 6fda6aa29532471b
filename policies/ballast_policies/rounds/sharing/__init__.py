"""Two jobs on one GPU: which of them, and when."""

from ballast_policies.rounds.sharing.decide import decide_with_shared_gpus
from ballast_policies.rounds.sharing.values import SharedGpus, SharingJob, second_jobs

__all__ = ["SharedGpus", "SharingJob", "decide_with_shared_gpus", "second_jobs"]
