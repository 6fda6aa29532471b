"""The Kubernetes API: pydantic models of TrainingJob and ClusterPolicy, their conditions and reasons."""
