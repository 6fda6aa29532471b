"""The trainer: runs a job's pipeline on GPUs and carries out its plans."""
