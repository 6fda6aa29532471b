"""What a pod is given: an address, GPUs, environment variables, volumes, credentials."""
