"""An optimizer's state of each parameter, as tensors that travel with the layer.

Any ``torch.optim.Optimizer`` can be used that keeps tensors and numbers per parameter.  State kept
elsewhere would be lost when a layer moves and would change the loss curve, so it is refused.
"""

from collections.abc import Mapping
from typing import Any

import torch

from ballast_trainer.errors import TrainerError

_NUMBER = ":number"
"""Suffix of the key of a value that is a Python number."""

_MANAGED = frozenset({"params", "lr", "initial_lr"})
"""Entries of a parameter group that the trainer sets itself."""

Groups = list[dict[str, Any]]


def as_tensors(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """One parameter's state.

    Raises:
        TrainerError: some of it is neither a tensor nor a number.
    """
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
    optimizer: torch.optim.Optimizer, key: str, value: torch.Tensor, device: torch.device
) -> tuple[str, Any]:
    """Key and value as the optimizer had them; its tensors on ``device``, that of the parameter."""
    if key.endswith(_NUMBER):
        return key.removesuffix(_NUMBER), value.item()
    if value.is_meta:
        # Its values arrive later.
        return key, torch.empty(value.shape, dtype=value.dtype, device=device)
    # As in Optimizer.load_state_dict of torch: only kernels that read the count have it on the GPU.
    on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    return key, value.to(device if on_device or key != "step" else "cpu", copy=True)


def update_instead(
    optimizer: torch.optim.Optimizer, instead: Mapping[torch.nn.Parameter, torch.nn.Parameter]
) -> None:
    """Let an optimizer update other parameters, of the same shapes, instead of some of its own."""
    for group in optimizer.param_groups:
        group["params"] = [instead.get(parameter, parameter) for parameter in group["params"]]
    for old, new in instead.items():
        # Some make their state at once.
        state = optimizer.state.pop(old, {})
        if state:
            optimizer.state[new] = {
                key: value.to(new.dtype)
                if isinstance(value, torch.Tensor) and value.dtype is old.dtype
                else value
                for key, value in state.items()
            }


def group_settings(optimizer: torch.optim.Optimizer) -> Groups:
    """Numbers in the parameter groups besides those that the trainer sets."""
    return [
        {
            key: value
            for key, value in group.items()
            if key not in _MANAGED and isinstance(value, bool | int | float)
        }
        for group in optimizer.param_groups
    ]


def refuse_state_in_groups(optimizer: torch.optim.Optimizer, first: Groups) -> None:
    """Refuse an optimizer whose parameter groups differ from those at its construction, ``first``.

    Raises:
        TrainerError: it keeps state there.
    """
    pairs = zip(group_settings(optimizer), first, strict=False)
    changed = sorted({key for now, then in pairs for key in now if now[key] != then.get(key)})
    if changed:
        raise TrainerError(
            f"{type(optimizer).__name__} keeps {', '.join(changed)} in its parameter groups, which does not "
            "travel with a layer. To fix: keep it in the state of each parameter"
        )
