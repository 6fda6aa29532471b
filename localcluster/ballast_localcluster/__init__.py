"""A real Kubernetes control plane on one machine, with process nodes."""
