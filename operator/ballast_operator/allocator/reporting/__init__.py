"""What is told of decisions: the statuses of ClusterPolicies."""
