"""Names of the API: group, version, kinds, plurals. Fixed for users; everything else refers to these."""

GROUP = "ballast.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
CATEGORY = "ballast"
"""``kubectl get ballast`` lists both kinds."""

TRAINING_JOB_KIND = "TrainingJob"
TRAINING_JOB_PLURAL = "trainingjobs"
TRAINING_JOB_SINGULAR = "trainingjob"
TRAINING_JOB_SHORT_NAME = "tj"

CLUSTER_POLICY_KIND = "ClusterPolicy"
CLUSTER_POLICY_PLURAL = "clusterpolicies"
CLUSTER_POLICY_SINGULAR = "clusterpolicy"
CLUSTER_POLICY_SHORT_NAME = "bcp"

JOB_NAME_LIMIT = 48
"""A job's name is part of its pods' names (``<job>-<launch>-<rank>``), which are host names of at most 63."""
