"""What rank 0 says: JSON lines for programs, progress for people, writers for dashboards."""
