"""Commands that start and stop a local cluster: ``up``, ``down``, ``demo``."""
