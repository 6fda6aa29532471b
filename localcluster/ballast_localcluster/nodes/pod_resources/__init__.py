"""Resources of a pod: an address, GPUs, environment variables, volumes, credentials."""
