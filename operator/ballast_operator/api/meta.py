"""Names of the API: group, version, kinds, plurals. Fixed for users; everything else refers to these."""

import re
from typing import Final

GROUP: Final = "ballast.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = "ballast.dev/v1alpha1"
CATEGORY = "ballast"
"""``kubectl get ballast`` lists both kinds."""

TRAINING_JOB_KIND: Final = "TrainingJob"
TRAINING_JOB_PLURAL = "trainingjobs"

CLUSTER_POLICY_KIND: Final = "ClusterPolicy"
CLUSTER_POLICY_PLURAL = "clusterpolicies"

LEADER_LEASE = "ballast-operator"
"""Name of the Lease that the leading operator holds; no job may have it, since a job's Lease has its name."""

MANAGER = "ballast.dev/operator"
"""The operator, in ``managedBy`` of a job."""

JOB_NAME_LIMIT = 48
"""A job's name is part of its pods' names (``<job>-<launch>-<rank>``), which are host names of at most 63."""

_JOB_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def is_job_name(name: str) -> bool:
    """True if a TrainingJob may have this name."""
    return len(name) <= JOB_NAME_LIMIT and _JOB_NAME.fullmatch(name) is not None
