"""The pipeline: which rank holds which stage, and the executor of its schedule."""
