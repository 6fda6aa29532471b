"""Egeria's plasticity of a layer (Wang et al., EuroSys 2023): whether what it tells apart still changes.

Egeria runs an older copy of the model beside the one in training, on the same samples, and compares how alike
each layer finds them: the similarity-preserving loss between the two matrices of similarities.  A layer whose
plasticity does not change any more has converged.

Here a layer keeps no older weights, but the states that came into it after the last look, and how alike its
outputs of them were then: the same comparison for the first layer that learns, since those before it are
frozen and their output does not change.  Both travel with the layer as buffers.
"""

from typing import Any

import torch
from torch import nn

from ballast_trainer.distributed.axis import Axis
from ballast_trainer.layers.running import CURRENT_FORWARD
from ballast_trainer.seeding import host_seeded

SAMPLES = 64
"""Positions (or samples) of the first sequence whose likeness is compared."""
WINDOW = 4
"""Smoothed values through which the slope is laid."""
_SMOOTHING = 0.5
_NOTES = "ballast_notes_input"
"""Attribute of a module in the step in which its input is noted: whether it is still to come."""

INPUT, LIKENESS, HISTORY = "ballast_probe_input", "ballast_probe_likeness", "ballast_probe_history"
NAMES = (INPUT, LIKENESS, HISTORY)
"""Buffers of a layer's module; HISTORY: the largest slope yet, then the smoothed values, newest last."""


def prepare(module: nn.Module) -> None:
    """Give a layer room for what it keeps, and let it load what another rank's has kept."""
    for name in NAMES:
        module.register_buffer(name, torch.zeros(0))
    module._register_load_state_dict_pre_hook(_take_shapes, with_module=True)
    module.register_forward_pre_hook(_note_input)


def _take_shapes(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name in NAMES:
        stored, own = state.get(prefix + name), module._buffers[name]
        if stored is not None and own is not None:
            module._buffers[name] = torch.zeros_like(stored, device=own.device)


def note_step(module: nn.Module) -> None:
    """Note what comes into the layer in the step that begins, the one after a look."""
    module.__dict__[_NOTES] = True


def noted(module: nn.Module, replicas: Axis) -> None:
    """The step's gradients are there: keep how alike the layer's outputs are; collective over the replicas.

    Before its update, so that every look has an update to see.  All of them keep the sequence of the first,
    which is that of one process.
    """
    if module.__dict__.pop(_NOTES, None) is not None:
        buffers: Any = module._buffers
        if buffers[INPUT].numel() > 0:
            replicas.broadcast(buffers[INPUT], source=0)
            buffers[LIKENESS] = _likeness(module, buffers[INPUT])


def _note_input(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    if module.__dict__.get(_NOTES) and CURRENT_FORWARD.microbatch is not None:
        # One sequence of the step's first microbatch.
        module._buffers[INPUT] = inputs[0].detach()[:1].clone(memory_format=torch.contiguous_format)
        module.__dict__[_NOTES] = False


def look(module: nn.Module) -> float | None:
    """The criterion's figure: the slope of the plasticity over the largest yet; None: not yet known."""
    kept: Any = module._buffers
    source, history = kept[INPUT], kept[HISTORY]
    if kept[LIKENESS].numel() == 0:
        return None
    change = float((_likeness(module, source) - kept[LIKENESS]).square().mean())
    values = history[1:].tolist()
    values.append(change if not values else _SMOOTHING * values[-1] + (1 - _SMOOTHING) * change)
    values = values[-WINDOW:]
    slope = abs(_slope(values)) if len(values) == WINDOW else 0.0
    largest = max(slope, float(history[0]) if len(history) else 0.0)
    kept[HISTORY] = torch.tensor([largest, *values], dtype=torch.float64, device=source.device)
    if len(values) < WINDOW:
        return None
    return slope / largest if largest > 0 else 0.0


def forget(module: nn.Module) -> None:
    """Start again, as the layer does: all but the largest slope yet."""
    buffers: Any = module._buffers
    buffers[LIKENESS] = buffers[LIKENESS][:0]
    buffers[HISTORY] = buffers[HISTORY][:1]


def _likeness(module: nn.Module, source: torch.Tensor) -> torch.Tensor:
    """Similarities [N, N] of a layer's outputs of one sequence, each row of norm 1; float32."""
    modes = [(part, part.training) for part in module.modules()]
    weight = next((p for p in module.parameters() if p.is_floating_point()), None)
    if source.is_floating_point() and weight is not None:
        source = source.to(weight.dtype)
    try:
        module.eval()
        with torch.no_grad(), host_seeded():
            output = module(source)
    finally:
        for part, mode in modes:
            part.training = mode
    rows = output.reshape(-1, output.shape[-1])[:SAMPLES].float()
    return nn.functional.normalize(rows @ rows.t(), dim=1)


def _slope(values: list[float]) -> float:
    """Least-squares slope through values one look apart."""
    middle = (len(values) - 1) / 2
    spread = sum((place - middle) ** 2 for place in range(len(values)))
    return sum((place - middle) * value for place, value in enumerate(values)) / spread
