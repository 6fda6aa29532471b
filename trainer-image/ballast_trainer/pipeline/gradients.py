"""Gradients, weights and buffers over the mesh: combined over the replicas, and the gradients' norm."""

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ballast_trainer.distributed.axis import Axis, wait_for
from ballast_trainer.distributed.process_group import World
from ballast_trainer.errors import TrainerError
from ballast_trainer.layers.buffers import StepBuffers
from ballast_trainer.layers.layer import Layer, LayerSet
from ballast_trainer.layers.optimize import squared_gradient_norm
from ballast_trainer.layers.slicing import slicings


class _Bucket:
    """The gradients of one type of a layer, on their way over the replicas.

    Each rank's part begins with how many replicas have a gradient of each parameter, and of some expert.
    """

    def __init__(
        self,
        axis: Axis,
        layer: Layer,
        parameters: Mapping[str, nn.Parameter],
        experts: Sequence[nn.Parameter] = (),
    ) -> None:
        """Gradients of ``parameters``; ``experts``: which this replica has alone."""
        self._axis, self._layer, self._parameters = axis, layer, parameters
        self._experts = experts
        self._sum: torch.Tensor | None = None
        self._coming: torch.Tensor | None = None
        self._works: list[Any] = []

    def begin(self) -> None:
        """Take the parameters' gradients, and start their sum over the replicas."""
        layer, parameters, axis = self._layer, self._parameters, self._axis
        touched = [float(parameter.grad is not None) for parameter in parameters.values()]
        if self._experts:
            touched.append(float(any(expert.grad is not None for expert in self._experts)))
        first = next(iter((*parameters.values(), *self._experts)))
        flags = torch.tensor(touched, dtype=first.dtype, device=first.device)
        flat = {}
        for name, parameter in parameters.items():
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            flat[name], parameter.grad = gradient.reshape(-1), None
        if not layer.shares:
            self._coming, self._works = axis.begin_sum(torch.cat([flags, *flat.values()]))
            return
        lengths = part_lengths(layer, parameters, axis)
        pieces: list[torch.Tensor] = []
        for index, length in enumerate(lengths):
            part = [layer.shares[name].part(flat[name], index) for name in parameters]
            pieces += [flags, *part, flags.new_zeros(length - sum(len(piece) for piece in part))]
        self._coming, self._works = axis.begin_sum(
            torch.cat(pieces), [len(flags) + length for length in lengths]
        )

    def settle(self) -> torch.Tensor:
        """The sum of what has begun so far; waits for it."""
        wait_for(self._works)
        if self._sum is None:
            self._sum = self._coming
        elif self._coming is not None:
            self._sum.add_(self._coming)
        self._coming, self._works = None, []
        assert self._sum is not None
        return self._sum

    def keep_part(self) -> None:
        """Let go of all but this replica's part of what has begun so far; waits for it."""
        if self.settle()._is_view():
            self._sum = self.settle().clone()

    def refuse_late(self) -> None:
        """Refuse gradients that came since the bucket began: sums lack them. Raises TrainerError."""
        late = [name for name, parameter in self._parameters.items() if parameter.grad is not None]
        if late:
            raise TrainerError(
                f"layer {self._layer.index} got gradients of {', '.join(late)} after the step's last "
                "backward had left it. To fix: let a layer's own backward give its parameters their gradients"
            )

    def counts(self) -> torch.Tensor:
        """Replicas that have a gradient, by parameter, and of experts; waits for the sums."""
        return self.settle()[: len(self._parameters) + bool(self._experts)].float()

    def give(self, counts: Sequence[float]) -> None:
        """Give the parameters, or this replica's shares of them, their gradients."""
        offset, summed = len(counts), self.settle()
        for expert in self._experts if counts[-1] > 0 else ():
            # Of one that no token took: as in one process, where all are computed together.
            expert.grad = torch.zeros_like(expert) if expert.grad is None else expert.grad
        for name, count in zip(self._parameters, counts[: len(self._parameters)], strict=True):
            learnt = self._layer.learnt(name)
            if learnt is None:
                continue
            total = summed[offset : offset + learnt.numel()].view(learnt.shape)
            offset += learnt.numel()
            if count > 0:
                # An optimizer's kernel wants a gradient laid out as its parameter is.
                learnt.grad = total if learnt.is_contiguous() else torch.empty_like(learnt).copy_(total)


class GradientBuckets:
    """Gradients of a step summed over an axis of replicas: a bucket a layer, the last layer's first.

    A layer's bucket starts once no backward of the step adds to its gradients, while those of earlier layers
    still run; with ZeRO-2 after each backward, and a replica keeps the sums of its part alone.  Every replica
    starts them in one order, so they meet.  A parameter without a gradient on one
    replica (no token took this way) counts as zero there; one without on all of them keeps none.
    """

    def __init__(
        self,
        axis: Axis,
        layers: Iterable[Layer],
        *,
        each_backward: bool = False,
    ) -> None:
        """Begin a step of this replica, with no gradients yet.

        With ``each_backward`` layers end in each of their backwards (ZeRO-2), not in the last one alone.
        """
        self._axis, self._each_backward = axis, each_backward
        self._layers = {layer.index: layer for layer in layers} if axis.size > 1 else {}
        self._begun: dict[int, list[_Bucket]] = {}
        self._newest: list[_Bucket] = []

    def layer_ended(self, index: int) -> None:
        """A backward has left this layer: any, or the last, after which nothing adds to its gradients."""
        if index in self._layers:
            self._begin(index)

    def finish(self) -> None:
        """Begin what has not, and give all parameters their gradients; collective over the axis."""
        for index in sorted(self._layers.keys() - self._begun.keys(), reverse=True):
            self._begin(index)
        buckets = [bucket for of in self._begun.values() for bucket in of]
        for bucket in buckets:
            bucket.refuse_late()
        counts = [bucket.counts() for bucket in buckets]
        # A GPU is waited for once.
        known = torch.cat(counts).cpu().split([len(of) for of in counts]) if counts else ()
        for bucket, of in zip(buckets, known, strict=True):
            bucket.give(of.tolist())
        self._begun.clear()

    def _begin(self, index: int) -> None:
        if index not in self._begun:
            layer = self._layers[index]
            named = ((name, layer.module.get_parameter(name)) for name in layer.of_experts)
            experts = [one for _, one in named if one.requires_grad]
            # With those of the first type, if any.
            self._begun[index] = [
                _Bucket(self._axis, layer, parameters, () if number else experts)
                for number, parameters in enumerate(learning_by_type(layer) or [{}] * bool(experts))
            ]
        if self._each_backward:
            # One layer's whole gradients are on their way at a time.
            for bucket in self._newest:
                bucket.keep_part()
            self._newest = self._begun[index]
        for bucket in self._begun[index]:
            bucket.begin()


@torch.no_grad()
def gather_weights(world: World, layers: LayerSet) -> None:
    """Get the parts of the weights that other replicas have updated; collective over the data axis."""
    axis = world.data
    layers.release_weights()
    for layer in layers:
        if not layer.shares or layer.is_sharded:
            continue
        for parameters in learning_by_type(layer, without=layer.copies):
            lengths = part_lengths(layer, parameters, axis)
            mine = [layer.shares[name].part(p.detach(), axis.index) for name, p in parameters.items()]
            rest = lengths[axis.index] - sum(len(piece) for piece in mine)
            own = torch.cat([*mine, mine[0].new_zeros(rest)])
            parts = axis.gather_parts(own, lengths).split(lengths)
            for index, part in enumerate(parts):
                offset = 0
                for name, parameter in parameters.items():
                    begin, end = layer.shares[name].bounds[index]
                    piece = part[offset : offset + end - begin]
                    offset += end - begin
                    if index == axis.index or begin == end:
                        continue
                    if end - begin == parameter.numel():
                        parameter.copy_(piece.view(parameter.shape))
                    else:
                        parameter.view(-1)[begin:end].copy_(piece)


def part_lengths(layer: Layer, parameters: Iterable[str], axis: Axis) -> list[int]:
    """Numbers of each replica's part of a layer's parameters: as many for all where parameters are cut."""
    shares = [layer.shares[name] for name in parameters]
    if not shares:
        return [0] * axis.size
    lengths = [
        sum(end - begin for begin, end in bounds) for bounds in zip(*(s.bounds for s in shares), strict=True)
    ]
    return [max(lengths)] * axis.size if any(share.is_cut for share in shares) else lengths


def learning_by_type(layer: Layer, without: Collection[str] = ()) -> list[dict[str, nn.Parameter]]:
    """A layer's parameters that learn and replicas share, by name, those of each number type together."""
    found: dict[torch.dtype, dict[str, nn.Parameter]] = {}
    for name, parameter in layer.module.named_parameters():
        if parameter.requires_grad and name not in without and name not in layer.of_experts:
            found.setdefault(parameter.dtype, {})[name] = parameter
    return list(found.values())


def buffers_at_start(world: World, layers: LayerSet, microbatches: int) -> StepBuffers | None:
    """The buffers that the replicas' forwards change, as the step begins; None where there is one replica.

    ``microbatches``: of a replica.
    """
    if world.data.size == 1:
        return None
    ends = range(0, (world.data.size + 1) * microbatches, microbatches)
    modules = (module for layer in layers for module in layer.stateful)
    return StepBuffers(modules, list(itertools.starmap(range, itertools.pairwise(ends))))


def squared_norm_once(world: World, layers: LayerSet) -> float:
    """This rank's part of the squared norm of all gradients: the sum over all ranks counts each once.

    A replica of another's layers adds those of its experts alone; a rank of a tensor group nothing for
    parameters that all of its ranks hold whole.
    """
    if world.mesh.column == 1:
        return squared_gradient_norm(layers.parameters())
    counted: list[nn.Parameter] = []
    for layer in layers:
        all_count, cut = world.data.index == 0 or bool(layer.shares), slicings(layer.module)
        learnt = (
            layer.learnt(name)
            for name, _ in layer.module.named_parameters()
            if (all_count or name in layer.of_experts) and (name in cut or world.tensor.index == 0)
        )
        counted += [parameter for parameter in learnt if parameter is not None]
    return squared_gradient_norm(counted)
