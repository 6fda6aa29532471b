"""Recording of the ranks' actions in some steps, as a chrome trace like the simulated one.

A recording meter notes when each action began and ended, by the machine's clock: ranks of one
machine share it.  At the end of the run rank 0 gathers these over the store and writes the file.
"""

import datetime
import itertools
import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from ballast_policies.contract.decode import parse_json
from ballast_policies.planning.schedules.exports import TraceEvent, trace_json

from ballast_trainer.gpu_emulation import EmulatedSpeed
from ballast_trainer.profiling.meter import Mark, Meter

logger = logging.getLogger(__name__)

GATHER_SECONDS = 30.0
"""Seconds that rank 0 waits for the notes of the others once it is done."""

TRACED_STEPS = 2

_CATEGORIES = {"F": "forward", "B": "backward", "U": "update"}


class RecordingMeter(Meter):
    """A meter that notes ``actions``: kind ``F``, ``B`` or ``U``, step, microbatch, begin, end (seconds)."""

    def __init__(
        self,
        layer_count: int,
        device: torch.device,
        speed: EmulatedSpeed | None,
        *,
        first_step: int,
    ) -> None:
        super().__init__(layer_count, device, speed)
        self.actions: list[tuple[str, int, int, float, float]] = []
        self._steps = range(first_step, first_step + TRACED_STEPS)
        self._kind = "F"
        self._noted_microbatch = 0
        self._began = 0.0

    def begin(self, microbatch: int, into: list[float], layer: int | Mapping[int, float] | None) -> None:
        """See :class:`Meter`."""
        self._kind = "F" if into is self.forward else "B"
        self._noted_microbatch, self._began = microbatch, time.perf_counter()
        super().begin(microbatch, into, layer)

    def end(self) -> None:
        """See :class:`Meter`."""
        super().end()
        self._note(self._kind, self._noted_microbatch)

    def start_optimizer(self) -> Mark:
        """See :class:`Meter`."""
        self._began = time.perf_counter()
        return super().start_optimizer()

    def add_optimizer(self, layer: int, began: Mark) -> Mark:
        """See :class:`Meter`."""
        now = super().add_optimizer(layer, began)
        self._note("U", layer)
        self._began = time.perf_counter()
        return now

    def _note(self, kind: str, number: int) -> None:
        if self.step in self._steps:
            self.actions.append((kind, self.step, number, self._began, time.perf_counter()))


def write_trace(path: Path, meter: RecordingMeter, *, rank: int, ranks: int, store: Any) -> None:
    """Gather all ranks' notes; rank 0 writes them, or tells why it cannot: the training is done.

    ``rank``, ``ranks``: at the start; ranks that were released have left their notes.
    """
    if rank != 0:
        store.set(_key(rank), json.dumps(meter.actions))
        return
    noted = {0: meter.actions}
    try:
        for other in range(1, ranks):
            store.wait([_key(other)], datetime.timedelta(seconds=GATHER_SECONDS))
            noted[other] = parse_json(store.get(_key(other)).decode())
        if any(noted.values()):
            path.write_text(chrome_trace_of(noted))
        else:
            logger.warning(
                "%s: no step was traced. To fix: --trace-step of a step that this run trains", path
            )
    except (OSError, RuntimeError) as error:  # or a rank is gone without its notes
        logger.warning("%s: no trace is written: %s", path, error)


def chrome_trace_of(noted: dict[int, list[tuple[str, int, int, float, float]]]) -> str:
    """JSON for chrome://tracing and Perfetto; a row a rank, times from the first action's begin."""
    zero = min((action[3] for actions in noted.values() for action in actions), default=0.0)

    def event(kind: str, step: int, number: int, begin: float, end: float) -> TraceEvent:
        where = {"step": step, "layer" if kind == "U" else "microbatch": number}
        return f"{kind}{number}", _CATEGORIES[kind], begin - zero, end - zero, where

    rows = {rank: itertools.starmap(event, actions) for rank, actions in noted.items()}
    return trace_json("measured", rows)


def _key(rank: int) -> str:
    return f"trace/{rank}"
