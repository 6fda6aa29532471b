"""Views of the cluster for a pass: immutable values read once from the caches."""
