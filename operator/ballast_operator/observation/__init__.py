"""Views of the cluster, read from the caches, and Events that people are told of it."""
