"""Import of slow modules, in a thread while a pod waits for its plan."""

from ballast_trainer import launch

__all__ = ["launch"]
