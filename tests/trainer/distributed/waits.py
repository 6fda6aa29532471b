"""Operations for whose results the host would wait on a GPU, as torch dispatches them."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_OPERATIONS = {
    torch.ops.aten._local_scalar_dense.default: "scalar",
    torch.ops.aten.nonzero.default: "nonzero",
    torch.ops.aten.masked_select.default: "masked",
}


class Waits(TorchDispatchMode):
    """Notes them in their order: ``found``."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = _OPERATIONS.get(func)
        if func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default):
            masks = [one for one in args[1] if one is not None and one.dtype == torch.bool]
            name = "masked" if masks else None
        if name is not None:
            self.found.append(name)
        return func(*args, **(kwargs or {}))
