"""A matrix product over a selection of its contraction columns: ZERO-resizing (section III-A).

Columns of the contraction are left out of input and weight; the output keeps its shape.  Backward, the
gradients of the columns left out are imputed, so that the input's and the weight's gradient keep theirs:

    Y = X[:, K] W[:, K]^T      dX[:, K] = dY W[:, K]      dW[:, K] = dY^T X[:, K]

with K the kept columns.  Each of the three products takes |K| / L of its arithmetic.
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from ballast_trainer.gpu_emulation import EmulatedSpeed
from ballast_trainer.tensor_parallel.exchange import eager

IMPUTATIONS = ("zero", "average", "same")
"""Replacements of a gradient that was not computed: zero, the mean of those that were in the same row, or the
last one that was (the most memory)."""


class GemmTimer:
    """Adds up the seconds of a rank's products, forward and backward: M of equation 1.

    Attributes:
        running: whether products are timed.
        extra: the part that only an emulated straggler adds, which no meter of whole stages measures.
    """

    def __init__(self, device: torch.device, speed: EmulatedSpeed | None = None) -> None:
        # Where a slower device is emulated, each product is padded to its time there, so that the other ranks
        # wait for it where they would.
        self.running = speed is not None
        self._on_events = device.type == "cuda" and speed is None
        self.start_step()
        self._device = device
        self._speed = speed.of_products() if speed is not None else None
        self._extra = 1 - 1 / speed.products if speed is not None else 0.0
        one_thread = device.type == "cpu" and torch.get_num_threads() == 1
        self._clock = time.thread_time if one_thread else time.perf_counter

    def start_step(self) -> None:
        """Count from zero."""
        self._seconds = self.extra = 0.0
        self._unread: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @property
    def seconds(self) -> float:
        """Seconds of this step times the emulated slow-down; on a GPU waits for the newest product."""
        for began, ended in self._unread:
            ended.synchronize()
            self._seconds += began.elapsed_time(ended) / 1000
        self._unread.clear()
        return self._seconds

    def now(self) -> float:
        """Seconds on the clock that products are timed by."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._clock()

    @contextlib.contextmanager
    def product(self) -> Iterator[None]:
        """Around a product."""
        if not self.running:
            yield
            return
        if self._on_events:
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record()
            yield
            events[1].record()
            self._unread.append(events)
            return
        wall, began = time.perf_counter(), self.now()
        yield
        spent = self.now() - began
        if self._speed is None:
            self._seconds += spent
        else:
            self._seconds += self._speed.factor * spent
            self.extra += self._extra * self._speed.factor * spent
            self._speed.pad(wall, spent)


@dataclasses.dataclass(slots=True, kw_only=True)
class ColumnSelection:
    """Columns of a layer's matrix to compute, kept from the forward to the backward.

    Attributes:
        columns: L, length of the contraction.
        kept: ascending indices of the columns computed, int64.
        imputation: one of :data:`IMPUTATIONS`.
        last: the gradients computed last, by ``input`` and ``weight``; filled for ``same`` alone.
    """

    columns: int
    kept: torch.Tensor
    imputation: str = "zero"
    last: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)

    def select(self, matrix: torch.Tensor) -> torch.Tensor:
        """[..., L] -> [..., |K|]: the kept columns."""
        return matrix.index_select(-1, self.kept)

    def restore(self, pruned: torch.Tensor, of: str) -> torch.Tensor:
        """[..., |K|] -> [..., L]: the columns back in their places, the others imputed.

        Args:
            pruned: the gradient that was computed.
            of: ``input`` or ``weight``.
        """
        shape = (*pruned.shape[:-1], self.columns)
        if self.imputation == "average":
            full = pruned.mean(-1, keepdim=True).expand(shape).contiguous()
        elif self.imputation == "same" and of in self.last and self.last[of].shape == shape:
            full = self.last[of].to(pruned.dtype)
        else:
            full = pruned.new_zeros(shape)
        full.index_copy_(-1, self.kept, pruned)
        if self.imputation == "same":
            # What was imputed is not repeated: a column left out for long would go one way without end.
            self.last[of] = pruned.new_zeros(shape).index_copy_(-1, self.kept, pruned.detach())
        return full


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        value: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        selection: ColumnSelection | None,
        clock: GemmTimer,
    ) -> torch.Tensor:
        ctx.save_for_backward(value, weight)
        ctx.selection, ctx.clock, ctx.has_bias = selection, clock, bias is not None
        kind = value.device.type
        ctx.autocast = torch.autocast(
            kind, dtype=torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind)
        )
        if selection is not None:
            value, weight = selection.select(value), selection.select(weight)
        with clock.product():
            return functional.linear(value, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        value, weight = ctx.saved_tensors
        selection: ColumnSelection | None = ctx.selection
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        of_input = of_weight = of_bias = None
        rows = gradient.reshape(-1, gradient.shape[-1])
        if selection is not None:
            value = selection.select(value) if needs_weight else value
            weight = selection.select(weight) if needs_input else weight
        with ctx.autocast, ctx.clock.product():
            if needs_input:
                of_input = gradient.matmul(weight)
            if needs_weight:
                of_weight = rows.t().mm(value.reshape(-1, value.shape[-1]))
            if ctx.has_bias and needs_bias:
                of_bias = rows.sum(0)
        if selection is not None:
            of_input = None if of_input is None else selection.restore(of_input, "input")
            of_weight = None if of_weight is None else selection.restore(of_weight, "weight")
        return of_input, of_weight, of_bias, None, None


@eager
def _timed(*product: Any) -> torch.Tensor:
    out: torch.Tensor = _Product.apply(*product)
    return out


def product(
    value: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    selection: ColumnSelection | None,
    clock: GemmTimer,
) -> torch.Tensor:
    """``value`` [..., L] times ``weight`` [out, L] transposed, plus ``bias``; only the selected columns.

    Without one the result and the gradients are those of ``functional.linear``, bit for bit.
    """
    if selection is None and not clock.running:
        return functional.linear(value, weight, bias)
    return _timed(value, weight, bias, selection, clock)
