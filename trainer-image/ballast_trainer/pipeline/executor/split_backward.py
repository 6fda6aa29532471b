"""The backward of a stage in two halves: for its input, which a rank waits for, and for its weights.

The graph of a microbatch has nodes that lead to the stage's input and others that lead to weights
alone.  Where a node of the first sort has a child of the second (a matrix product, whose weight is a
leaf), the input's half notes the gradient that flows into that node, and the weights' half starts there:
nothing is computed twice but the node itself.  It is whole at once, and its second half empty, where that
does not work: no gradient of the input is needed, or a weight is used in several places.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node


class SplitBackward:
    """One microbatch's backward through one stage."""

    def __init__(
        self,
        results: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        parameters: Iterable[nn.Parameter],
    ) -> None:
        """Analyse the graph from the stage's inputs to its outputs that have a gradient, or its loss."""
        self._results: Sequence[torch.Tensor] = results
        self._sources = [source for source in sources if source.requires_grad]
        self._learning = {id(parameter): parameter for parameter in parameters if parameter.requires_grad}
        self._starts: dict[Node, list[Node]] | None = None
        self._flowing_in: dict[Node, tuple[torch.Tensor | None, ...]] = {}
        roots = [result.grad_fn for result in results if result.grad_fn is not None]
        if self._sources and len(roots) == len(results):
            self._starts = self._find_starts(roots)

    def for_input(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Fill the inputs' ``grad``, given those of the results (None for a loss)."""
        results, self._results = self._results, ()
        if self._starts is None:
            torch.autograd.backward(results, gradients)
            return
        hooks = [node.register_prehook(self._noting(node)) for node in self._starts]
        try:
            found = torch.autograd.grad(
                results, self._sources, gradients, retain_graph=True, allow_unused=True
            )
            for source, one in zip(self._sources, found, strict=True):
                source.grad = one
        finally:
            for hook in hooks:
                hook.remove()

    def for_weights(self, *, before: Callable[[nn.Parameter], None] = lambda parameter: None) -> None:
        """Add the weights' gradients to theirs.

        ``before`` is told a parameter before its gradient, and those of others beside it, is computed.
        """
        starts, self._starts = self._starts or {}, None
        for node, leaves in starts.items():
            first = self._parameter(leaves[0])
            if first is not None:
                before(first)
            flowing = self._flowing_in.pop(node, ())
            edges = [GradientEdge(node, i) for i, value in enumerate(flowing) if value is not None]
            if not edges:
                continue
            gradients = torch.autograd.grad(
                edges,
                [GradientEdge(leaf, 0) for leaf in leaves],
                [value for value in flowing if value is not None],
                allow_unused=True,
            )
            for leaf, gradient in zip(leaves, gradients, strict=True):
                parameter = self._parameter(leaf)
                if gradient is not None and parameter is not None:
                    known = parameter.grad
                    parameter.grad = gradient if known is None else known.add_(gradient)

    def _noting(self, node: Node) -> Any:
        def note(flowing: tuple[torch.Tensor | None, ...]) -> None:
            self._flowing_in[node] = flowing

        return note

    def _parameter(self, node: Node) -> nn.Parameter | None:
        """The parameter that a node adds gradients to, if it is a leaf and one of ours."""
        return self._learning.get(id(getattr(node, "variable", None)))

    def _find_starts(self, roots: Sequence[Node]) -> dict[Node, list[Node]] | None:
        """Nodes on the way to the input that have weights behind them; None where a weight has several."""
        parents = _parents(roots)
        inputs = {id(source) for source in self._sources}
        leaves = [node for node in parents if self._parameter(node) is not None]
        input_leaves = [node for node in parents if id(getattr(node, "variable", None)) in inputs]
        on_the_way = _ancestors(input_leaves, parents, stop=set())
        if not on_the_way.issuperset(roots):
            return None
        starts: dict[Node, list[Node]] = {}
        for leaf in leaves:
            found = _ancestors([leaf], parents, stop=on_the_way) & on_the_way
            if len(found) != 1:
                return None
            starts.setdefault(found.pop(), []).append(leaf)
        return starts


def backward_in_halves(
    stack: nn.Module,
    sources: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
) -> None:
    """The backward of a stage in both halves, to try whether it can be split."""
    halves = SplitBackward(results, sources, stack.parameters())
    halves.for_input(gradients)
    halves.for_weights()


def _parents(roots: Iterable[Node]) -> dict[Node, list[Node]]:
    """Each node of the graph with those whose backward flows into it."""
    parents: dict[Node, list[Node]] = {root: [] for root in roots}
    waiting = deque(parents)
    while waiting:
        node = waiting.popleft()
        for child, _ in node.next_functions:
            if child is not None:
                if child not in parents:
                    parents[child] = []
                    waiting.append(child)
                parents[child].append(node)
    return parents


def _ancestors(nodes: Iterable[Node], parents: dict[Node, list[Node]], stop: set[Node]) -> set[Node]:
    """The nodes and all from which they can be reached, not looking beyond those of ``stop``."""
    found = set(nodes)
    waiting = deque(found)
    while waiting:
        node = waiting.popleft()
        if node in stop:
            continue
        for parent in parents[node]:
            if parent not in found:
                found.add(parent)
                waiting.append(parent)
    return found
