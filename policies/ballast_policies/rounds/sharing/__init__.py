"""Two jobs on one GPU."""
