"""Planning of a pipeline: which layers on which stage, which stage on which rank. Needs numpy only."""
