"""Process nodes: Kubernetes nodes whose pods are processes of this machine."""
