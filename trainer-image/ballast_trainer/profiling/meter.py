"""Seconds and bytes of each layer, measured in the running job.

A :class:`Meter` is told when a microbatch's work begins and ends on this rank, and when the work
passes from one layer to the next.  On the CPU it reads the thread's own CPU time, so that a busy
machine does not disturb the measurement; on a GPU it leaves events between the kernels, and reads them once
the seconds are asked for: after the step's backward, where the rank waits for the gradients' norm anyway.
In a step measured by layer, the bytes that layers keep for their backward are counted too, of the
first microbatch that each stage computes.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ballast_trainer.distributed.activity import ACTIVITY, Limit
from ballast_trainer.gpu_emulation import EmulatedSpeed
from ballast_trainer.profiling.activations import SavedTensors, weight_gradient_bytes
from ballast_trainer.trees import Tree, byte_count

Mark = Any
"""Seconds, or an event of the device."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Elapsed:
    """Seconds between two events, for ``into[layer]``."""

    into: list[float]
    layer: int
    began: Mark
    ended: Mark
    factor: float

    def read(self) -> None:
        """Add them; waits for the second event."""
        self.ended.synchronize()
        self.into[self.layer] += self.factor * self.began.elapsed_time(self.ended) / 1e3


class Meter:
    """Seconds per layer of this rank, for the step that runs.

    Attributes:
        forward, backward, optimizer: seconds of each layer this step, already multiplied by the
            emulated slow-down (forward and backward; the optimizer is not padded).
        by_layer: whether this step's seconds are measured by layer.
        always_busy: whether ``busy`` is measured in every step; else in those measured by layer, and where a
            slower device is emulated.
        microbatch: the microbatch that runs; None outside of a schedule's chunks.
        step: the step that runs, 0-based.
        first_microbatch: place of this replica's first microbatch among those of the whole step.
        message_bytes: bytes that the newest forward of a stage sends on.
        output_bytes: size of each layer's output, of the newest microbatch that was counted.
        bytes: of all layers in one list of 4 L, of one microbatch of this step: what they keep for their
            backward, outputs, gradients into weights, and what repeated forwards keep; 0 where not counted.
        kept: counter of the bytes that the microbatch of the newest forward keeps; None: not counted.
        compares_ranks: whether other work takes as long on its clock as layers do: not where these wait.
        sums_updates: whether a step may have several updates, whose seconds add up.
    """

    def __init__(
        self,
        layer_count: int,
        device: torch.device,
        speed: EmulatedSpeed | None,
        *,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Prepare; ``speed``: the slower device that is emulated, if any.

        The clock's default is the thread's CPU time where this rank computes on one thread of a CPU, else
        wall time.  Layers that wait rather than compute need wall time.
        """
        self.layer_count = layer_count
        self.microbatch: int | None = None
        self.step = 0
        self.first_microbatch = 0
        self.message_bytes = 0
        self._device = device
        self._speed = speed
        one_thread = device.type == "cpu" and torch.get_num_threads() == 1
        self.compares_ranks = clock is None
        self._clock = clock or (time.thread_time if one_thread else time.perf_counter)
        # A device that is emulated waits for its kernels: it must know how long to sleep.
        self._on_events = device.type == "cuda" and speed is None and clock is None
        self._unread: list[_Elapsed] = []
        self._mark: Mark = 0.0
        self._chunk_mark: Mark = 0.0
        self._chunk_wall = 0.0
        self.sums_updates = False
        self.always_busy = False
        self._timed = True
        self._into: list[float] = []
        self._layer: int | Mapping[int, float] | None = None
        self.optimizer = [0.0] * layer_count
        self.output_bytes = [0] * layer_count
        self.kept: SavedTensors | None = None
        self.start_step(0)

    def start_step(self, step: int, *, by_layer: bool = True) -> None:
        """Forget the last step's seconds; the optimizer's are kept, since they are counted after a step."""
        self.step = step
        self.by_layer = by_layer
        if self._on_events:
            self._stream = torch.cuda.current_stream(self._device)
        # Reading a thread's clock is a system call: skipped where the seconds are not used.
        self._timed = by_layer or self.always_busy or self._speed is not None
        self._busy = [0.0]
        self.forward = [0.0] * self.layer_count
        self.backward = [0.0] * self.layer_count
        self.bytes = [0.0] * (4 * self.layer_count)
        self._counted: set[int] = set()

    def start_count(self, first_layer: int, source: Tree) -> SavedTensors | None:
        """A stage's forward begins; returns its record of kept tensors, once in a step measured by layer."""
        self.kept = None
        if self.by_layer and self.microbatch is not None and first_layer not in self._counted:
            self._counted.add(first_layer)
            self.kept = SavedTensors(source)
        return self.kept

    def add_kept(self, modules: Sequence[nn.Module] = ()) -> None:
        """Count the noted tensors; ``modules`` hold the weights.  Its seconds count for no layer."""
        if self.kept is None:
            return
        with self._aside():
            for layer, count in self.kept.count(modules).items():
                self.bytes[layer] += count

    def add_output(self, layer: int, output: Tree, sources: Sequence[object]) -> None:
        """Count a layer's output, and the gradients into its weights; ``sources`` are its input's nodes."""
        self.output_bytes[layer] = byte_count(output)
        with self._aside():
            self.bytes[self.layer_count + layer] = float(self.output_bytes[layer])
            self.bytes[2 * self.layer_count + layer] = float(weight_gradient_bytes(output, sources))

    def add_repeated(self, layer: int, module: nn.Module, source: Tree, kept: Sequence[torch.Tensor]) -> None:
        """Count what a layer's repeated forward keeps; ``source`` is its input."""
        with self._aside():
            counter = SavedTensors(source)
            for tensor in kept:
                counter.keep(layer, tensor)
            self.bytes[3 * self.layer_count + layer] = float(counter.count([module]).get(layer, 0))

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Exclude the work inside from the measured seconds."""
        began = self._now()
        yield
        ended = self._now()
        if self._layer is not None:
            self._add(self._into, self._layer, began, ended, -1.0)
        self._add(self._busy, 0, began, ended, -1.0)

    def _now(self) -> Mark:
        """A mark in the device's work: the seconds of a clock, or an event between its kernels."""
        if self._on_events:
            event = torch.cuda.Event(enable_timing=True)
            # Asking for the stream takes longer than the event; it is one for all of a step.
            event.record(self._stream)
            return event
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._clock()

    def _add(
        self,
        into: list[float],
        layer: int | Mapping[int, float],
        began: Mark,
        ended: Mark,
        factor: float = 1.0,
    ) -> None:
        """Add the seconds between two marks to a layer's, or by parts to several layers'."""
        for index, part in layer.items() if isinstance(layer, Mapping) else ((layer, 1.0),):
            if self._on_events:
                self._unread.append(_Elapsed(into, index, began, ended, factor * part))
            else:
                into[index] += factor * part * (ended - began)

    def _read(self) -> None:
        """Read the events; waits for the newest of them."""
        for elapsed in self._unread:
            elapsed.read()
        self._unread.clear()

    def timed(self, work: Callable[[], object]) -> float:
        """Seconds of some work, as those of a layer are measured."""
        seconds, began = [0.0], self._now()
        work()
        ended = self._now()
        if self._on_events:
            _Elapsed(seconds, 0, began, ended, 1.0).read()
            return seconds[0]
        return float(ended - began) * (self._speed.factor if self._speed is not None else 1.0)

    def start_optimizer(self) -> Mark:
        """The optimizer's part of a step begins; returns now, for :meth:`add_optimizer`.

        In a step not measured by layer, the seconds of the last such step remain.
        """
        if not self.by_layer:
            return 0.0
        if not self.sums_updates:
            self.optimizer = [0.0] * self.layer_count
        return self._now()

    def begin(self, microbatch: int, into: list[float], layer: int | Mapping[int, float] | None) -> None:
        """Work on a microbatch begins; its seconds go to ``into`` (forward or backward).

        ``layer``: the first that works; or the parts that several have in it, as it cannot be seen.
        """
        self.microbatch = microbatch
        self._into = into
        self._layer = layer if self.by_layer else None
        if into is self.backward:
            last = max(layer, default=None) if isinstance(layer, Mapping) else layer
            ACTIVITY.now = (Limit.ANY, "the backward of the stage that ends with layer", last)
        if self._speed is not None:
            self._chunk_wall = time.perf_counter()
        if self._timed:
            self._mark = self._chunk_mark = self._now()

    def enter(self, layer: int) -> None:
        """The work passes to ``layer``."""
        now = self._now()
        if self._layer is not None:
            self._add(self._into, self._layer, self._mark, now)
        self._mark = now
        self._layer = layer

    def end(self) -> None:
        """Work on the microbatch ends; pads it where a slower device is emulated."""
        self.microbatch = ACTIVITY.now = None
        if not self._timed:
            return
        now = self._now()
        if self._layer is not None:
            self._add(self._into, self._layer, self._mark, now)
        self._add(self._busy, 0, self._chunk_mark, now)
        if self._speed is not None:
            self._speed.pad(self._chunk_wall, now - self._chunk_mark)

    def add_optimizer(self, layer: int, began: Mark) -> Mark:
        """Count the optimizer's seconds of ``layer`` since ``began``; returns now, for the next one."""
        if not self.by_layer:
            return 0.0
        now = self._now()
        self._add(self.optimizer, layer, began, now)
        return now

    def busy_seconds(self) -> float:
        """Seconds of this rank's forward and backward this step, multiplied by the emulated slow-down."""
        self._read()
        return self._busy[0] * (self._speed.factor if self._speed is not None else 1.0)

    def seconds(self) -> list[float]:
        """Forward, backward, optimizer of all layers in one list of 3 L; zero for other ranks' layers."""
        self._read()
        factor = self._speed.factor if self._speed is not None else 1.0
        padded = [factor * second for second in self.forward + self.backward]
        return padded + self.optimizer
