"""Operations of a model, and what the GPUs could do: how much of the hardware's peak training uses.

Operations are those of the model's matrix products, forward and backward, whatever it really computed:
recomputed activations and layers that a change skips count as in the model that was configured (PaLM,
appendix B: model FLOPs utilization).
"""

import contextlib
import copy
import logging
import pickle
from typing import Any

import torch
from ballast_policies.contract.job.training import Precision
from ballast_policies.gpus.catalogue import gpu_named
from torch import nn

from ballast_trainer.models.protocol import Model
from ballast_trainer.seeding import host_seeded
from ballast_trainer.trees import Tree, mapped

logger = logging.getLogger(__name__)

_OF_A_FORWARD = 3
"""A backward has two products for each of the forward: by the inputs and by the weights."""


def step_flops(model: Model, inputs: Tree) -> float | None:
    """Operations of the forward and the backward of one batch.

    Counted on tensors without data, layer by layer, so it takes neither memory nor a GPU.

    Args:
        model: its layers.
        inputs: of the batch; only shape and type count.

    Returns:
        None where a layer cannot run without data, e.g. one whose work depends on values, and where
        nothing but element-wise operations was found.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    # Plain tensors cost half; code that looks at values unless it is traced (masks of transformers) runs on
    # fake ones alone.
    # Torch logs a traceback of what is told below.
    of_torch = logging.getLogger(FakeTensorMode.__module__)
    disabled, of_torch.disabled = of_torch.disabled, True
    try:
        for mode in (contextlib.nullcontext(), FakeTensorMode(allow_non_fake_inputs=True)):
            try:
                return _OF_A_FORWARD * float(_forward_operations(model, inputs, mode)) or None
            except Exception as error:  # a user's layer may do anything with its input
                reason = error
    finally:
        of_torch.disabled = disabled
    logger.info("operations are not counted: a layer needs data to run: %s", reason)
    return None


def _forward_operations(model: Model, inputs: Tree, mode: contextlib.AbstractContextManager[Any]) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    operations = 0
    # Of alike layers one runs: torch counts in Python, tens of milliseconds a layer, while the others wait.
    counted: dict[bytes, tuple[int, Tree]] = {}
    with host_seeded(), torch.no_grad():
        with mode:
            activations = mapped(lambda one: one.to("meta"), inputs)
        for index in range(model.layer_count):
            with torch.device("meta"):
                layer = _as_written(model.build_layer(index)).to("meta")
            alike = _pickled(layer, activations)
            if alike is not None and alike in counted:
                own, activations = counted[alike]
                activations = mapped(torch.empty_like, activations)
            else:
                with mode, FlopCounterMode(display=False) as counter:
                    activations = layer(activations)
                own = counter.get_total_flops()
                if alike is not None:
                    counted[alike] = (own, mapped(torch.empty_like, activations))
            operations += own
    return operations


def _pickled(layer: nn.Module, activations: Tree) -> bytes | None:
    """All that a layer without data and its input are; None: one of them cannot be written."""
    with contextlib.suppress(Exception):
        return pickle.dumps((layer, activations))
    return None


def _as_written(layer: nn.Module) -> nn.Module:
    """A copy that is not compiled: the layer may be the one that trains, and is not compiled for a count."""
    outer = nn.ModuleList([copy.deepcopy(layer)])
    for module in list(outer.modules()):
        for name, part in list(module.named_children()):
            if isinstance(inner := getattr(part, "_orig_mod", None), nn.Module):
                setattr(module, name, inner)
    return outer[0]


def peak_flops(device: torch.device, precision: Precision) -> float | None:
    """Peak by the GPU's data sheet, operations/s; None: not in the catalogue, or no GPU."""
    if device.type != "cuda":
        return None
    gpu = gpu_named(torch.cuda.get_device_name(device))
    if gpu is None:
        return None
    name = str(precision.value)
    if name == "fp32" and torch.backends.cuda.matmul.allow_tf32:
        name = "tf32"
    return gpu.flops.get(name)
