"""The training loop of a rank: steps, reports, new plans, migration, checkpoints."""
