"""Imports the modules that take seconds to import; done in a thread while waiting for the plan."""

from ballast_trainer import launch
from ballast_trainer.pipeline import torch_pipeline

torch_pipeline.preload()

__all__ = ["launch"]
