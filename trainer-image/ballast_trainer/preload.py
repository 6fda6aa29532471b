"""Import of slow modules, in a thread while a pod waits for its plan."""

from ballast_trainer import launch
from ballast_trainer.pipeline import torch_pipeline

torch_pipeline.preload()

__all__ = ["launch"]
