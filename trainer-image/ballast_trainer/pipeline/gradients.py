"""Gradients, weights and buffers over the mesh: combined over the replicas, and the gradients' norm."""

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import nn

from ballast_trainer.distributed.axis import Axis
from ballast_trainer.distributed.process_group import World
from ballast_trainer.errors import TrainerError
from ballast_trainer.layers.buffers import StepBuffers
from ballast_trainer.layers.layer import Layer, LayerSet
from ballast_trainer.layers.optimize import squared_gradient_norm
from ballast_trainer.layers.slicing import slicings


class _Bucket:
    """The gradients of one type of a layer, on their way over the replicas.

    Each rank's part begins with how many replicas have a gradient of each parameter.
    """

    def __init__(self, axis: Axis, layer: Layer, parameters: Mapping[str, nn.Parameter], terms: int) -> None:
        self._layer, self._parameters, self._terms = layer, parameters, terms
        touched = [float(parameter.grad is not None) for parameter in parameters.values()]
        first = next(iter(parameters.values()))
        flags = torch.tensor(touched, dtype=first.dtype, device=first.device)
        flat = {}
        for name, parameter in parameters.items():
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            flat[name], parameter.grad = gradient.reshape(-1), None
        if not layer.shares:
            self._sum, self._works = axis.begin_sum(torch.cat([flags, *flat.values()]))
            return
        lengths = part_lengths(layer, parameters, axis)
        pieces: list[torch.Tensor] = []
        for index, length in enumerate(lengths):
            part = [layer.shares[name].part(flat[name], index) for name in parameters]
            pieces += [flags, *part, flags.new_zeros(length - sum(len(piece) for piece in part))]
        self._sum, self._works = axis.begin_sum(
            torch.cat(pieces), [len(flags) + length for length in lengths]
        )

    def refuse_late(self) -> None:
        """Refuse gradients that have come since the bucket began.

        Raises:
            TrainerError: there are some, which the sums are without.
        """
        late = [name for name, parameter in self._parameters.items() if parameter.grad is not None]
        if late:
            raise TrainerError(
                f"layer {self._layer.index} got gradients of {', '.join(late)} after the step's last "
                "backward had left it. To fix: let a layer's own backward give its parameters their gradients"
            )

    def counts(self) -> torch.Tensor:
        """By parameter, how many replicas have a gradient; waits for the sums."""
        for work in self._works:
            work.wait()
        return self._sum[: len(self._parameters)].float()

    def give(self, counts: Sequence[float]) -> None:
        """Give the parameters, or this replica's shares of them, their mean gradients."""
        offset = len(self._parameters)
        self._sum[offset:].div_(self._terms)
        for name, count in zip(self._parameters, counts, strict=True):
            learnt = self._layer.learnt(name)
            if learnt is None:
                continue
            mean = self._sum[offset : offset + learnt.numel()].view(learnt.shape)
            offset += learnt.numel()
            if count > 0:
                # An optimizer's kernel wants a gradient laid out as its parameter is.
                learnt.grad = mean if learnt.is_contiguous() else torch.empty_like(learnt).copy_(mean)


class GradientBuckets:
    """Gradients of a step made the mean over the data axis: a bucket a layer, the last layer's first.

    A layer's bucket starts once no backward of the step adds to its gradients, while those of earlier layers
    still run.  Every replica starts them in this order, so they meet.  A parameter without a gradient on one
    replica (no token took this way) counts as zero there; one without on all of them keeps none.
    """

    def __init__(self, axis: Axis, layers: Iterable[Layer], microbatches: int = 1) -> None:
        """Begin a step, with no gradients yet.

        Args:
            axis: the replicas.
            layers: that this rank holds.
            microbatches: of the step on this replica, by which gradients are divided after the backward.
        """
        self._axis, self._microbatches = axis, microbatches
        self._waiting = sorted(layers, key=lambda layer: layer.index) if axis.size > 1 else []
        self._ended: set[int] = set()
        self._buckets: list[_Bucket] = []

    def layer_ended(self, index: int) -> None:
        """No backward of the step adds to this layer's gradients, sums over microbatches, any more."""
        self._ended.add(index)
        while self._waiting and self._waiting[-1].index in self._ended:
            self._start(self._waiting.pop(), self._microbatches)

    def finish(self) -> None:
        """Start what has not, and give all parameters their mean gradients; collective over the axis."""
        while self._waiting:
            self._start(self._waiting.pop(), 1)
        for bucket in self._buckets:
            bucket.refuse_late()
        counts = [bucket.counts() for bucket in self._buckets]
        for bucket, of in zip(self._buckets, _as_lists(counts), strict=True):
            bucket.give(of)
        self._buckets.clear()

    def _start(self, layer: Layer, microbatches: int) -> None:
        for parameters in learning_by_type(layer):
            self._buckets.append(_Bucket(self._axis, layer, parameters, microbatches * self._axis.size))


def average_over_replicas(world: World, layers: LayerSet) -> None:
    """Make every gradient the mean over the data axis; collective over that axis."""
    GradientBuckets(world.data, layers).finish()


@torch.no_grad()
def gather_weights(world: World, layers: LayerSet) -> None:
    """Get the parts of the weights that other replicas have updated; collective over the data axis."""
    axis = world.data
    for layer in layers:
        if not layer.shares:
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
    """By replica, numbers of its part of a layer's parameters: as many for all where parameters are cut."""
    shares = [layer.shares[name] for name in parameters]
    lengths = [
        sum(end - begin for begin, end in bounds) for bounds in zip(*(s.bounds for s in shares), strict=True)
    ]
    return [max(lengths)] * axis.size if any(share.is_cut for share in shares) else lengths


def learning_by_type(layer: Layer, without: Collection[str] = ()) -> list[dict[str, nn.Parameter]]:
    """A layer's parameters that learn, by name, those of each number type together."""
    found: dict[torch.dtype, dict[str, nn.Parameter]] = {}
    for name, parameter in layer.module.named_parameters():
        if parameter.requires_grad and name not in without:
            found.setdefault(parameter.dtype, {})[name] = parameter
    return list(found.values())


def _as_lists(counts: Sequence[torch.Tensor]) -> list[list[float]]:
    """The tensors' numbers; a GPU is waited for once."""
    if not counts:
        return []
    together: list[float] = torch.cat(list(counts)).tolist()
    rest = iter(together)
    return [[next(rest) for _ in of] for of in counts]


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
    counted: list[nn.Parameter] = []
    for layer in layers:
        if world.data.index > 0 and not layer.shares:
            continue
        cut = slicings(layer.module)
        learnt = (
            layer.learnt(name)
            for name, _ in layer.module.named_parameters()
            if name in cut or world.tensor.index == 0
        )
        counted += [parameter for parameter in learnt if parameter is not None]
    return squared_gradient_norm(counted)
