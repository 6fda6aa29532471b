"""The client library of Ballast, for training scripts of your own: no dependencies, no torch."""

from ballast_client.checkpoints import Checkpoints
from ballast_client.job import Job

__all__ = ["Checkpoints", "Job"]
