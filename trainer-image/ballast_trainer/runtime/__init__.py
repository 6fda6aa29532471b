"""The pipeline runtime: stages, profile, migration, process groups, checkpoints and the training loop."""
