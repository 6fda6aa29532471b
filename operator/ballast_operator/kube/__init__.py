"""The one door to the Kubernetes API: kinds and paths, a client with time limits, leadership."""
