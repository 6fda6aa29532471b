"""Processes that end with their owner: the warden, its handle, and groups of processes."""
