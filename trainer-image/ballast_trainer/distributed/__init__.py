"""The ranks of a job: mesh, process groups, agreement, heartbeats, and stopping."""
