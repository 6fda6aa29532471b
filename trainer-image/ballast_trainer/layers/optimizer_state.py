"""An optimizer's state of each parameter, as tensors that travel with the layer.

Any ``torch.optim.Optimizer`` can be used that keeps tensors and numbers per parameter.  State kept
elsewhere would be lost when a layer moves and would change the loss curve, so it is refused.
"""

import zlib
from collections import deque
from collections.abc import Callable, Collection, Container, Mapping
from typing import Any

import torch

from ballast_trainer.errors import TrainerError

_NUMBER = ":number"
"""Suffix of the key of a value that is a Python number."""

_MANAGED = frozenset({"params", "lr", "initial_lr"})
"""Entries of a parameter group that the trainer sets itself."""
_OF_TORCH = frozenset({"param_groups", "state", "defaults"})
"""Attributes that are looked at by themselves."""


def as_tensors(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """One parameter's state. Raises TrainerError: some of it is neither a tensor nor a number."""
    tensors = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            tensors[key] = value
        elif isinstance(value, bool | int):
            tensors[key + _NUMBER] = torch.tensor(value)
        elif isinstance(value, float):
            tensors[key + _NUMBER] = torch.tensor(value, dtype=torch.float64)
        elif value is not None:
            raise TrainerError(
                f"{type(optimizer).__name__} keeps {key!r} as {type(value).__name__}, which cannot travel "
                "with a layer. To fix: keep tensors and numbers in the state of each parameter"
            )
    return tensors


def from_tensor(
    optimizer: torch.optim.Optimizer, key: str, value: torch.Tensor, parameter: torch.Tensor
) -> tuple[str, Any]:
    """Key and value as the optimizer had them of ``parameter``; numbers of one on meta come later."""
    if key.endswith(_NUMBER):
        return key.removesuffix(_NUMBER), value.item()
    # As in Optimizer.load_state_dict of torch: only kernels that read the count have it on the GPU.
    on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    if key == "step" and not (on_device or value.is_meta):
        return key, value.to("cpu", copy=True)
    return key, laid_out_as(parameter, value, value.dtype)


def laid_out_as(parameter: torch.Tensor, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy of a value where a parameter is; of one of its shape in its order, as fused kernels take it."""
    like = parameter.detach() if value.shape == parameter.shape else value
    copied = torch.empty_like(like, dtype=dtype, device=parameter.device)
    return copied if value.is_meta else copied.copy_(value)


def update_instead(
    optimizer: torch.optim.Optimizer,
    instead: Mapping[torch.nn.Parameter, torch.nn.Parameter | None],
    as_new: Callable[[torch.nn.Parameter, torch.Tensor], torch.Tensor],
) -> None:
    """Let an optimizer update other parameters instead of some of its own; None: nothing in their place.

    ``as_new``: of a parameter and a tensor of its state, which some make at once, that of the other's.
    """
    for group in optimizer.param_groups:
        now = [instead.get(parameter, parameter) for parameter in group["params"]]
        group["params"] = [parameter for parameter in now if parameter is not None]
    for old, new in instead.items():
        state = {} if new is old else optimizer.state.pop(old, {})
        if state and new is not None:
            optimizer.state[new] = {
                key: as_new(old, value) if isinstance(value, torch.Tensor) else value
                for key, value in state.items()
            }


def is_plain(optimizer: torch.optim.Optimizer, kinds: Collection[type]) -> bool:
    """True if it is of one of these classes, and its steps do nothing else: no hook, no own ``step``."""
    return (
        type(optimizer) in kinds
        and not (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
        and "step" not in vars(optimizer)
    )


def kept_elsewhere(
    optimizer: torch.optim.Optimizer, within: tuple[torch.optim.Optimizer, ...] = ()
) -> dict[str, Any]:
    """State that it keeps beside that by parameter, by place: a change since its construction would be lost.

    Values in its parameter groups but those that the trainer sets; numbers and tensors in its attributes, and
    what optimizers that it has there keep; ``within``: those that have it.
    """
    groups = {
        f"{key} in its parameter groups": [group.get(key) for group in optimizer.param_groups]
        for key in {key: None for group in optimizer.param_groups for key in group}
        if key not in _MANAGED
    }
    attributes = {
        f"{name} in its attributes": value for name, value in vars(optimizer).items() if name not in _OF_TORCH
    }
    learnt = {p.untyped_storage().data_ptr() for group in optimizer.param_groups for p in group["params"]}
    whole = (*within, optimizer)
    return {where: _print_of(value, whole, learnt) for where, value in {**groups, **attributes}.items()}


def _print_of(value: Any, within: tuple[torch.optim.Optimizer, ...], learnt: Container[int]) -> Any:
    """Fingerprint of a value that differs once its numbers, or tensors that are no parameters, change."""
    if isinstance(value, torch.Tensor):
        if value.untyped_storage().data_ptr() in learnt:
            return None
        # By value: a table may be copied, or moved to the GPU by the first step.
        plain = value.detach().cpu().reshape(-1).view(torch.uint8).numpy()
        return value.dtype, value.shape, zlib.crc32(plain.tobytes())
    if isinstance(value, int | float):
        # What an optimizer notes of its own way to compute is no state.
        return None if isinstance(value, bool) else value
    if isinstance(value, torch.optim.Optimizer):
        if any(value is one for one in within):
            return None
        state = None if value.state is within[0].state else value.state
        return _print_of([state, *kept_elsewhere(value, within).values()], within, learnt)
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple | set | deque):
        return None
    return [_print_of(one, within, learnt) for one in value]


def refuse_other_state(optimizer: torch.optim.Optimizer, first: Mapping[str, Any]) -> None:
    """Refuse an optimizer that keeps other state than at its construction, ``first``. Raises TrainerError."""
    now = kept_elsewhere(optimizer)
    # In lists: a NaN that is still there differs from itself alone.
    changed = sorted(where for where, value in now.items() if [value] != [first.get(where)])
    if changed:
        raise TrainerError(
            f"{type(optimizer).__name__} keeps {', '.join(changed)}, which does not travel with a layer. "
            "To fix: keep it in the state of each parameter"
        )
