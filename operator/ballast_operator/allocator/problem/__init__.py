"""Problem that a policy solves, from the state of the cluster."""
