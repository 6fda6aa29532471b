"""What a job has cost and done twice, and its budget and deadline."""
