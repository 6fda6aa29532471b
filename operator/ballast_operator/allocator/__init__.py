"""The allocator: one loop per ClusterPolicy, from a snapshot of the cluster to an assignment for each job."""
