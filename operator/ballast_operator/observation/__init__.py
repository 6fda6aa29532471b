"""What the cluster holds, read from the caches, and what people are told of it: views and Events."""
