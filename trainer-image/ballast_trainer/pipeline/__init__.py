"""The pipeline of a rank: its stages, their schedule, and the executor."""
