"""Objects of a large cluster: nodes, jobs and policies, for the benchmarks of the operator's scale."""
