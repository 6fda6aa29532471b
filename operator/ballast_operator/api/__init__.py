"""The Kubernetes API: pydantic models of TrainingJob and ClusterPolicy, their conditions and reasons."""

from ballast_operator.api.cluster_policy import ClusterPolicy
from ballast_operator.api.conditions import JobCondition, JobReason, JobState
from ballast_operator.api.policy_conditions import PolicyCondition, PolicyReason
from ballast_operator.api.read import InvalidObject, read_cluster_policy, read_training_job
from ballast_operator.api.training_job import TrainingJob

__all__ = [
    "ClusterPolicy",
    "InvalidObject",
    "JobCondition",
    "JobReason",
    "JobState",
    "PolicyCondition",
    "PolicyReason",
    "TrainingJob",
    "read_cluster_policy",
    "read_training_job",
]
