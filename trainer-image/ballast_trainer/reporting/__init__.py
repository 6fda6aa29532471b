"""Output of rank 0: JSON lines for programs, progress for people, writers for dashboards."""
