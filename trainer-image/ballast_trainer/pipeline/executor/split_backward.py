"""The backward of a stage in two halves: for its input, which a rank waits for, and for its weights.

The graph of a microbatch has nodes that lead to the stage's input and others that lead to weights
alone.  Where a node of the first sort has a child of the second (a matrix product, whose weight is a
leaf), the input's half notes the gradient that flows into that node, and the weights' half starts there:
nothing is computed twice but the node itself.  A ``torch.autograd.Function`` of the user's may overwrite
what it has saved, and runs once: the gradients of its weights come with the input's half.  The backward is
whole at once, and its second half empty, where halves do not work: no gradient of the input is needed, a
weight is used in several places, or a part is compiled (one function, which runs once).
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node

from ballast_trainer.layers.layer_stack import own_function

_WHOLE = ("torch._functorch.", "torch.utils.checkpoint")
"""Modules of functions that run once, and for all their inputs: compiled ones, and reentrant checkpoints."""


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
        self._starts: dict[Node, list[nn.Parameter]] | None = None
        self._at_once: list[nn.Parameter] = []
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
            torch.autograd.backward(
                results, gradients, retain_graph=True, inputs=[*self._sources, *self._at_once]
            )
        finally:
            for hook in hooks:
                hook.remove()

    def for_weights(self, *, before: Callable[[nn.Parameter], None] = lambda parameter: None) -> None:
        """Add the weights' gradients to theirs.

        ``before`` is told a parameter before its gradient, and those of others beside it, is computed.
        """
        starts, self._starts = self._starts or {}, None
        for node, parameters in starts.items():
            before(parameters[0])
            flowing = self._flowing_in.pop(node, ())
            edges = [GradientEdge(node, i) for i, value in enumerate(flowing) if value is not None]
            if edges:
                torch.autograd.backward(
                    edges, [value for value in flowing if value is not None], inputs=parameters
                )

    def _noting(self, node: Node) -> Any:
        def note(flowing: tuple[torch.Tensor | None, ...]) -> None:
            self._flowing_in[node] = flowing

        return note

    def _parameter(self, node: Node) -> nn.Parameter | None:
        """The parameter that a node adds gradients to, if it is a leaf and one of ours."""
        return self._learning.get(id(getattr(node, "variable", None)))

    def _find_starts(self, roots: Sequence[Node]) -> dict[Node, list[nn.Parameter]] | None:
        """Nodes on the way to the input that have weights behind them; None where halves do not work."""
        parents = _parents(roots)
        if any((own_function(node) or "").startswith(_WHOLE) for node in parents):
            return None
        inputs = {id(source) for source in self._sources}
        leaves = {node: parameter for node in parents if (parameter := self._parameter(node)) is not None}
        input_leaves = [node for node in parents if id(getattr(node, "variable", None)) in inputs]
        on_the_way = _ancestors(input_leaves, parents, stop=set())
        if not on_the_way.issuperset(roots):
            return None
        starts: dict[Node, list[nn.Parameter]] = {}
        for leaf, parameter in leaves.items():
            found = _ancestors([leaf], parents, stop=on_the_way) & on_the_way
            if len(found) != 1:
                return None
            start = found.pop()
            if own_function(start) is None:
                starts.setdefault(start, []).append(parameter)
            else:
                self._at_once.append(parameter)
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
