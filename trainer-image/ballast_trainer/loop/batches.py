"""The batches of a job's steps on one rank: this replica's microbatches, and how much each of them counts."""

import json
import logging
import math
import zlib
from collections.abc import Sequence

import torch
from ballast_policies.contract.job.job import JobConfig

from ballast_trainer.data.collate import Batch
from ballast_trainer.data.read_ahead import RECENT_BATCHES, ReadAhead
from ballast_trainer.data.sources import LoaderPosition, ReplayedLoader, ShuffledDataset, read_batch
from ballast_trainer.distributed.activity import ACTIVITY
from ballast_trainer.distributed.process_group import World
from ballast_trainer.errors import CheckpointError, DataError
from ballast_trainer.models.loss_weights import weights_of
from ballast_trainer.models.protocol import Model
from ballast_trainer.trees import Tree, mapped

logger = logging.getLogger(__name__)

_SAMPLES, _LENGTH, _SORTED_BY = "samples", "of", "sortedBy"


def own_part(batch: Batch, world: World, device: torch.device, *, pinned: bool = False) -> Batch:
    """This replica's part of a whole batch, on ``device``; ``pinned``: it is in page-locked memory."""
    inputs, targets = batch
    share = len(targets) // world.data.size
    mine = slice(world.data.index * share, (world.data.index + 1) * share)
    part = mapped(lambda one: one[mine].to(device, non_blocking=pinned), inputs)
    return part, targets[mine].to(device, non_blocking=pinned)


_COMPARED = 4096
"""Numbers of a batch's targets that ranks compare, spread over all of it."""
_APART = 1e-8
"""Variance of the ranks' digests from which they are of different targets, not of CPUs that round apart."""


def targets_digest(targets: torch.Tensor) -> float:
    """A number from the targets of a whole batch; of floats one that rounding errors hardly change."""
    # Odd: an even step would meet the same columns in each row.
    part = targets.detach().flatten()[:: targets.numel() // _COMPARED | 1].cpu()
    if not (part.is_floating_point() or part.is_complex()):
        return zlib.crc32(part.contiguous().numpy().tobytes()) / 2**32
    size = part.abs().double().nan_to_num(nan=1.0, posinf=2.0)
    return math.log1p(float(size @ torch.logspace(0, 3, len(size), dtype=torch.float64)))


def compared(digest: float | None) -> list[float]:
    """A rank's summand for :func:`refuse_other_targets`; ``digest`` is None where it has read no targets."""
    return [0.0] * 3 if digest is None else [1.0, digest, digest * digest]


def refuse_other_targets(summed: Sequence[float], *, field: str, what: str) -> None:
    """Refuse a batch whose targets differ among the ranks that have read it.

    The first stage's rank uses the inputs that it has read, the last one's its targets.  ``summed`` is over
    the ranks, of their :func:`compared`; ``field`` of the configuration names the data, ``what`` the batch.

    Raises:
        DataError: the variance of the digests is not 0.
    """
    readers, total, squares = summed
    if readers > 0 and squares / readers - (total / readers) ** 2 > _APART:
        raise DataError(
            f"{field}: the ranks have read different targets for {what}, so inputs and targets are not those "
            "of the same samples. To fix: the same files, len() and samples on every rank; what is drawn "
            "at random, from the arguments or torch's generator"
        )


class Batches:
    """Reads the data of each step, ahead of it where the configuration has workers for that."""

    def __init__(self, config: JobConfig, model: Model, device: torch.device) -> None:
        self._config, self._model, self._device = config, model, device
        self._targets: dict[int, torch.Tensor] = {}
        self._factors: dict[int, list[float]] = {}
        self._digests: dict[int, float] = {}
        self._newest: tuple[tuple[int, int, int], Batch] | None = None
        self._on_host: Tree = None
        self._ahead: ReadAhead | None = None
        if config.training.dataloader_num_workers > 0:
            self._ahead = ReadAhead(
                self._read,
                workers=config.training.dataloader_num_workers,
                last_step=config.total_steps,
                pinned=device.type == "cuda",
                told=lambda: dict(self.bad_samples),
            )

    @property
    def bad_samples(self) -> dict[int, str]:
        """Samples by number (of a loader: batches) that cannot be read and are left out, and why."""
        source = self._model.batch
        return source.bad.known if isinstance(source, ShuffledDataset | ReplayedLoader) else {}

    def of(self, step: int, world: World) -> Batch:
        """Inputs and targets of ``step``: the microbatches of this rank's replica."""
        key = step, world.data.index, world.data.size
        if self._newest is None or self._newest[0] != key:
            self._newest = key, self._moved(step, world)
        return self._newest[1]

    def inputs_on_host(self, step: int, world: World) -> Tree:
        """The inputs of :meth:`of` in the host's memory, where they were read."""
        self.of(step, world)
        return self._on_host

    def targets(self, step: int, world: World) -> tuple[torch.Tensor, ...]:
        """Targets of this replica's microbatches of ``step``; those of the newest few steps are kept."""
        if step not in self._targets:
            self.of(step, world)
        return self._targets[step].chunk(self._config.pipeline.microbatches // world.data.size)

    def factors(self, step: int, world: World) -> list[float]:
        """Factor of the mean loss of each microbatch of this replica, from the targets of all replicas."""
        if step not in self._factors:
            self.of(step, world)
        return self._factors[step]

    def compared(self, step: int) -> list[float]:
        """This rank's summand for :meth:`refuse_other_targets`."""
        self._digests = {kept: digest for kept, digest in self._digests.items() if kept >= step}
        return compared(self._digests.get(step))

    def refuse_other_targets(self, summed: Sequence[float], step: int) -> None:
        """Refuse a batch whose targets differ among the ranks that have read it. Raises DataError."""
        refuse_other_targets(summed, field=self._field, what=f"the batch of step {step + 1}")

    def agree_on_samples(self, step: int, world: World, *, reads: bool) -> None:
        """Agree on the samples of ``step`` that are left out; collective. ``reads``: this rank has data.

        Raises:
            DataError: more cannot be read than may be left out.
        """
        source = self._model.batch
        if not isinstance(source, ShuffledDataset | ReplayedLoader) or not source.bad.most or world.size == 1:
            return
        while True:
            if reads:
                self.of(step, world)
            with ACTIVITY.waiting(patient=True):
                told = world.gather(source.told(), patient=True)
            if not source.agree(told):
                break
            self._newest = None

    def position(self, step: int) -> str:
        """Position of the data before ``step``: a loader's own account, else the number of samples before.

        Raises:
            ConfigurationError: it cannot be saved.
        """
        source, seed = self._model.batch, self._config.training.seed
        samples = step * self._size
        if isinstance(source, ReplayedLoader):
            position = source.position(seed, step)
            if position is not None:
                return position.to_text()
        elif isinstance(source, ShuffledDataset):
            samples = source.samples_before(seed, step, self._size)
            sorted_by = source.sorted_by(seed, step, self._size)
            return json.dumps({_SAMPLES: samples, _LENGTH: source.length, _SORTED_BY: sorted_by})
        return json.dumps({_SAMPLES: samples})

    def continue_from(self, step: int, position: str) -> None:
        """Continue reading before ``step``, where :meth:`position` of another process was.

        Raises:
            CheckpointError: it is none of these.
        """
        source, seed = self._model.batch, self._config.training.seed
        of_loader = not position.startswith("{")
        if not position or (of_loader and not isinstance(source, ReplayedLoader)):
            return
        try:
            if of_loader and isinstance(source, ReplayedLoader):
                source.continue_from(seed, LoaderPosition.from_text(step, position))
                return
            noted = json.loads(position)
            samples, sorted_by = noted[_SAMPLES], noted.get(_SORTED_BY)
            for one in (samples, sorted_by or 0):
                if type(one) is not int or one < 0:
                    raise ValueError(one)
        except (ValueError, KeyError) as error:
            kind = "state of a loader" if of_loader else "number of samples"
            raise CheckpointError(
                f"the checkpoint of step {step} notes {position[:80]!r} as its place in the data, which is "
                f"no {kind}. To fix: remove it, to continue from an earlier one"
            ) from error
        if isinstance(source, ShuffledDataset):
            source.continue_from(seed, step, self._size, samples, sorted_by)
            if sorted_by and not self._config.training.group_by_length:
                logger.warning(
                    "training.groupByLength was true before step %d: some samples of this epoch come twice "
                    "or never. To fix, if it matters: true until the epoch ends",
                    step + 1,
                )
            before = noted.get(_LENGTH, source.length)
            if before != source.length:
                logger.warning(
                    "%s: the dataset has %d samples, and had %s before step %d: epochs begin elsewhere, and "
                    "some samples of this one come twice or never. To fix, if it matters: the data before",
                    self._field,
                    source.length,
                    before,
                    step + 1,
                )
        elif isinstance(source, ReplayedLoader) and samples != step * self._size:
            logger.warning(
                "%s: pipeline.globalBatchSize was another one before step %d, and the loader is read again "
                "by batches: some samples come twice or never. To fix: a dataset, or a loader "
                "with state_dict()",
                self._field,
                step + 1,
            )

    @property
    def _size(self) -> int:
        return self._config.pipeline.global_batch_size

    def close(self) -> None:
        """End the processes that read data."""
        self._newest = None
        if self._ahead is not None:
            self._ahead.close()

    def _moved(self, step: int, world: World) -> Batch:
        with ACTIVITY.doing(f"the batch of step {step + 1}"):
            inputs, targets = self._read(step) if self._ahead is None else self._read_ahead(step, self._ahead)
        self._on_host, _ = own_part((inputs, targets), world, torch.device("cpu"))
        found = own_part((inputs, targets), world, self._device, pinned=self._ahead is not None)
        self._targets[step] = found[1]
        for old in sorted(self._targets)[:-RECENT_BATCHES]:
            del self._targets[old]
            self._factors.pop(old, None)
        self._factors[step] = self._factors_of(step, targets, world)
        self._digests[step] = targets_digest(targets)
        return found

    def _read_ahead(self, step: int, ahead: ReadAhead) -> Batch:
        """The batch that a worker has read, unless it has a sample that others could not read."""
        batch, known = ahead.batch(step)
        source = self._model.batch
        if isinstance(source, ShuffledDataset) and (known or source.bad.known):
            source.bad.add(known)
            which = self._config.training.seed, step, self._size
            if source.chosen(*which, source.bad.known) != source.chosen(*which, known):
                return self._read(step)
        return batch

    @property
    def _field(self) -> str:
        return "model.name" if self._config.data is None else "data.name"

    def _read(self, step: int) -> Batch:
        """The whole batch of a step."""
        data = self._config.data
        return read_batch(
            self._model.batch,
            self._config.training.seed,
            step,
            self._size,
            field=self._field,
            name=self._config.model_name if data is None else data.name,
            what=f"the batch of step {step + 1}",
        )

    def _factors_of(self, step: int, targets: torch.Tensor, world: World) -> list[float]:
        weights = weights_of(self._model.loss_weight, targets, self._config.pipeline.microbatches)
        total = sum(weights)
        if total <= 0 and world.rank == 0 and step not in self._factors:
            logger.warning(
                "the batch of step %d has no target that counts: its loss and its gradients are 0. "
                "To fix: leave such samples out of the data",
                step + 1,
            )
        count = len(weights) // world.data.size
        mine = weights[world.data.index * count :][:count]
        return [weight * len(weights) / total if total > 0 else 0.0 for weight in mine]
