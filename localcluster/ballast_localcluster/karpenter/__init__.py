"""Real Karpenter on a local cluster: its kwok provider makes Node objects, which process nodes serve."""
