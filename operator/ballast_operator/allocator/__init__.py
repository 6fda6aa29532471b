"""The allocator: one loop per ClusterPolicy, from a snapshot of the cluster to a wish for each job."""
