"""The types of training data: a batch of tensors, and a function that makes the batch of a step."""

from collections.abc import Callable

import torch

Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets; the first dimension of both is the number of samples."""

BatchFunction = Callable[[int, int, int], Batch]
"""``batch(seed, step, size)``: inputs and targets of a step; a pure function, the same on every rank."""
