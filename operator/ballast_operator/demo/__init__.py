"""The demo: three jobs on a mixed cluster, told from what the API server says and from nothing else."""
