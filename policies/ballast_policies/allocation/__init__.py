"""Which job on which GPUs."""
