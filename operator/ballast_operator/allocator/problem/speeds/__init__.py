"""What speeds depend on besides the GPU type: the kind of training, and the nodes that a gang is on."""
