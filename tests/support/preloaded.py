# ruff: noqa: F401 - imported for the forks
"""What forks of trainers find done: imports, and the schemas of what they read and write."""

import contextlib
import gc
import multiprocessing.queues

import hypothesis
import numpy.ma
import pytest
import torch.distributed.checkpoint
import torch.profiler
import torch.utils.flop_counter
from ballast_policies.contract.model import Model
from ballast_trainer import preload
from ballast_trainer.channel import base
from ballast_trainer.cli import main, run

with contextlib.suppress(ImportError):  # an extra
    from transformers import AutoModelForCausalLM
    from transformers.models.llama import modeling_llama


def build(kind: type[Model]) -> None:
    """The schemas of all messages and parts of a configuration: each is otherwise built at its first use."""
    for each in kind.__subclasses__():
        each.model_rebuild()
        build(each)


build(Model)

# What is found done is no garbage: a search in a fork would touch, and so copy, all of it.
gc.freeze()
