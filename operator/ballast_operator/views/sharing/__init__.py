"""GPUs that two jobs may share: the nodes of a pool, and who is on the GPU as well."""
