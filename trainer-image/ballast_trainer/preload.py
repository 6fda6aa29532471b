"""Imports what training needs and takes seconds to import; done in a thread while the plan is awaited."""

from ballast_trainer import launch
from ballast_trainer.pipeline import stages

stages.preload()

__all__ = ["launch"]
