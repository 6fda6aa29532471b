"""From the state of the cluster to the problem that a policy solves."""
