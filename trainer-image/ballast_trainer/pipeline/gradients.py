"""Gradients and buffers over the mesh: combined over the replicas, and their norm."""

import torch
from torch import nn

from ballast_trainer.distributed.process_group import World
from ballast_trainer.layers.buffers import StepBuffers
from ballast_trainer.layers.layer import LayerSet
from ballast_trainer.layers.optimize import squared_gradient_norm
from ballast_trainer.layers.slicing import slicings


def average_over_replicas(world: World, layers: LayerSet) -> None:
    """Make every gradient the mean over the data axis, in one all-reduce; collective over that axis.

    A parameter without a gradient on one replica (no token took this way) counts as zero there; one
    without on all of them keeps none.
    """
    if world.data.size == 1:
        return
    learning = [parameter for parameter in layers.parameters() if parameter.requires_grad]
    if not learning:
        return
    touched = torch.tensor([float(p.grad is not None) for p in learning], device=world.device)
    pieces = [p.grad if p.grad is not None else torch.zeros_like(p) for p in learning]
    flat = torch.cat([touched, *(piece.reshape(-1) for piece in pieces)])
    del pieces
    world.data.all_reduce(flat)
    touched = flat[: len(learning)].clone()
    flat.div_(world.data.size)
    offset = len(learning)
    for parameter, count in zip(learning, touched.tolist(), strict=True):
        if count > 0:
            mean = flat[offset : offset + parameter.numel()].view_as(parameter)
            if parameter.grad is None:
                parameter.grad = mean.clone()
            else:
                parameter.grad.copy_(mean)  # in place: there is no third copy of all gradients
        offset += parameter.numel()


def buffers_at_start(world: World, layers: LayerSet) -> StepBuffers | None:
    """The buffers that the replicas' forwards change, as the step begins; None where there is one replica."""
    if world.data.size == 1:
        return None
    return StepBuffers.of(module for layer in layers for module in layer.stateful)


def squared_norm_once(world: World, layers: LayerSet) -> float:
    """This rank's part of the squared norm of all gradients: the sum over all ranks counts each once.

    A replica of another's layers adds nothing, nor does a rank of a tensor group for parameters that
    all of its ranks hold whole.
    """
    if world.mesh.column == 1:
        return squared_gradient_norm(layers.parameters())
    if world.data.index > 0:
        return 0.0
    counted: list[nn.Parameter] = []
    for layer in layers:
        cut = slicings(layer.module)
        counted += [
            p for name, p in layer.module.named_parameters() if name in cut or world.tensor.index == 0
        ]
    return squared_gradient_norm(counted)
