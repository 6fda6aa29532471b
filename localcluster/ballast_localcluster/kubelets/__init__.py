"""Real nodes: kubelet and containerd in namespaces of this machine, with a pod network and without GPUs."""
