"""Traces of torch's profiler for chosen steps and ranks, and memory snapshots where memory runs out."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from ballast_policies.contract.job.output import ProfilingConfig

from ballast_trainer.errors import ConfigurationError

logger = logging.getLogger(__name__)

_ALLOCATIONS = 100_000
"""Newest allocations that a snapshot has, as in torchtitan."""


class StepProfiler:
    """Traces the steps that the configuration names, on one rank; without one it does nothing."""

    def __init__(self, config: ProfilingConfig | None, *, rank: int, device: torch.device) -> None:
        """Prepare.

        Raises:
            ConfigurationError: the folder cannot be written to; a snapshot is wanted of the CPU's memory.
        """
        self._config, self._rank, self._device = config, rank, device
        self._running: Any = None
        self._began = 0
        if config is None:
            return
        if config.memory_snapshot and device.type != "cuda":
            reason = f"ranks compute on {device.type}, whose allocations are not recorded. To fix: false"
            raise ConfigurationError("profiling.memorySnapshot", reason)
        try:
            Path(config.path).mkdir(parents=True, exist_ok=True)
            probe = Path(config.path) / f".rank-{rank}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            reason = f"rank {rank} cannot write there: {error}. To fix: a folder that all ranks can write to"
            raise ConfigurationError("profiling.path", reason) from error
        if config.memory_snapshot:
            torch.cuda.memory._record_memory_history(max_entries=_ALLOCATIONS)

    def before_step(self, step: int) -> None:
        """Step ``step``, from 0, comes next: begin the trace if it is its first."""
        config = self._config
        if config is None or self._running is not None or (config.ranks and self._rank not in config.ranks):
            return
        if config.first_step - 1 <= step < config.first_step - 1 + config.steps:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self._device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._running = torch.profiler.profile(activities=activities, record_shapes=True)
            self._running.start()
            self._began = step

    def after_step(self, done: int) -> None:
        """``done`` steps are done: write the trace if it has all of its steps."""
        if self._config is not None and done >= self._config.first_step - 1 + self._config.steps:
            self.close(done)

    @contextlib.contextmanager
    def on_out_of_memory(self) -> Iterator[None]:
        """Write a snapshot where the work inside runs out of memory."""
        try:
            yield
        except Exception as error:
            if self._config is not None and self._config.memory_snapshot and _ran_out(error):
                path = Path(self._config.path) / f"rank-{self._rank}.memory.pickle"
                try:
                    torch.cuda.memory._dump_snapshot(str(path))
                    logger.error("the allocations before memory ran out are in %s", path)
                except Exception as failure:  # the error itself matters more
                    logger.warning("no memory snapshot: %s", failure)
            raise

    def close(self, done: int) -> None:
        """Write the trace that runs, if one does: it ends after ``done`` steps."""
        running, self._running = self._running, None
        if running is None or self._config is None:
            return
        path = Path(self._config.path) / f"rank-{self._rank}.steps-{self._began + 1}-{done}.json"
        try:
            running.stop()
            running.export_chrome_trace(str(path))
            logger.info("the trace of steps %d to %d is in %s", self._began + 1, done, path)
        except (OSError, RuntimeError) as error:
            logger.warning("no trace of steps %d to %d: %s", self._began + 1, done, error)


def _ran_out(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__
    return False
