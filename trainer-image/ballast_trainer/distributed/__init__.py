"""The ranks of a job: mesh, process groups, agreement, heartbeats, and the order to stop."""
