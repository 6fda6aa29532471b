# ruff: noqa: F401 - imported for the forks
"""What forks of trainers find done: imports, and the schemas that the first configuration builds."""

import contextlib
import gc
import multiprocessing.queues

import hypothesis
import numpy.ma
import pytest
import torch.distributed.checkpoint
import torch.profiler
import torch.utils.flop_counter
from ballast_trainer import preload
from ballast_trainer.channel import base
from ballast_trainer.cli import main, run
from ballast_trainer.launch import ValidatedJob

with contextlib.suppress(ImportError):  # an extra
    from transformers import AutoModelForCausalLM
    from transformers.models.llama import modeling_llama

ValidatedJob.from_mapping({"totalSteps": 1, "model": {"name": "gpt", "layers": 4}})

# What is found done is no garbage: a search in a fork would touch, and so copy, all of it.
gc.freeze()
