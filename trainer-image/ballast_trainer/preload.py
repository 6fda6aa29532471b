"""Import of slow modules, in a thread while a pod waits for its plan."""

from torch import _dynamo  # by the first step of an optimizer

from ballast_trainer import launch

__all__ = ["_dynamo", "launch"]
