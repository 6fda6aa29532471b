"""Import of slow modules, in a thread while a pod waits for its plan."""

import gc
import os

import torch
from torch import _dynamo  # by the first step of an optimizer

from ballast_trainer import launch

__all__ = ["_dynamo", "launch"]

# A fork makes torch's pool of threads anew at its first use, and two threads at once find it half made:
# "Invalid thread pool!" (ATen/ParallelOpenMP.cpp). So it is used before there are threads.
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))
# A search for garbage, or for tensors, in a fork would touch, and so copy, all that is imported.
gc.freeze()
