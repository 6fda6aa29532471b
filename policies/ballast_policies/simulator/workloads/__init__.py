"""What a simulation runs: jobs from a trace or generated, and the load that they put on a cluster."""
