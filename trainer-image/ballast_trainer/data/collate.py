"""Batches of inputs and targets from samples: columns of rows, padding, or a function of the user."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from ballast_policies.contract.job.model import ColumnsConfig

from ballast_trainer.errors import ConfigurationError
from ballast_trainer.trees import Constant, Node, Structure, Tree, flatten

Batch = tuple[Tree, torch.Tensor]
"""Inputs, a tensor or a tree of them, and targets; the first dimension of all is the number of samples, of
packed ones the number of rows."""

BatchFunction = Callable[[int, int, int], Batch]
"""``batch(seed, step, size)``: inputs and targets of a step; a pure function, the same on every rank."""

IGNORED = -100
"""Target that no loss counts, as PyTorch's cross entropy leaves it out."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchForm:
    """Form of a batch of samples, and the places of its inputs and targets.

    Attributes:
        field: of the configuration that names the data, e.g. ``data``.
        collate: from a list of samples to a batch; None: torch's default.
        columns: of the two in samples or batches that are mappings; None: they are pairs.
        multiple: samples are padded to the longest of the batch, rounded up to a multiple of this; None: they
            have one length.
        rows: that samples are packed into; None: each is a row of its own.
        next_tokens: whether the model's targets are the tokens that follow its inputs.
        shift: whether targets are the inputs' own tokens, and become those that follow.
        divided: whether a batch has several microbatches.
    """

    field: str = "data"
    collate: Callable[[list[Any]], Any] | None = None
    columns: ColumnsConfig | None = None
    multiple: int | None = None
    rows: int | None = None
    next_tokens: bool = False
    shift: bool = False
    divided: bool = True

    def of_samples(self, samples: list[Any]) -> Any:
        """A batch of these samples.

        Raises:
            ConfigurationError: they have no such columns, or no one length.
        """
        if self.collate is not None:
            return self.collate(samples)
        if isinstance(samples[0], Mapping):
            samples = [tuple(map(self._as_tensor, self._pair(sample))) for sample in samples]
        if self.rows is not None:
            return self._packed([self._tensors(sample) for sample in samples], self.rows)
        if self.multiple is not None:
            samples = [self._tensors(sample) for sample in samples]
            return tuple(
                _padded(list(side), self.multiple, value)
                for side, value in zip(zip(*samples, strict=True), (0, IGNORED), strict=True)
            )
        shapes = {tuple(value.shape) for value in map(_first, samples) if isinstance(value, torch.Tensor)}
        if len(shapes) > 1:
            raise ConfigurationError(
                f"{self.field}.name",
                f"samples of one batch have the shapes {', '.join(map(str, sorted(shapes)))}. "
                f"To fix: {self.field}.padToMultipleOf, or {self.field}.collate",
            )
        return torch.utils.data.default_collate(samples)

    def checked(self, batch: Any, size: int) -> Batch:
        """Inputs and targets of ``size`` samples.

        Raises:
            ConfigurationError: the batch has none, the inputs' own tokens as targets of a model whose
                targets are the next ones, or next ones that are to be shifted.
        """
        pair = self._pair(batch) if isinstance(batch, Mapping) else batch
        inputs, targets = whole_batch(pair, self.rows or size, f"{self.field}.name", divided=self.divided)
        tokens = inputs["input_ids"] if isinstance(inputs, Mapping) and "input_ids" in inputs else inputs
        if self.shift and self.rows is None:
            targets = self._shifted(tokens, targets)
        elif self.next_tokens and _are_at(0, tokens, targets) and not _are_at(1, tokens, targets):
            raise ConfigurationError(
                f"{self.field}.name",
                "the targets are the inputs' own tokens, as transformers takes labels, which it shifts. Here "
                f"the model would learn to repeat its input. To fix: {self.field}.shiftLabels: true, or as "
                "target of each token the one that follows it, of the last -100",
            )
        return inputs, targets

    def _shifted(self, tokens: Any, targets: torch.Tensor) -> torch.Tensor:
        """Targets, of a sample or of rows, of which each is the one that followed."""
        if not targets.dim() or targets.is_floating_point():
            wrong = f"targets of shape {tuple(targets.shape)} ({targets.dtype}) are no labels of tokens"
        elif _are_at(1, tokens, targets) and not _are_at(0, tokens, targets):
            wrong = "the targets are next tokens already"
        else:
            last = torch.full_like(targets[..., :1], IGNORED)
            return torch.cat([targets[..., 1:], last], dim=-1)
        raise ConfigurationError(f"{self.field}.shiftLabels", f"{wrong}. To fix: leave it out")

    def _packed(self, samples: list[tuple[torch.Tensor, torch.Tensor]], rows: int) -> Batch:
        """Rows of samples, each of which goes into the shortest, the longest first; filling comes last."""
        for tokens, targets in samples:
            if (
                tokens.dim() != 1
                or not len(tokens)
                or tokens.is_floating_point()
                or tokens.shape != targets.shape
            ):
                raise ConfigurationError(
                    f"{self.field}.packing",
                    f"a sample has inputs of shape {tuple(tokens.shape)} ({tokens.dtype}) and targets of "
                    f"shape {tuple(targets.shape)}. To fix: some tokens, and a target for each",
                )
        places: list[list[int]] = [[] for _ in range(rows)]
        lengths = [0] * rows
        for place in sorted(range(len(samples)), key=lambda place: -len(samples[place][0])):
            row = lengths.index(min(lengths))
            places[row].append(place)
            lengths[row] += len(samples[place][0])
        if self.shift:
            samples = [(tokens, self._shifted(tokens, targets)) for tokens, targets in samples]
        # In the order of the data.
        packed = [[samples[place] for place in sorted(row)] for row in places]
        columns = (
            ([torch.cat([tokens for tokens, _ in row]) for row in packed], 0),
            # Each filling token is a sample of its own, at a position that every model has.
            ([torch.cat([torch.arange(len(tokens)) for tokens, _ in row]) for row in packed], 0),
            ([torch.cat([targets for _, targets in row]) for row in packed], IGNORED),
        )
        tokens, positions, targets = (_padded(rows, self.multiple or 1, fill) for rows, fill in columns)
        return {"input_ids": tokens, "position_ids": positions}, targets

    def _pair(self, row: Mapping[str, Any]) -> tuple[Any, Any]:
        known = ", ".join(map(str, row))
        if self.columns is None:
            raise ConfigurationError(
                f"{self.field}.columns",
                f"missing, and the data are rows of {known}. "
                "To fix: e.g. {inputs: input_ids, targets: labels}, or a collate function that gives a pair",
            )
        names = {"inputs": self.columns.inputs, "targets": self.columns.targets}
        for key, name in names.items():
            if name not in row:
                reason = f"{name!r} is not among {known}. To fix: one of these"
                raise ConfigurationError(f"{self.field}.columns.{key}", reason)
        return row[self.columns.inputs], row[self.columns.targets]

    def _as_tensor(self, value: Any) -> torch.Tensor:
        try:
            return torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigurationError(
                f"{self.field}.columns",
                f"a {type(value).__name__} is no tensor of numbers ({error}). "
                f"To fix: {self.field}.collate, which makes tensors of it",
            ) from error

    def _tensors(self, sample: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if not (isinstance(sample, tuple | list) and len(sample) == 2):
            reason = f"a sample is {type(sample).__name__}, not a pair. To fix: return inputs and targets"
            raise ConfigurationError(f"{self.field}.name", reason)
        return self._as_tensor(sample[0]), self._as_tensor(sample[1])


def _are_at(places: int, tokens: Any, targets: torch.Tensor) -> bool:
    """True if the targets that count are the tokens so many places ahead."""
    if not isinstance(tokens, torch.Tensor) or tokens.shape != targets.shape or not tokens.dim():
        return False
    ahead, targets = tokens[..., places:], targets[..., : tokens.shape[-1] - places]
    counted = targets != IGNORED
    return bool((counted.any() or places) and (targets == ahead)[counted].all())


def whole_batch(batch: Any, size: int, field: str, *, divided: bool) -> Batch:
    """Inputs and targets, if the batch is a pair of ``size`` samples; inputs may be a tree.

    ``divided``: into microbatches.

    Raises:
        ConfigurationError: it is not.
    """
    if not (isinstance(batch, tuple | list) and len(batch) == 2):
        reason = f"gives {type(batch).__name__}, not a pair of inputs and targets. To fix: return both"
        raise ConfigurationError(field, reason)
    inputs, targets = batch
    try:
        tensors, structure = flatten(inputs)
    except TypeError:
        reason = (
            f"inputs are {type(inputs).__name__}, not a tensor. To fix: return tensors, or a tree of them"
        )
        raise ConfigurationError(field, reason) from None
    if not isinstance(targets, torch.Tensor):
        reason = f"targets are {type(targets).__name__}, not a tensor. To fix: return a tensor"
        raise ConfigurationError(field, reason)
    if divided and _has_list(structure, size):
        raise ConfigurationError(
            field,
            f"inputs have a list of {size} values, one a sample, which microbatches do not divide as "
            "tensors. To fix: a tensor of numbers in its place, or a collate function that leaves it out; a "
            "dict in its place where they are of all samples",
        )
    for name, value in (*(("inputs", value) for value in tensors), ("targets", targets)):
        if value.dim() == 0 or len(value) != size:
            raise ConfigurationError(
                field,
                f"{name} have shape {tuple(value.shape)}, pipeline.globalBatchSize is {size}. "
                f"To fix: give batches of {size}; a loader: batch_size={size}, drop_last=True",
            )
    return inputs, targets


def _has_list(structure: Structure, size: int) -> bool:
    """True if some list or plain tuple in a tree has so many constants that differ, and nothing else."""
    if not isinstance(structure, Node):
        return False
    children = structure.children
    constant = structure.kind in (list, tuple) and all(isinstance(child, Constant) for child in children)
    differ = len(children) == size and len(set(children)) > 1
    return (constant and differ) or any(_has_list(child, size) for child in children)


def _first(sample: Any) -> Any:
    return sample[0] if isinstance(sample, tuple | list) and sample else sample


def _padded(values: list[torch.Tensor], multiple: int, fill: int) -> torch.Tensor:
    """[samples, length, ...]; what has no length is stacked as it is."""
    if values[0].dim() == 0:
        return torch.stack(values)
    longest = -(-max(map(len, values)) // multiple) * multiple
    whole = values[0].new_full((len(values), longest, *values[0].shape[1:]), fill)
    for row, value in zip(whole, values, strict=True):
        row[: len(value)] = value
    return whole
