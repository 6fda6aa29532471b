"""What rank 0 prints: JSON lines for programs, progress for people."""
