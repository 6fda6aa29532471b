"""A linear layer whose weights can be pruned, and that computes sparsely once enough of them are.

Up to :data:`SPARSE_FROM` the weight is dense with zeros in it, which costs as much as a dense
weight.  Above, only the kept values remain, as a separate parameter with gradient and optimizer
state of that size, and forward and both backward products run on them in CSR:
``y = W x``, ``dx = W^T dy``, and ``dW`` sampled at the kept positions.
"""

import warnings
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ballast_trainer.device import sparse_pays_on
from ballast_trainer.dynamics.pruning.neurons import came_from_conv1d
from ballast_trainer.layers.layer import MODULE, OPTIMIZER
from ballast_trainer.models.blocks import is_conv1d

SPARSE_FROM = 0.85
"""Sparsity from which the three CSR products together beat the dense ones; measured on one core by
benchmarks/trainer/sparse.py."""


class _Structure:
    """Positions of the kept weights of a mask, row-major and column-major."""

    def __init__(self, mask: torch.Tensor) -> None:
        rows, columns = mask.shape
        row, column = mask.nonzero(as_tuple=True)
        self.flat = row * columns + column
        self.by_column = torch.argsort(column * rows + row)
        self.shape = (rows, columns)
        self._row_major = (_offsets(row, rows), column)
        self._column_major = (_offsets(column[self.by_column], columns), row[self.by_column])

    def matrices(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The kept values as CSR matrices [rows, columns] and, transposed, [columns, rows]."""
        rows, columns = self.shape
        with warnings.catch_warnings():
            # Torch warns once per process that CSR is in beta.
            warnings.simplefilter("ignore")
            return (
                torch.sparse_csr_tensor(*self._row_major, values, (rows, columns), check_invariants=False),
                torch.sparse_csr_tensor(
                    *self._column_major, values[self.by_column], (columns, rows), check_invariants=False
                ),
            )


def _offsets(sorted_index: torch.Tensor, count: int) -> torch.Tensor:
    counts = torch.bincount(sorted_index, minlength=count)
    return torch.cat([counts.new_zeros(1), torch.cumsum(counts, 0)])


class _SparseProduct(torch.autograd.Function):
    """``x @ W.T`` through the kept values of W; their gradient is sampled, never the dense one made."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, values: torch.Tensor, matrices: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.matrices = matrices
        return torch.mm(matrices[0], x.t().contiguous()).t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        row_major, column_major = ctx.matrices
        transposed = gradient.t().contiguous()
        grad_x = torch.mm(column_major, transposed).t() if ctx.needs_input_grad[0] else None
        grad_values = None
        if ctx.needs_input_grad[1]:
            grad_values = torch.sparse.sampled_addmm(row_major, transposed, x, beta=0.0).values()
        return grad_x, grad_values, None


class PrunableLinear(nn.Module):
    """``nn.Linear`` with a mask; takes over the parameters of the layer it replaces.

    Attributes:
        weight: the dense weight [rows, columns]; when sparse no parameter, but made at each read, for a layer
            that reads it itself; its gradient goes to ``values``.
        values: the kept weights [count]; None when dense.
        mask: bool [rows, columns], True where a weight is kept.
    """

    mask: torch.Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        assert isinstance(linear.weight, nn.Parameter)
        self.weight: nn.Parameter | None = linear.weight
        self.values: nn.Parameter | None = None
        self.bias = linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("mask", torch.ones(linear.weight.shape, dtype=torch.bool))
        self._structure: _Structure | None = None
        self._matrices: tuple[torch.Tensor, torch.Tensor] | None = None
        # In a list, or the module would register it as its parameter.
        self._matrices_of: list[nn.Parameter] = []

    def __getattr__(self, name: str) -> Any:
        """Parameters, buffers and modules; see ``weight``."""
        found = super().__getattr__(name)
        if name != "weight" or found is not None or self.values is None:
            return found
        assert self._structure is not None
        full = self.values.new_zeros(self.mask.numel())
        return full.index_copy(0, self._structure.flat, self.values).view_as(self.mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., columns] -> [..., rows]."""
        if self.values is None:
            assert self.weight is not None
            return functional.linear(x, self.weight, self.bias)
        if self._matrices is None or self._matrices_of[0] is not self.values:
            # Where a stage holds several versions of its weights, these take turns as parameters.
            assert self._structure is not None
            self._matrices = self._structure.matrices(self.values.detach())
            self._matrices_of = [self.values]
        # CSR products are those of the values' own type, under autocast too.
        with torch.autocast(x.device.type, enabled=False):
            flat = x.reshape(-1, x.shape[-1]).to(self.values.dtype)
            product = _SparseProduct.apply(flat, self.values, self._matrices)
        if self.bias is not None:
            product = product + self.bias
        if torch.is_autocast_enabled(x.device.type):
            # The type of the dense product: stages have agreed on the type of their messages.
            product = product.to(torch.get_autocast_dtype(x.device.type))
        shaped: torch.Tensor = product.reshape(*x.shape[:-1], product.shape[-1])
        return shaped

    @property
    def learnt(self) -> nn.Parameter:
        """The parameter that holds the weights: dense, or the kept values."""
        parameter = self.weight if self.values is None else self.values
        assert parameter is not None
        return parameter

    def dense(self, like_values: torch.Tensor | None = None) -> torch.Tensor:
        """The weights [rows, columns] with zeros where pruned; or any tensor of the parameter's shape, so."""
        source = self.learnt.detach() if like_values is None else like_values
        if self._structure is None:
            return source
        full = source.new_zeros(self.mask.numel())
        full[self._structure.flat] = source
        return full.view_as(self.mask)

    def compact(self, full: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`dense` under the mask in force."""
        return full * self.mask if self._structure is None else full.reshape(-1)[self._structure.flat]

    def prune(self, mask: torch.Tensor) -> None:
        """Keep only the weights of ``mask``; above the crossover they become sparse."""
        full = self.dense()
        trainable = self.learnt.requires_grad
        self.mask.copy_(mask)
        self._matrices = None
        # One that a CPU has saved stays sparse on a GPU: it has no dense weight.
        if self.values is not None or _sparse_pays(mask, full.dtype):
            self._become_sparse(mask)
            self.values = nn.Parameter(self.compact(full), requires_grad=trainable)
        else:
            assert self.weight is not None
            with torch.no_grad():
                self.weight.mul_(mask)

    def weight_changed(self) -> None:
        """The optimizer has stepped: the matrices are stale."""
        self._matrices = None

    def _become_sparse(self, mask: torch.Tensor) -> None:
        self._structure = _Structure(mask)
        if self.values is None:
            self.weight = None

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        values = state_dict.get(prefix + "values")
        if values is not None:
            learns = self.learnt.requires_grad
            self._become_sparse(state_dict[prefix + "mask"])
            self.values = nn.Parameter(torch.empty_like(values, device=self.mask.device), learns)
        elif prefix + "mask" not in state_dict:
            # Saved before the job was pruned: all weights are kept.
            state_dict[prefix + "mask"] = torch.ones_like(self.mask)
        self._matrices = None
        super()._load_from_state_dict(state_dict, prefix, *args)


def _sparse_pays(mask: torch.Tensor, dtype: torch.dtype) -> bool:
    # Torch's CSR products on the CPU need MKL, which has none in 16 bits; complex ones are not conjugated.
    possible = sparse_pays_on(mask.device) and torch.backends.mkl.is_available()
    return (
        possible
        and dtype in (torch.float32, torch.float64)
        and float(mask.sum()) <= (1 - SPARSE_FROM) * mask.numel()
    )


def _without_masks(tensors: dict[str, torch.Tensor], module: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors for a module that is no longer pruned: dense, zero where they were pruned."""
    dense = dict(tensors)
    for name, child in module.named_modules():
        prefix = f"{name}." if name else ""
        is_dense = isinstance(child, nn.Linear) or is_conv1d(child)
        mask = dense.pop(f"{MODULE}{prefix}mask", None) if is_dense else None
        if mask is None:
            continue
        kept = int(mask.sum())
        for key in [
            key for key in dense if key.startswith((f"{MODULE}{prefix}values", f"{OPTIMIZER}{prefix}values."))
        ]:
            value = dense.pop(key)
            if value.numel() == kept and value.dim() == 1:
                full = value.new_zeros(mask.shape)
                full[mask] = value
                value = full
            dense[key.replace(f"{prefix}values", f"{prefix}weight", 1)] = value
    return dense


def as_pruned_now(tensors: dict[str, torch.Tensor], module: nn.Module) -> dict[str, torch.Tensor]:
    """A layer's saved tensors for a ``module`` for which pruning was switched on or off since.

    GPT-2's ``Conv1D`` saves its weights inputs first; pruning makes linear layers of them, outputs first.
    """
    now = {path: False for path, part in module.named_modules() if is_conv1d(part)}
    now |= {path: True for path, part in module.named_modules() if came_from_conv1d(part)}
    saved = {path: _outputs_first(tensors, path) for path in now}
    dense = _without_masks(tensors, module)
    for path, outputs_first in now.items():
        parent = path.rpartition(".")[0]
        beside = [saved[other] for other in saved if other.rpartition(".")[0] == parent]
        known = [first for first in (saved[path], *beside) if first is not None]
        if known and known[0] != outputs_first:
            name = f"{path}.weight" if path else "weight"
            for key, value in dense.items():
                if key == MODULE + name or (key.startswith(f"{OPTIMIZER}{name}.") and value.dim() == 2):
                    dense[key] = value.t().contiguous()
    return dense


def _outputs_first(tensors: dict[str, torch.Tensor], path: str) -> bool | None:
    """True if a weight was saved with outputs first; None: it is square, and does not tell."""
    prefix = f"{MODULE}{path}." if path else MODULE
    if f"{prefix}mask" in tensors:
        return True
    weight, bias = tensors.get(f"{prefix}weight"), tensors.get(f"{prefix}bias")
    if weight is None or bias is None or weight.shape[0] == weight.shape[1]:
        return None
    return bool(weight.shape[0] == len(bias))
